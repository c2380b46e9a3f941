"""A video that frames can be taken of: a file, opened when they are, or frames that are given."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import VideoError
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.media_file import MediaFile
from mtmd.clip.video.choose import part_between
from mtmd.clip.video.decode import Reader, open_video
from mtmd.clip.video.isolated import opened_isolated
from mtmd.clip.video.limits import DEFAULT_LIMITS, VideoLimits, check_bytes, check_facts, check_size
from mtmd.clip.video.video import Part, VideoFacts

MIN_S = 0.5e-6  # between two frames


class Footage(Protocol):
    """Source of which frames can be taken, any number of times. Thread-safe."""

    name: str
    limits: VideoLimits

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""

    def opened(self) -> AbstractContextManager[Reader]:
        """While frames are taken. Raises VideoError, and BusyError where no process can be had."""


class VideoFile:
    """A file by its path, or its bytes. `isolate`: it is read in a worker process."""

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        limits: VideoLimits = DEFAULT_LIMITS,
        name: str = "video",
        isolate: bool = False,
    ):
        """Raises VideoError for a file that is empty or too large, OSError for one that is not
        there.
        """
        self.name, self.limits = name, limits
        self.file, self.isolate = MediaFile(source), isolate
        check_bytes(self.file.bytes, limits, name)

    @property
    def sha256(self) -> str:
        return self.file.sha256

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        if self.isolate:
            with (
                self.file.with_descriptor() as described,
                opened_isolated(
                    described.fileno(), self.file.bytes, self.limits, self.name
                ) as remote,
            ):
                yield remote
            return
        with self.file.opened() as file:
            reader = open_video(file, self.limits, self.name)
            with closing(reader):
                yield reader


class GivenFrames:
    """Frames uint8 [Y, X, 3] of one size, and the seconds at which each begins, ascending."""

    def __init__(
        self,
        frames: Sequence[Pixels],
        times: Sequence[float],
        limits: VideoLimits = DEFAULT_LIMITS,
        name: str = "video",
    ):
        """Raises VideoError for none, for too large ones, and for times that do not ascend, or by
        less than a microsecond.
        """
        self.name, self.limits = name, limits
        self._frames, self._times = frames, tuple(float(t) for t in times)
        if not len(frames) or len(frames) != len(self._times):
            raise VideoError(
                f"{name}: found {len(frames)} frames and {len(self._times)} times, expected at "
                "least one frame, and a time for each"
            )
        ascends = all(b - a >= MIN_S for a, b in pairwise(self._times))
        if not ascends or not all(np.isfinite(self._times)):
            raise VideoError(f"{name}: found times that do not ascend, expected seconds in order")
        shapes = {tuple(f.shape) for f in frames}
        if len(shapes) > 1:
            one, other = sorted(shapes)[:2]
            raise VideoError(
                f"{name}: found frames of {one[1]} x {one[0]} and of {other[1]} x {other[0]} "
                "pixels, expected all of one size; scale them"
            )
        ((height, width, _),) = shapes
        check_size(width, height, limits, name)
        count = len(frames)
        length = self._times[-1] - self._times[0]
        gap = length / (count - 1) if count > 1 else 1.0
        self.facts = VideoFacts(count, 1 / gap, length + gap, width, height)
        check_facts(self.facts, limits, name)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(repr((self._times, self._frames[0].shape)).encode())
        for frame in self._frames:
            digest.update(np.ascontiguousarray(frame).data)
        return digest.hexdigest()

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        yield self

    def part(self, start: float | None, end: float | None) -> Part:
        return part_between(self.facts, np.array(self._times), start, end)

    def take(
        self,
        indices: Sequence[int],
        size: tuple[int, int],  # noqa: ARG002  # they have one
    ) -> Iterator[tuple[int, float, Pixels]]:
        for index in indices:
            yield index, self._times[index], np.ascontiguousarray(self._frames[index])

    def close(self) -> None:
        pass


def frames_of(array: NDArray[Any], name: str = "video") -> NDArray[np.uint8]:
    """uint8 [T, Y, X, 3] of such an array, or of one of floats from 0 to 1. Raises VideoError."""
    fits = array.ndim == 4 and array.shape[3] == 3 and array.size > 0
    if fits and array.dtype == np.uint8:
        return array
    if fits and np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if low >= 0 and high <= 1:
            scaled: NDArray[np.uint8] = np.rint(array * 255).astype(np.uint8)
            return scaled
    raise VideoError(
        f"{name}: found an array of {array.dtype} and shape {list(array.shape)}, expected frames "
        "as uint8, or as floats from 0 to 1, of shape [T, Y, X, 3] with at least one pixel"
    )
