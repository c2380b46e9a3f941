"""Pictures in their own size, rounded up to whole tokens or patches; only those whose longer edge
is too long are made smaller (arXiv:2410.07073).
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
    pixels. Sides are rounded up to multiples of `step` pixels; where that divides `factor`, what
    remains of a side beyond its whole tokens has none.
    """

    factor: int
    step: int
    longest: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        given = pixels.shape[0], pixels.shape[1]
        (height, width), usual = self.size(*given, budget), self.size(*given)
        notes = (
            ()
            if (height, width) == usual
            else (
                f"scaled to {width} x {height} by the image budget, {usual[1]} x {usual[0]} "
                "without it",
            )
        )
        tile = self.normalize(resize(pixels, width, height, self.resample))
        tokens = (height // self.factor) * (width // self.factor)
        return ImagePlan((tile,), ((width, height),), tokens, notes=notes)

    def size(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Return height and width to which a picture is scaled, at least a token each. Raises
        ImageError for a picture so narrow that it vanishes.
        """
        if (shrink := max(height, width) / self.longest) > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        short, long = sorted((height, width))
        if not short:
            raise ImageError(
                f"scaled to {self.longest} pixels on its longer edge, the picture has none on the "
                "other; crop it"
            )
        own = self._rounded(height), self._rounded(width)
        low, high = self._limits(budget)
        if low <= (tokens := own[0] // self.factor * (own[1] // self.factor)) <= high:
            return own

        def count(side: int) -> int:
            """Tokens where `side` of them are on the longer edge"""
            return side * -(-side * short // long)

        if tokens > high:
            side = bisect_right(range(1, high + 1), high, key=count)
        else:
            side = bisect_left(range(1, low + 1), low, key=count) + 1
        rows, columns = sorted((side, count(side) // side), reverse=height > width)
        rows, columns = within(rows, columns, self.max_tokens(budget))
        return rows * self.factor, columns * self.factor

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
        return budget.limits(1, (self._rounded(self.longest) // self.factor) ** 2)

    def tile_type(self) -> Type:
        side = self._rounded(min(USUAL_SIDE, self.longest))
        return tile_of(side, side)

    def largest_tile_type(self) -> Type:
        side = self._rounded(self.longest)
        return tile_of(side, side)

    def _rounded(self, side: int) -> int:
        return max(-(-side // self.step) * self.step, self.factor)


def read_native(image: Settings, factor: int, step: int | None = None) -> NativeResolution:
    """Read it from an image processor's settings; `step` is `factor` where nothing else is given,
    as the reference takes the model's patches in place of the settings' patch_size. Raises
    ModelError for a step that is not made.
    """
    if image.flag("do_center_crop", False):
        raise ModelError(f"{image.where}: do_center_crop true is not supported; set it to false")
    return NativeResolution(
        factor=factor,
        step=step or factor,
        longest=read_longest(image, "size", 1024),
        normalize=read_normalize(image, CLIP_MEAN, CLIP_STD),
        resample=read_resample(image, 3),
    )
