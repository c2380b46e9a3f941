"""Interface of a family that reads videos, in addition to that for pictures.

A clip goes through the tower in groups of frames, each encoded by itself, as the tile of a picture
is: no group knows of another before the decoder. So a group that was encoded once need not be
again, whatever else of the video is asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from mtmd.clip.image.pixels import Pixels
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.rules import UNKNOWN_FPS, FrameRule
from mtmd.clip.video.sound import SoundOrder
from mtmd.clip.video.video import Video


@dataclass(frozen=True)
class ClipShape:
    """Shape that so many frames of one size take, known before any is decoded.

    Args:
        size: (width, height) in px that each frame is scaled to.
        frames: how many the tower takes at once. The last group repeats its last frame where there
            are too few.
        groups: how many there are.
        tokens: image tokens of each group.
        closing: tokens after the last group, the family's separator each.
        notes: for the receipt, what was done that the user may not expect.
    """

    size: tuple[int, int]
    frames: int
    groups: int
    tokens: int
    notes: tuple[str, ...] = ()
    closing: int = 0
    missing: int = 0

    @property
    def all_tokens(self) -> int:
        """Image tokens of the whole clip; the text between them comes on top."""
        return self.groups * self.tokens - self.missing + self.closing


class VideoFamily(Protocol):
    """Interface to the way one model reads videos."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return what chat templates write where a video belongs, any of them; one that holds
        another stands before it.
        """

    @property
    def token(self) -> str:
        """The token whose place the frames' embeddings take."""

    @property
    def sound(self) -> SoundOrder | None:
        """Return how frames and sound take turns; None for a model that hears no sound of
        videos.
        """

    @property
    def rule(self) -> FrameRule:
        """Return which frames are taken."""

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        """Return what `frames` frames of width x height px become. The most tokens of a `budget`
        are those of a group; its least are for pictures. Raises ImageError for sizes that the
        family does not take, OptionError for a budget that cannot be kept.
        """

    def scale(self, frame: Pixels, shape: ClipShape) -> Pixels:
        """A frame, uint8 [Y, X, 3], in the clip's size: what its group is made of."""

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        """Scaled frames, up to `shape.frames` of them, as one tile of bytes, uint8 [3 N, Y, X]: the
        channels of the first before those of the second.
        """

    def pixels(self, tile: np.ndarray) -> np.ndarray:
        """A group's tile as the tower reads it, fp32."""

    def prompt(self, video: Video, shape: ClipShape) -> str:
        """The text that stands for the video, in which each of its tokens is written as `token`;
        other text, times among it, may stand between them.
        """

    def times(self, video: Video, shape: ClipShape) -> tuple[float, ...] | None:
        """Return, for a decoder that knows the time of a group by its position, how far that is
        behind the first group's, whose rows and columns all share; positions are these rounded
        down. None where groups are laid out one after another, as pictures are.
        """


@runtime_checkable
class ThinsFrames(Protocol):
    """A way of reading videos that leaves out tokens of frames by what was in those before."""

    def thinned(
        self, frames: Sequence[Pixels], before: Pixels | None, shape: ClipShape
    ) -> ImagePlan:
        """Return what `VideoFamily.group` does, of frames that follow a frame `before`."""

    def prompt_of(self, video: Video, plans: Sequence[ImagePlan]) -> str:
        """Return the text of `VideoFamily.prompt` without the tokens that groups leave out."""


class Write(Protocol):
    """A family's own way to write `VideoFamily.prompt`."""

    def __call__(self, video: Video, shape: ClipShape) -> str: ...


@dataclass(frozen=True)
class Run:
    """Nothing but the tokens of all groups."""

    token: str

    def __call__(self, video: Video, shape: ClipShape) -> str:  # noqa: ARG002
        return self.token * shape.all_tokens


def tile_of_frames(frames: Sequence[Pixels], shape: ClipShape) -> np.ndarray:
    """uint8 [3 N, Y, X], the last frame repeated where they are too few."""
    filled = [*frames, *[frames[-1]] * (shape.frames - len(frames))]
    return np.concatenate([frame.transpose(2, 0, 1) for frame in filled])


def taken_fps(video: Video) -> float:
    """Frames a second among those that were taken: as a reference says it, by the length of the
    whole file, where they lie all over it; else by their times.
    """
    count, fps = len(video.indices), video.facts.fps or UNKNOWN_FPS
    usual = count / max(video.facts.frames, count) * fps
    if count < 2:
        return usual
    separate = (video.indices[-1] - video.indices[0]) / (count - 1)
    if abs(max(video.facts.frames, count) / count - separate) <= 1:
        return usual
    seconds = video.times[-1] - video.times[0]
    return (count - 1) / seconds if seconds > 0 else fps


def group_times(video: Video, shape: ClipShape) -> list[tuple[float, float]]:
    """When each group's first and last frame are, in seconds."""
    size = shape.frames
    groups = (video.times[start : start + size] for start in range(0, len(video.times), size))
    return [(times[0], times[-1]) for times in groups]
