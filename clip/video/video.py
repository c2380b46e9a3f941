"""A video as a model's processor gets it: frames that were chosen, with their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VideoFacts:
    """Facts that a file states about itself, before any frame is decoded.

    Args:
        frames: how many there are; an estimate from length and rate where the file does not say.
        fps: frames a second, on average.
        seconds: length.
        width, height: of a frame as it is shown (rotation applied), in px.
        codec: short name, "h264"; "arrays" where the caller gave frames.
        notes: what a user should know: "10 bit, shown as 8", "timestamps missing, taken from fps".
        has_sound: whether it has an audio track.
    """

    frames: int
    fps: float
    seconds: float
    width: int
    height: int
    codec: str = "arrays"
    notes: tuple[str, ...] = ()
    has_sound: bool = False


@dataclass(frozen=True)
class Part:
    """Part of a video between two times, as if it were one of its own.

    Args:
        first: its first frame's number in the file.
        begins: when that is, in seconds.
        frames, fps, seconds: as in `VideoFacts`.
    """

    first: int
    begins: float
    frames: int
    fps: float
    seconds: float

    def times(self, indices: Sequence[int]) -> tuple[float, ...]:
        """When frames of these numbers in the file are, about."""
        return tuple(self.begins + (i - self.first) / self.fps for i in indices)


@dataclass(frozen=True)
class Video:
    """Frames that were taken from a file or given by the caller.

    Args:
        frames: uint8 [Y, X, 3] RGB each, upright, all of one size, in order of time.
        indices: each one's number in the file, from 0.
        times: each one's time in seconds from the start of the file.
    """

    frames: Sequence[np.ndarray]
    indices: tuple[int, ...]
    times: tuple[float, ...]
    facts: VideoFacts
