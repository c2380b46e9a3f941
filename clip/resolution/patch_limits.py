"""A picture in its shape, scaled until the number of its patches lies within two bounds, as numbers
with a fraction (Nemotron 3 Nano Omni's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES, resize_numbers
from mtmd.clip.resolution.resolution import USUAL_SIDE, ImagePlan, tile_of
from mtmd.clip.resolution.sizes import squarest_grid, within
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_PATCHES = 1 << 16  # of a picture; the published model has 13312
MARKS = 4  # tokens of a prompt that the reference leaves room for


@dataclass(frozen=True)
class PatchLimits:
    """Patches of `patch` pixels a side, `merge` x `merge` of which become one token, from `minimum`
    to `maximum` a picture.
    """

    patch: int
    merge: int
    minimum: int
    maximum: int
    normalize: Normalize
    resample: str

    @property
    def step(self) -> int:
        """Pixels a side of what becomes one token."""
        return self.patch * self.merge

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Raises ImageError for a picture that is too narrow."""
        given = pixels.shape[0], pixels.shape[1]
        (rows, columns), own = self.grid(*given, budget), self.grid(*given)
        notes: tuple[str, ...] = ()
        if (rows, columns) != own:
            scaled, usual = (
                f"{side[1] * self.step} x {side[0] * self.step}" for side in ((rows, columns), own)
            )
            notes = (f"scaled to {scaled} by the image budget, {usual} without it",)
        width, height = columns * self.step, rows * self.step
        mean, std = (
            np.array(numbers, np.float32)[:, None, None]
            for numbers in (self.normalize.mean, self.normalize.std)
        )
        tile = (resize_numbers(pixels, width, height, self.resample) - mean) / std
        return ImagePlan((tile,), ((width, height),), rows * columns, notes=notes)

    def grid(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Return rows and columns of tokens. Raises ImageError for a picture that is too narrow."""
        cells = self.merge**2
        low, high = budget.limits(-(-self.minimum // cells), self.maximum // cells)
        limits = self.minimum, self.maximum
        if budget != DEFAULT_BUDGET:
            limits = low * cells, high * cells
        rows, columns = patch_grid(height, width, self.patch, self.merge, *limits)
        rows, columns = rows // self.merge, columns // self.merge
        if budget.max_tokens is not None and rows and columns:
            rows, columns = within(rows, columns, budget.max_tokens)
        if not 0 < rows * columns * cells <= limits[1]:
            raise ImageError(
                f"the picture has {width} x {height} pixels, which is too narrow for "
                f"{limits[1]:,} patches; crop it to a less narrow shape"
            )
        return rows, columns

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.limits(1, self.maximum // self.merge**2)[1]

    def tile_type(self) -> Type:
        rows, columns = self.grid(USUAL_SIDE, USUAL_SIDE)
        return tile_of(columns * self.step, rows * self.step)

    def largest_tile_type(self) -> Type:
        rows, columns = squarest_grid(self.maximum // self.merge**2)
        return tile_of(columns * self.step, rows * self.step)


def patch_grid(
    height: int, width: int, patch: int, merge: int, minimum: int, maximum: int
) -> tuple[int, int]:
    """Rows and columns of patches, as the reference rounds them: halves to even, up to whole tokens
    where there is room; none, or too many, for a picture that is too narrow.
    """
    rows, columns = (round(side / patch + 0.5) for side in (height, width))
    factor = min(math.sqrt(maximum / (rows * columns)), 1.0)
    rows, columns = (math.floor(factor * side) for side in (rows, columns))
    if not rows * columns:
        return 0, 0
    if maximum > minimum and rows * columns < minimum:
        factor = math.sqrt(minimum / (rows * columns))
        rows, columns = (math.ceil(factor * side) for side in (rows, columns))
    rows = _whole(rows, columns, merge, maximum)
    return rows, _whole(columns, rows, merge, maximum)


def _whole(side: int, other: int, merge: int, maximum: int) -> int:
    """A side in whole tokens, rounded up if there is room."""
    rest = side % merge
    if not rest:
        return side
    if (side + merge - rest) * other <= maximum:
        return side + merge - rest
    return max(merge, side - rest)


def read_patch_limits(image: Settings, patch: int, merge: int) -> PatchLimits:
    """Read it from an image processor's settings; the model has patches of `patch` pixels and joins
    `merge` x `merge` of them. Raises ModelError where they do not fit together.
    """
    image.choice("patch_size", (patch,), patch)
    image.choice("downsample_ratio", (1 / merge,), 1 / merge)
    minimum = image.count("min_num_patches", 1024, maximum=MAX_PATCHES)
    maximum = image.count("max_num_patches", 13312, maximum=MAX_PATCHES)
    room = (image.count("max_model_len", 16384) - MARKS) * merge**2
    if not merge**2 <= minimum <= maximum <= room:
        raise ModelError(
            f"{image.where}: min_num_patches is {minimum}, max_num_patches {maximum}, and "
            f"max_model_len leaves room for {room}, expected {merge**2} or more and no larger ones "
            "in front"
        )
    named = {"image_mean": "norm_mean", "image_std": "norm_std"}  # as published
    given = {key: image.get(old, None) for key, old in named.items()}
    given = {key: value for key, value in given.items() if value is not None}
    numbers = Settings({**given, **image.values}, image.where)
    return PatchLimits(
        patch=patch,
        merge=merge,
        minimum=minimum,
        maximum=maximum,
        normalize=fused(read_normalize(numbers, CLIP_MEAN, CLIP_STD)),
        resample=read_resample(image, 3, MODES),
    )
