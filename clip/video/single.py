"""Clips whose frames go through the tower one by one, each as a picture of one tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mtmd.base.text import plural
from mtmd.clip.image.pixels import Normalize, Pixels
from mtmd.clip.image.tensor_resize import resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.resolution.slices import WHOLE, SlicedTiling
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape, Write, tile_of_frames
from mtmd.clip.video.rules import FrameRule
from mtmd.clip.video.video import Video


class Fit(Protocol):
    """Rule for the size in which a frame is shown."""

    def fit(self, size: Size, budget: Budget) -> tuple[Size, int]:
        """Return the frame's (width, height) in px for the tower, and its tokens. Raises
        OptionError for a budget that cannot be kept.
        """

    def steps(self, size: Size, shape: Size) -> tuple[Size, ...]:
        """The sizes through which it goes on its way to that."""


@dataclass(frozen=True)
class Stretched:
    """A square of `side` pixels, whatever the frame's shape."""

    side: int
    tokens: int

    def fit(self, size: Size, budget: Budget) -> tuple[Size, int]:  # noqa: ARG002
        budget.check_fixed(self.tokens)
        return (self.side, self.side), self.tokens

    def steps(self, size: Size, shape: Size) -> tuple[Size, ...]:  # noqa: ARG002
        return (shape,)


@dataclass(frozen=True)
class WholeFrame:
    """A frame as a whole picture is shown, without slices."""

    tiling: SlicedTiling

    def fit(self, size: Size, budget: Budget) -> tuple[Size, int]:
        whole = self.tiling.whole(size, self.tiling.side)
        tokens = self.tiling.tokens(size, WHOLE)
        budget.check_fixed(tokens)
        return whole, tokens

    def steps(self, size: Size, shape: Size) -> tuple[Size, ...]:  # noqa: ARG002
        return (shape,)


@dataclass(frozen=True)
class SingleFrames:
    """A group is a frame. `scaled` resizes it to a width and a height as the reference does."""

    how: Fit
    normalize: Normalize
    resample: str
    rule: FrameRule
    markers: tuple[str, ...]
    token: str
    write: Write
    scaled: Callable[[Pixels, int, int, str], Pixels] = field(default=resize_tensor, kw_only=True)

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        (size, tokens), usual = (
            self.how.fit((width, height), b)
            for b in (Budget(max_tokens=budget.max_tokens, detail=budget.detail), DEFAULT_BUDGET)
        )
        notes = (
            ()
            if tokens == usual[1]
            else (f"frames shown in {plural(tokens, 'token')} each, {usual[1]} without a limit",)
        )
        return ClipShape(size, 1, frames, tokens, notes)

    def scale(self, frame: Pixels, shape: ClipShape) -> Pixels:
        for width, height in self.how.steps((frame.shape[1], frame.shape[0]), shape.size):
            frame = self.scaled(frame, width, height, self.resample)
        return frame

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        tile = tile_of_frames(frames, shape)
        return ImagePlan((tile,), (shape.size,), shape.tokens, normalize=self.normalize)

    def pixels(self, tile: np.ndarray) -> np.ndarray:
        return self.normalize.planes(tile)

    def prompt(self, video: Video, shape: ClipShape) -> str:
        return self.write(video, shape)

    sound = None

    def times(self, video: Video, shape: ClipShape) -> None:  # noqa: ARG002
        return None
