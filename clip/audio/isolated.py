"""Audio decoded in a process of its own, with limits of memory and time, in which no further file
can be opened and no address connected to, as videos are (`mtmd.clip.video.isolated`).

The worker gets a descriptor of the file; its samples come back block by block, at the rate that is
asked for, so it holds one of them. It reads one file and ends.
"""

from __future__ import annotations

import io
import json
import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from mtmd.base.cores import usable_cores
from mtmd.base.errors import AudioError
from mtmd.base.isolation.channel import Channel
from mtmd.base.isolation.file_at import FileAt, no_more_files
from mtmd.base.isolation.fork_server import ForkServer, Worker, WorkerFailed
from mtmd.base.isolation.limits import Limits
from mtmd.clip.audio.audio import AudioFacts, Samples, finite
from mtmd.clip.audio.decode import open_audio
from mtmd.clip.audio.limits import AudioLimits, check_channels, check_rate, check_seconds
from mtmd.clip.audio.resample import resampled, resampled_count
from mtmd.clip.image.decode import one_line

AT_ONCE = max(2, usable_cores().usable // 2)
MEMORY_BYTES = 512 << 20
_MESSAGE_BYTES = 1 << 16
_REQUEST_BYTES = 1 << 16
_BLOCK_BYTES = 64 << 20  # of one message: a block, and a frame more


class Remote:
    """Audio that a worker reads: `fd` is that of a file of `size` bytes. As `decode.Reader`, with
    samples at the rate `target`, None for that of the file.
    """

    def __init__(
        self, worker: Worker, fd: int, size: int, limits: AudioLimits, name: str, target: int | None
    ):
        self._worker, self._name, self._limits = worker, name, limits
        request = {"size": size, "name": name, "limits": asdict(limits), "target": target}
        with self._blamed():
            worker.send(json.dumps(request).encode(), fds=[fd])
            self._own = int(self._reported()["rate"])
        check_rate(self._own, name)
        self.rate = target or self._own
        self._facts: AudioFacts | None = None

    @property
    def facts(self) -> AudioFacts:
        assert self._facts is not None, "all blocks were read"
        return self._facts

    def blocks(self) -> Iterator[Samples]:
        count, maximum = 0, int(self._limits.max_seconds * self.rate)
        while True:
            with self._blamed():
                reported = self._reported()
                if "facts" in reported:
                    self._facts = self._checked(reported["facts"], count)
                    return
                data = self._worker.receive(_BLOCK_BYTES)
                samples = np.frombuffer(data, np.float32)
            count += len(samples)
            if count > maximum:
                check_seconds(count / self.rate, self._limits, self._name)
            yield samples

    def _checked(self, reported: dict[str, Any], count: int) -> AudioFacts:
        """Return what a worker says of a file of which `count` samples came, checked like anything
        from outside.
        """
        channels, samples = int(reported["channels"]), int(reported["samples"])
        check_channels(channels, self._name)
        if not count or count != resampled_count(samples, self._own, self.rate):
            raise ValueError
        notes = tuple(str(note)[:200] for note in reported["notes"][:8])
        codec = str(reported["codec"])[:32]
        return AudioFacts(samples / self._own, self._own, channels, codec, notes)

    def close(self) -> None:
        """End the connection. The worker ends by itself, as it serves one file only."""

    def _reported(self) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self._worker.receive(_MESSAGE_BYTES))
        if "error" in reported:
            raise AudioError(str(reported["error"])[:1000])
        return reported

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Blame the file for errors in what a worker sends, which is checked like anything from
        outside. Raises AudioError.
        """
        try:
            yield
        except WorkerFailed as error:
            raise AudioError(
                f"{self._name}: found audio that takes {error.needs} to read, expected a usual "
                "file; cut it, or encode it as WAV"
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise AudioError(
                f"{self._name}: found audio that made its decoder answer senselessly; encode it "
                "anew"
            ) from error


@contextmanager
def opened_isolated(
    fd: int, size: int, limits: AudioLimits, name: str, target: int | None = None
) -> Iterator[Remote]:
    """Open a file of `size` bytes as `decode.open_audio` does, to be read at the rate `target`.
    Waits while as many are being read as may at once. Raises AudioError, also for one that takes
    more memory or time than it may, and BusyError.
    """
    with _server().job(Limits(limits.cpu_s, MEMORY_BYTES)) as worker:
        yield Remote(worker, fd, size, limits, one_line(name), target)


def prepare(_: bytes) -> None:
    """Prepare the fork server: a short file is read, so that workers have all they need."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(16_000)
        made.writeframes(bytes(3200))
    file.seek(0)
    try:
        reader = open_audio(file)
    except AudioError:  # PyAV is not there: each file will say so
        return
    for _block in reader.blocks():
        pass
    reader.close()


def serve(channel: Channel, _prepared: Any) -> None:
    """Serve one file in a worker."""
    data, fds = channel.receive_with(1, _REQUEST_BYTES)
    try:
        with no_more_files():
            _read(channel, json.loads(data), fds[0])
    finally:
        for fd in fds:
            os.close(fd)


def _read(channel: Channel, request: dict[str, Any], fd: int) -> None:
    file = io.BufferedReader(FileAt(fd, int(request["size"])), 1 << 16)
    try:
        reader = open_audio(file, AudioLimits(**request["limits"]), request["name"])
        channel.send(json.dumps({"rate": reader.rate}).encode())
        decoded = (finite(block, request["name"]) for block in reader.blocks())
        for samples in resampled(decoded, reader.rate, request["target"] or reader.rate):
            channel.send(b'{"block": true}')
            channel.send(np.ascontiguousarray(samples).data.cast("B"))
        facts = reader.facts
        reported = asdict(facts) | {"samples": round(facts.seconds * facts.rate)}
        channel.send(json.dumps({"facts": reported}).encode())
    except AudioError as error:
        channel.send(json.dumps({"error": str(error)}).encode())


@lru_cache(maxsize=1)
def _server() -> ForkServer:
    """One for the whole process."""
    return ForkServer(__name__, at_once=AT_ONCE, jobs=1)
