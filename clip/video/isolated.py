"""Videos read in a process of their own, with limits of memory and time, in which no further file
can be opened and no address connected to: see `mtmd.clip.image.isolated`.

The worker gets a descriptor of the file, not its bytes, and reads what it needs; the frames come
back one by one, so it holds one of them. It reads one video and ends, so that what a decoder
leaves behind is not met by the next; a worker of its own costs a video 7 ms.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import inf, isfinite
from typing import Any

import numpy as np
from PIL import Image

from mtmd.base.cores import usable_cores
from mtmd.base.errors import OptionError, VideoError
from mtmd.base.isolation.channel import Channel
from mtmd.base.isolation.file_at import FileAt, no_more_files
from mtmd.base.isolation.fork_server import ForkServer, Worker, WorkerFailed
from mtmd.base.isolation.limits import Limits, address_space, allow_memory
from mtmd.clip.image.decode import one_line
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.video.container import THREADS
from mtmd.clip.video.decode import Reader, open_video
from mtmd.clip.video.limits import VideoLimits, check_facts, check_size
from mtmd.clip.video.video import Part, VideoFacts

AT_ONCE = max(2, usable_cores().usable // 2)
MEMORY_BYTES = (256 << 20) + THREADS * (160 << 20)  # threads set room aside that they do not use
MEMORY_BYTES_A_PIXEL = 80  # 16 frames of reference and one for each thread, of up to 3 bytes
_MESSAGE_BYTES = 1 << 16
_REQUEST_BYTES = 1 << 20


class Remote:
    """A video that a worker reads: `fd` is that of a file of `size` bytes. As `decode.Reader`."""

    def __init__(self, worker: Worker, fd: int, size: int, limits: VideoLimits, name: str):
        self._worker, self._name = worker, name
        request = {"size": size, "name": name, "limits": asdict(limits)}
        with self._blamed():
            worker.send(json.dumps(request).encode(), fds=[fd])
            reported = self._reported()
            if "memory" in reported:  # so many pixels are allowed no more
                memory = min(int(reported["memory"]), worker.limits.memory_bytes)
                worker.limits = replace(worker.limits, memory_bytes=memory)
                reported = self._reported()
            self.facts = _facts(reported)
        check_size(self.facts.width, self.facts.height, limits, name)
        check_facts(self.facts, limits, name)

    def close(self) -> None:
        """End the connection. The worker ends by itself, as it serves one video only."""

    def part(self, start: float | None, end: float | None) -> Part:
        with self._blamed():
            self._worker.send(json.dumps({"part": [start, end]}).encode())
            return _part(self._reported(), self.facts)

    def take(
        self, indices: Sequence[int], size: tuple[int, int]
    ) -> Iterator[tuple[int, float, Pixels]]:
        requested = {"indices": list(indices), "size": size}
        with self._blamed():
            self._worker.send(json.dumps(requested).encode())
        for index in [*indices, None]:
            with self._blamed():
                result = self._frame(index, size)
            if result is None:
                return
            yield result

    def _frame(self, index: int | None, size: tuple[int, int]) -> tuple[int, float, Pixels] | None:
        """The one at `index`; None after the last."""
        reported = self._reported()
        if "end" in reported:
            return None
        seconds = float(reported["time"])
        if reported["index"] != index or index is None or not isfinite(seconds):
            raise ValueError
        frame = np.empty((size[1], size[0], 3), np.uint8)
        room = frame.data.cast("B")
        if self._worker.receive_into(room) != len(room):
            raise ValueError
        return index, seconds, frame

    def _reported(self) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self._worker.receive(_MESSAGE_BYTES))
        if "error" in reported:
            raise VideoError(str(reported["error"])[:1000])
        if "option" in reported:
            raise OptionError(str(reported["option"])[:1000])
        return reported

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Blame the file for errors in what a worker sends, which is checked like anything from
        outside, and not for what is done with its frames. Raises VideoError.
        """
        try:
            yield
        except WorkerFailed as error:
            raise VideoError(
                f"{self._name}: found a video that takes {error.needs} to read, expected a usual "
                "one; cut it, or encode it smaller"
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise VideoError(
                f"{self._name}: found a video that made its decoder answer senselessly; encode it "
                "anew"
            ) from error


@contextmanager
def opened_isolated(fd: int, size: int, limits: VideoLimits, name: str) -> Iterator[Remote]:
    """Open a file of `size` bytes as `decode.open_video` does. Waits while as many are being read
    as may at once. Raises VideoError, also for one that takes more memory or time than it may, and
    BusyError.
    """
    taken = Limits(limits.cpu_s, _memory_bytes(limits.max_pixels))
    with _server().job(taken) as worker:
        yield Remote(worker, fd, size, limits, one_line(name))


def prepare(_: bytes) -> None:
    """Prepare the fork server: one video of each kind is read, so that workers have all they need,
    and open nothing for it.
    """
    for data in one_of_each():
        reader = open_video(io.BytesIO(data))
        for _frame in reader.take([0, 1], (8, 8)):
            pass
        reader.close()


def one_of_each() -> Iterator[bytes]:
    """A small file for each library that reads some."""
    file = io.BytesIO()
    first, second = (Image.new("RGB", (16, 16), colour) for colour in ("black", "white"))
    first.save(file, "GIF", save_all=True, append_images=[second], duration=100)
    yield file.getvalue()
    if find_spec("av") is None:
        return
    av = import_module("av")
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        stream.codec_context.thread_count = 1
        for _ in range(4):
            out.mux(stream.encode(av.VideoFrame.from_image(first)))
        out.mux(stream.encode())
    yield file.getvalue()


def serve(channel: Channel, _prepared: Any) -> None:
    """Serve one video in a worker."""
    taken = address_space()
    data, fds = channel.receive_with(1, _REQUEST_BYTES)
    try:
        with no_more_files():
            _read(channel, json.loads(data), fds[0], taken)
    finally:
        for fd in fds:
            os.close(fd)


def _read(channel: Channel, request: dict[str, Any], fd: int, taken: int) -> None:
    limits, size = VideoLimits(**request["limits"]), int(request["size"])
    file = io.BufferedReader(FileAt(fd, size), 1 << 16)
    is_reported = False

    def admit(pixels: int) -> None:
        nonlocal is_reported
        maximum = _memory_bytes(pixels)
        allow_memory(maximum, taken)
        if not is_reported:  # a file may be opened anew
            channel.send(json.dumps({"memory": maximum}).encode())
            is_reported = True

    try:
        reader = open_video(file, limits, request["name"], admit)
        channel.send(json.dumps(asdict(reader.facts)).encode())
        while True:  # ended by who asks
            requested = json.loads(channel.receive(_REQUEST_BYTES))
            if "part" in requested:
                channel.send(json.dumps(_reported_part(reader, *requested["part"])).encode())
                continue
            for index, seconds, pixels in reader.take(
                requested["indices"], tuple(requested["size"])
            ):
                channel.send(json.dumps({"index": index, "time": seconds}).encode())
                channel.send(np.ascontiguousarray(pixels).data.cast("B"))
            channel.send(b'{"end": true}')
    except VideoError as error:
        channel.send(json.dumps({"error": str(error)}).encode())


def _memory_bytes(pixels: int) -> int:
    """Return the memory that a video may take whose frames have so many bytes."""
    return MEMORY_BYTES + MEMORY_BYTES_A_PIXEL * pixels


def _facts(reported: dict[str, Any]) -> VideoFacts:
    """Return what a worker says of a video, checked like anything from outside."""
    if set(reported) != {f.name for f in fields(VideoFacts)}:
        raise ValueError
    notes = tuple(str(n)[:200] for n in reported["notes"][:8])
    frames, fps, seconds = (
        int(reported["frames"]),
        float(reported["fps"]),
        float(reported["seconds"]),
    )
    width, height = int(reported["width"]), int(reported["height"])
    if frames < 1 or min(width, height) < 1 or not 0 < fps < inf or not 0 <= seconds < inf:
        raise ValueError
    codec, has_sound = str(reported["codec"])[:32], reported["has_sound"] is True
    return VideoFacts(frames, fps, seconds, width, height, codec, notes, has_sound)


def _reported_part(reader: Reader, start: float | None, end: float | None) -> dict[str, Any]:
    try:
        return asdict(reader.part(start, end))
    except OptionError as error:
        return {"option": str(error)}


def _part(reported: dict[str, Any], facts: VideoFacts) -> Part:
    """Return what a worker says of a part, checked."""
    first, frames = int(reported["first"]), int(reported["frames"])
    begins, fps, seconds = (float(reported[name]) for name in ("begins", "fps", "seconds"))
    part = Part(first, begins, frames, fps, seconds)
    inside = first >= 0 and 1 <= frames <= facts.frames - first
    if not inside or not isfinite(begins) or not 0 < fps < inf or not 0 <= seconds < inf:
        raise ValueError
    return part


@lru_cache(maxsize=1)
def _server() -> ForkServer:
    """One for the whole process."""
    return ForkServer(__name__, at_once=AT_ONCE, jobs=1)


def server_pid() -> int | None:
    """Return the id of the process that workers are forked from, while it runs."""
    return _server().pid
