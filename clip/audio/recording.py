"""Audio that samples can be taken of: a file, decoded when they are, or samples that are given."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import AudioError
from mtmd.clip.audio.audio import Audio, AudioFacts, averaged, finite, is_numeric
from mtmd.clip.audio.decode import Reader, kind_of, open_audio
from mtmd.clip.audio.isolated import opened_isolated
from mtmd.clip.audio.limits import (
    DEFAULT_LIMITS,
    MAX_CHANNELS,
    AudioLimits,
    check_bytes,
    check_rate,
    check_seconds,
)
from mtmd.clip.audio.resample import resampled
from mtmd.clip.audio.signatures import HEAD_BYTES
from mtmd.clip.media_file import MediaFile


class Recording(Protocol):
    """Source of samples, which can be asked any number of times. Thread-safe."""

    name: str

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""

    def audio(self, rate: int) -> Audio:
        """Return all of it, mono, at `rate` samples a second. Raises AudioError, and BusyError
        where no process can be had.
        """

    def check(self) -> AudioFacts:
        """Decode all of it, and keep nothing. Raises as `audio`."""


class AudioFile:
    """A file by its path, or its bytes. `isolate`: it is decoded in a worker process. `span`: what
    is heard of it, from and to so many seconds; None is its beginning, and its end.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        limits: AudioLimits = DEFAULT_LIMITS,
        name: str = "audio",
        isolate: bool = False,
        span: tuple[float | None, float | None] = (None, None),
    ):
        """Raises AudioError for a file that is empty or too large, OSError for one that is not
        there.
        """
        self.name, self.limits, self.isolate, self.span = name, limits, isolate, span
        self.file = MediaFile(source)
        check_bytes(self.file.bytes, limits, name)

    @property
    def sha256(self) -> str:
        if self.span == (None, None):
            return self.file.sha256
        return hashlib.sha256(f"{self.file.sha256} {self.span}".encode()).hexdigest()

    def check_kind(self) -> None:
        """Raises AudioError for what is no audio by its first bytes."""
        with self.file.opened() as file:
            kind_of(file.read(HEAD_BYTES), self.name)

    def audio(self, rate: int) -> Audio:
        with self._opened(rate) as reader:
            decoded = (finite(block, self.name) for block in reader.blocks())
            blocks = list(resampled(decoded, reader.rate, rate))
            samples = np.concatenate(blocks) if len(blocks) != 1 else blocks[0]
            start, end = (None if at is None else round(at * rate) for at in self.span)
            heard = samples[start:end]
            if not len(heard):
                raise AudioError(
                    f"{self.name}: found {len(samples) / rate:.1f} s of sound, none of it between "
                    f"{self.span[0] or 0:g} and {self.span[1] or len(samples) / rate:g} s"
                )
            return Audio(heard, rate, reader.facts)

    def check(self) -> AudioFacts:
        with self._opened() as reader:
            for block in reader.blocks():
                finite(block, self.name)
            return reader.facts

    @contextmanager
    def _opened(self, rate: int | None = None) -> Iterator[Reader]:
        """Samples come at `rate` from a worker, in this process at that of the file."""
        if self.isolate:
            with (
                self.file.with_descriptor() as described,
                opened_isolated(
                    described.fileno(), self.file.bytes, self.limits, self.name, rate
                ) as remote,
            ):
                yield remote
            return
        with self.file.opened() as file, closing(open_audio(file, self.limits, self.name)) as own:
            yield own


class GivenSamples:
    """Samples [N] or [C, N] of real numbers from -1 to 1, or of whole ones of 8 to 32 bits, at
    `rate` samples a second.
    """

    def __init__(
        self,
        samples: NDArray[Any],
        rate: int,
        limits: AudioLimits = DEFAULT_LIMITS,
        name: str = "audio",
    ):
        """Raises AudioError for an array of another shape or type, or of too many seconds."""
        self.name = name
        check_rate(rate, name)
        if samples.ndim == 1:
            samples = samples[None]
        is_audio = samples.ndim == 2 and 1 <= samples.shape[0] <= MAX_CHANNELS
        if not is_audio or not samples.shape[1] or not is_numeric(samples):
            raise AudioError(
                f"{name}: found an array of {samples.dtype} and shape {list(samples.shape)}, "
                "expected samples as numbers of shape [N], or [C, N] with at most "
                f"{MAX_CHANNELS} channels"
            )
        check_seconds(samples.shape[1] / rate, limits, name)
        self.samples, self.rate = samples, rate

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(repr((self.rate, self.samples.shape)).encode())
        digest.update(self.samples.dtype.str.encode())
        digest.update(np.ascontiguousarray(self.samples).data)
        return digest.hexdigest()

    def check(self) -> AudioFacts:
        channels, count = self.samples.shape
        return AudioFacts(count / self.rate, self.rate, channels)

    def audio(self, rate: int) -> Audio:
        own = finite(averaged(self.samples), self.name)
        samples = np.concatenate(list(resampled([own], self.rate, rate)))
        return Audio(samples, rate, self.check())
