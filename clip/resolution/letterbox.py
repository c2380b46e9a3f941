"""Every picture scaled to the longer side of one square, in the middle of a colour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

SMALLEST = 14  # pixels that the shorter side has at least, where the settings do not say


@dataclass(frozen=True)
class Letterbox:
    """A tile of `side` pixels a side, of `tokens`, for every picture; its shorter side has
    `smallest` pixels at least. `ground` is the colour around it.
    """

    side: int
    tokens: int
    smallest: int
    normalize: Normalize
    resample: str
    ground: tuple[int, ...]

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        budget.check_fixed(self.tokens)
        square = on_square(
            pixels,
            self.side,
            self.ground,
            lambda pixels, width, height: resize(pixels, width, height, self.resample),
            self.smallest,
        )
        return ImagePlan((self.normalize(square),), ((self.side, self.side),), self.tokens)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        return self.tokens

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    largest_tile_type = tile_type


def on_square(
    pixels: Pixels,
    side: int,
    ground: tuple[int, ...],
    resized: Callable[[Pixels, int, int], Pixels],
    smallest: int = 1,
) -> Pixels:
    """Return a picture scaled to a square's longer side, in the middle of the ground; its shorter
    side has `smallest` pixels at least. `resized` scales pixels to a width and a height.
    """
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    width, height = (max(round(edge * scale), smallest) for edge in (width, height))
    scaled = resized(pixels, width, height)
    if height == width:
        return scaled
    square: Pixels = np.empty((side, side, 3), np.uint8)
    square[:] = ground
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = scaled
    return square


def read_letterbox(image: Settings, side: int, tokens: int) -> Letterbox:
    """Read it from an image processor's settings (transformers' JanusImageProcessor): the colour is
    that of the mean. Raises ModelError where no square of `side` comes out.
    """
    image.choice("do_pad", (True,), True)
    size = image.part("size")
    for key in ("height", "width"):
        size.choice(key, (side,), side)
    smallest = image.count("min_size", SMALLEST)
    if smallest > side:
        raise ModelError(f"{image.where}: min_size is {smallest}, expected at most {side}")
    normalize = read_normalize(image, CLIP_MEAN, CLIP_STD)
    return Letterbox(
        side=side,
        tokens=tokens,
        smallest=smallest,
        normalize=normalize,
        resample=read_resample(image, 3),
        ground=tuple(min(max(int(m * 255), 0), 255) for m in normalize.mean),
    )
