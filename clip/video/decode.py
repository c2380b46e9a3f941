"""A video file, opened by what its first bytes say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Protocol

from mtmd.base.errors import VideoError
from mtmd.clip.image.decode import one_line
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.image.signatures import looks_like
from mtmd.clip.video.animation import Animation
from mtmd.clip.video.container import Container
from mtmd.clip.video.limits import DEFAULT_LIMITS, VideoLimits, admit_any
from mtmd.clip.video.signatures import EXPECTED, HEAD_BYTES, is_container, video_format
from mtmd.clip.video.video import Part, VideoFacts


class Reader(Protocol):
    """An open video. Not thread-safe."""

    facts: VideoFacts

    def part(self, start: float | None, end: float | None) -> Part:
        """Return the part as `choose.part_between` does, by the times of its frames where they are
        known.
        """

    def take(
        self, indices: Sequence[int], size: tuple[int, int]
    ) -> Iterator[tuple[int, float, Pixels]]:
        """(number, seconds, uint8 [Y, X, 3]) of the frames at `indices`, which ascend, each of
        `size` (width, height), upright; fewer where the file ends early. Raises VideoError.
        """

    def close(self) -> None:
        """Let go of what decodes."""


def open_video(
    file: BinaryIO,
    limits: VideoLimits = DEFAULT_LIMITS,
    name: str = "video",
    admit: Callable[[int], None] = admit_any,
) -> Reader:
    """Reads facts, and the first frame. `file` can be seeked in. `name` opens every message.
    `admit` is told the pixels of a frame before one is decoded. Raises VideoError, in one line, for
    whatever is not a video within `limits`.
    """
    name = one_line(name)
    head = file.read(HEAD_BYTES)
    kind = video_format(head)
    if kind is None:
        words, _ = looks_like(head)
        raise VideoError(
            f"{name}: found {words}, expected {EXPECTED}; convert it, as with ffmpeg, to MP4"
        )
    file.seek(0)
    return (Container if is_container(kind) else Animation)(file, kind, limits, name, admit)
