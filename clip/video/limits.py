"""Limits of one video, for files and for frames that a caller gives."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.errors import VideoError
from mtmd.clip.video.video import VideoFacts

MAX_FPS = 1000.0  # that any video has
MAX_FRAMES = 10_000_000  # of any: a day at 115 a second


@dataclass(frozen=True)
class VideoLimits:
    """`max_bytes`: of the file. `max_seconds`: from its first frame to its last. `max_pixels`: of
    one frame. `max_frames`: taken for one question. `cpu_s`: processor time to read it once, where
    it is read in a process of its own.
    """

    max_bytes: int = 8 << 30
    max_seconds: float = 24 * 3600.0
    max_pixels: int = 36_000_000
    max_frames: int = 1024
    cpu_s: float = 300.0


DEFAULT_LIMITS = VideoLimits()


def check_bytes(count: int, limits: VideoLimits, name: str) -> None:
    """Raises VideoError for a file of `count` bytes that is empty or over the limit."""
    if count == 0:
        raise VideoError(f"{name}: found 0 bytes, expected a video; fetch or copy the file again")
    if count > limits.max_bytes:
        raise VideoError(
            f"{name}: found {count:,} bytes, expected at most {limits.max_bytes:,}; cut the video "
            "or encode it smaller"
        )


def check_size(width: int, height: int, limits: VideoLimits, name: str) -> None:
    """Check the size of one frame, as the file states it. Raises VideoError."""
    if width < 1 or height < 1:
        raise VideoError(
            f"{name}: found frames of {width} x {height} pixels, expected at least 1 x 1"
        )
    if width * height > limits.max_pixels:
        raise VideoError(
            f"{name}: found frames of {width:,} x {height:,} pixels, expected at most "
            f"{limits.max_pixels:,} in all; encode the video smaller"
        )


def check_facts(facts: VideoFacts, limits: VideoLimits, name: str) -> None:
    """Raises VideoError for a video that is too long, in seconds or frames."""
    if not 0 <= facts.seconds <= limits.max_seconds:
        raise VideoError(
            f"{name}: found {facts.seconds:,.0f} seconds, expected at most "
            f"{limits.max_seconds:,.0f}; cut the video"
        )
    check_frames(facts.frames, name)


def check_frames(count: int, name: str) -> None:
    """Raises VideoError for a video that has too many, wherever a place in it is noted of each."""
    if count > MAX_FRAMES:
        raise VideoError(
            f"{name}: found {count:,} frames, expected at most {MAX_FRAMES:,}; cut the video"
        )


def admit_any(_pixels: int) -> None:
    """Admit any frame, where no limit of memory by its pixels is set."""
