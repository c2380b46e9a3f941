"""Pictures in their own shape, whose edges are kept within two bounds, and perhaps their four
quarters before them (arXiv:2405.02246).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_EDGE = 4096  # pixels; published models have at most 980


@dataclass(frozen=True)
class Quartered:
    """Tiles of `tile_tokens` each, with edges of `shortest` to `longest` pixels; what is less than
    a patch of `patch` pixels at their ends is not seen.
    """

    shortest: int
    longest: int
    patch: int
    tile_tokens: int
    splits: bool
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        counts = self._counts(budget)
        chosen, notes = budget.choose([count * self.tile_tokens for count in counts])
        count = counts[chosen]
        middle, half = pixels.shape[0] // 2, pixels.shape[1] // 2
        quarters = [
            quarter
            for rows in np.split(pixels, [middle])
            for quarter in np.split(rows, [half], 1)
            if count > 1
        ]
        tiles = [self._scaled(part) for part in (*quarters, pixels)]
        return ImagePlan(
            tuple(self.normalize(tile) for tile in tiles),
            tuple((tile.shape[1], tile.shape[0]) for tile in tiles),
            count * self.tile_tokens,
            cut=(2, 2) if quarters else (1, 1),
            notes=notes,
        )

    def _counts(self, budget: Budget) -> list[int]:
        """Tiles of a picture, the checkpoint's own number first."""
        return [5, 1][: 2 if budget != DEFAULT_BUDGET else 1] if self.splits else [1]

    def _scaled(self, pixels: Pixels) -> Pixels:
        width, height = self.size((max(pixels.shape[1], 1), max(pixels.shape[0], 1)))
        seen = resize(pixels, width, height, self.resample)
        return seen[: height // self.patch * self.patch, : width // self.patch * self.patch]

    def size(self, size: Size) -> Size:
        """The size that a picture is scaled to: as large as it is, within the bounds."""
        width, height = size
        aspect = width / height
        if width >= height and width > self.longest:
            width, height = self.longest, int(self.longest / aspect)
        elif height > width and height > self.longest:
            width, height = int(self.longest * aspect), self.longest
        return max(width, self.shortest), max(height, self.shortest)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum([count * self.tile_tokens for count in self._counts(budget)])

    def tile_type(self) -> Type:
        return tile_of(*(self.shortest // self.patch * self.patch,) * 2)

    def largest_tile_type(self) -> Type:
        return tile_of(*(self.longest // self.patch * self.patch,) * 2)


def read_quartered(image: Settings, patch: int, tile_tokens: int) -> Quartered:
    """Read it from an image processor's settings. Raises ModelError for edges that do not fit."""
    size = Settings(
        image.get("size", {"shortest_edge": 378, "longest_edge": 980}), f"{image.where}: size"
    )
    shortest, longest = (
        size.count(f"{which}_edge", maximum=MAX_EDGE) for which in ("shortest", "longest")
    )
    if not patch <= shortest <= longest:
        raise ModelError(
            f"{size.where} has edges of {shortest} to {longest} pixels, expected the first to be "
            f"at least a patch of {patch} and at most the second"
        )
    return Quartered(
        shortest=shortest,
        longest=longest,
        patch=patch,
        tile_tokens=tile_tokens,
        splits=image.flag("do_image_splitting", False),
        normalize=read_normalize(image),
        resample=read_resample(image, 2),
    )
