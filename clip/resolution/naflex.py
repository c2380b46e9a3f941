"""Pictures in their own shape, as large as a number of patches allows (SigLIP 2's "NaFlex",
arXiv:2502.14786).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import squarest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_PATCHES = 1 << 14
# Where the reference looks for the scale of a picture, and how finely.
MIN_SCALE, MAX_SCALE, FINENESS = 1e-6, 100.0, 1e-5


@dataclass(frozen=True)
class PatchLimit:
    """Scaled, up or down, until it has as many patches of `patch` pixels a side as fit in
    `maximum`, each side rounded up to whole ones; with a `minimum`, no more than it has in its own
    size or than that.
    """

    patch: int
    maximum: int
    normalize: Normalize
    resample: str
    minimum: int | None = None

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        _, maximum = budget.limits(1, self.maximum)
        height, width = pixels.shape[:2]
        if self.minimum is not None:
            own = (width // self.patch) * (height // self.patch)
            maximum = min(max(own, self.minimum), maximum)
        rows, columns = grid(height, width, self.patch, maximum)
        width, height = columns * self.patch, rows * self.patch
        tile = self.normalize(resize(pixels, width, height, self.resample))
        return ImagePlan((tile,), ((width, height),), rows * columns)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.limits(1, self.maximum)[1]

    def tile_type(self) -> Type:
        rows, columns = squarest_grid(self.maximum)
        return tile_of(columns * self.patch, rows * self.patch)

    largest_tile_type = tile_type


@lru_cache(maxsize=256)
def grid(height: int, width: int, patch: int, maximum: int) -> tuple[int, int]:
    """Rows and columns of patches: the reference's search by halves for the largest scale that
    keeps to `maximum`.
    """

    def patches(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in (height, width))
        return rows, columns

    low, high = MIN_SCALE, MAX_SCALE
    while high - low >= FINENESS:
        scale = (low + high) / 2
        if math.prod(patches(scale)) <= maximum:
            low = scale
        else:
            high = scale
    return patches(low)


def read_patch_limit(image: Settings, patch: int) -> PatchLimit:
    """Read it from an image processor's settings."""
    return PatchLimit(
        patch=patch,
        maximum=image.count("max_num_patches", 256, maximum=MAX_PATCHES),
        normalize=read_normalize(image),
        resample=read_resample(image, 2),
    )
