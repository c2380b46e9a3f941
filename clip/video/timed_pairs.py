"""Clips whose frames go through the tower two by two, each pair behind its time in seconds
(arXiv:2511.21631).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.clip.marks import Marks
from mtmd.clip.video.family import ClipShape, group_times
from mtmd.clip.video.pairs import (
    AllFrames,
    PairedFrames,
    check_limits,
    read_limits,
    read_pairs,
    read_share,
)
from mtmd.clip.video.rules import FirstToLast, FrameRule
from mtmd.clip.video.video import Video
from mtmd.kernels.checkpoint.settings import Settings

CLIP_PIXELS = 128 * 32 * 32, 768 * 32 * 32  # of all frames; transformers' defaults


@dataclass(frozen=True)
class BehindTimes:
    """Each group behind its time, the middle between its frames' times."""

    marks: Marks

    def __call__(self, video: Video, shape: ClipShape) -> str:
        tokens = (self.marks.video * shape.tokens).join(self.marks.around)
        times = group_times(video, shape)
        return "".join(f"<{(first + last) / 2:.1f} seconds>{tokens}" for first, last in times)


def read_timed_pairs(
    video: Settings, *, patch: int, merge: int, marks: Marks, on_grid: bool = True
) -> PairedFrames:
    """Read it from a video processor's settings. Raises ModelError."""
    factor, normalize, resample = read_pairs(
        video, patch=patch, merge=merge, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    minimum, maximum = read_limits(video, CLIP_PIXELS)
    check_limits(video, minimum, maximum, factor)
    frames = video.count("min_frames", 4), video.count("max_frames", 768)
    return PairedFrames(
        factor=factor,
        limits=AllFrames(minimum, maximum, read_share(video, 768)),
        normalize=normalize,
        resample=resample,
        rule=FrameRule(FirstToLast(video.number("fps", 2.0), *frames)),
        # Templates put a pair around it, which the authors' processor takes away.
        markers=(marks.video.join(marks.around), marks.video),
        token=marks.video,
        write=BehindTimes(marks),
        on_grid=on_grid,
    )
