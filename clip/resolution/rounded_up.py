"""Pictures in their own size, rounded up to whole tokens; only those whose longer edge is too long
are made smaller (arXiv:2410.07073).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import USUAL_SIDE, ImagePlan, tile_of
from mtmd.clip.resolution.sizes import read_longest, within
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class NativeResolution:
    """A token stands for a square of `factor` pixels a side; the longer edge has at most `longest`
    pixels.
    """

    factor: int
    longest: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        given = pixels.shape[0], pixels.shape[1]
        (rows, columns), usual = self.grid(*given, budget), self.grid(*given)
        width, height = columns * self.factor, rows * self.factor
        notes = (
            ()
            if (rows, columns) == usual
            else (
                f"scaled to {width} x {height} by the image budget, {usual[1] * self.factor} x "
                f"{usual[0] * self.factor} without it",
            )
        )
        tile = self.normalize(resize(pixels, width, height, self.resample))
        return ImagePlan((tile,), ((width, height),), rows * columns, notes=notes)

    def grid(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Rows and columns of tokens. Raises ImageError for a picture so narrow that it
        vanishes.
        """
        if (shrink := max(height, width) / self.longest) > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        short, long = sorted((height, width))
        if not short:
            raise ImageError(
                f"scaled to {self.longest} pixels on its longer edge, the picture has none on the "
                "other; crop it"
            )
        rows, columns = -(-height // self.factor), -(-width // self.factor)
        low, high = self._limits(budget)
        if low <= rows * columns <= high:
            return rows, columns

        def count(side: int) -> int:
            """Tokens where `side` of them are on the longer edge"""
            return side * -(-side * short // long)

        if rows * columns > high:
            side = bisect_right(range(1, high + 1), high, key=count)
        else:
            side = bisect_left(range(1, low + 1), low, key=count) + 1
        rows, columns = sorted((side, count(side) // side), reverse=height > width)
        return within(rows, columns, self.max_tokens(budget))

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most that any picture takes: one that is scaled up to a least number is rounded up,
        to twice that at worst.
        """
        low, high = self._limits(budget)
        return (
            high
            if budget.min_tokens is None or budget.max_tokens is not None
            else max(high, 2 * low)
        )

    def _limits(self, budget: Budget) -> tuple[int, int]:
        return budget.limits(1, (-(-self.longest // self.factor)) ** 2)

    def tile_type(self) -> Type:
        return self._square(min(USUAL_SIDE, self.longest))

    def largest_tile_type(self) -> Type:
        return self._square(self.longest)

    def _square(self, side: int) -> Type:
        side = -(-side // self.factor) * self.factor
        return tile_of(side, side)


def read_native(image: Settings, factor: int) -> NativeResolution:
    """Read it from an image processor's settings; its patch_size does not count, as the reference
    takes the model's. Raises ModelError for a step that is not made.
    """
    if image.flag("do_center_crop", False):
        raise ModelError(f"{image.where}: do_center_crop true is not supported; set it to false")
    return NativeResolution(
        factor=factor,
        longest=read_longest(image, "size", 1024),
        normalize=read_normalize(image, CLIP_MEAN, CLIP_STD),
        resample=read_resample(image, 3),
    )
