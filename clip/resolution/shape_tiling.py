"""Pictures stretched to the grid of tiles that is closest to their shape, cut, and once more as a
whole (arXiv:2404.16821).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from mtmd.clip.blocks import CLIP_MEAN, CLIP_STD, RESAMPLE, Normalize, read_normalize
from mtmd.clip.budget import DEFAULT_BUDGET, Budget
from mtmd.clip.image.decode import Pixels, resize
from mtmd.clip.resolution.tiling import Size, closest_grid, cut
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Type

MAX_TILES = 64


@dataclass(frozen=True)
class ShapeTiling:
    """`fewest` to `most` tiles of `tile` pixels a side, each of `tile_tokens`; the whole follows
    where there are several.
    """

    tile: int
    tile_tokens: int
    fewest: int
    most: int
    normalize: Normalize
    resample: str

    def tokens(self, tiles: int) -> int:
        return (tiles + (tiles > 1)) * self.tile_tokens

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Size, tuple[str, ...]]:
        """The grid, (columns, rows) of tiles, for a picture of a size, (width, height), and
        notes.
        """
        ranges = [(self.fewest, self.most)]
        if budget != DEFAULT_BUDGET:
            counts, least, most = range(1, self.most + 1), budget.min_tokens or 0, budget.max_tokens
            first = next((n for n in counts if self.tokens(n) >= least), self.most)
            last = max((n for n in counts if most is None or self.tokens(n) <= most), default=1)
            ranges += [(1, 1), (1, last), (first, self.most), (min(first, last), last)]
        grids = [closest_grid(size, _grids(*limits), self.tile) for limits in ranges]
        chosen, notes = budget.choose([self.tokens(columns * rows) for columns, rows in grids])
        return grids[chosen], notes

    def tiles(self, pixels: Pixels, grid: Size) -> list[np.ndarray]:
        """fp32 [3, Y, X] each, line by line, the whole picture last"""
        columns, rows = grid
        found = cut(
            resize(pixels, columns * self.tile, rows * self.tile, self.resample), rows, columns
        )
        if len(found) > 1:
            found.append(resize(pixels, self.tile, self.tile, self.resample))
        return [self.normalize(tile) for tile in found]

    def most_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.most([self.tokens(self.most), self.tokens(1)])

    def tile_type(self) -> Type:
        return Type.contiguous((3, self.tile, self.tile), torch.float32)


@lru_cache
def _grids(fewest: int, most: int) -> tuple[Size, ...]:
    """(columns, rows) of so many tiles, by their number, of equal numbers the narrowest first: at a
    tie of shapes the order decides.
    """
    counts = range(fewest, most + 1)
    return tuple(
        (columns, count // columns)
        for count in counts
        for columns in range(1, count + 1)
        if count % columns == 0
    )


def read_shape_tiling(image: Settings, side: int, tile_tokens: int) -> ShapeTiling:
    """From an image processor's settings; `side` is config.json's. Raises ModelError where they do
    not fit together.

    crop_to_patches is not read: the reference cuts whatever it says.
    """
    size = image.part("size")
    if {size.count("height", 384), size.count("width", 384)} != {side}:
        raise ModelError(
            f"{size.where} is {size.values!r:.60}, expected height and width {side} as "
            "config.json's image_size; correct one"
        )
    fewest, most = (
        image.count("min_patches", 1, most=MAX_TILES),
        image.count("max_patches", 12, most=MAX_TILES),
    )
    if fewest > most:
        raise ModelError(
            f"{image.where}: min_patches is {fewest}, expected at most max_patches, {most}"
        )
    return ShapeTiling(
        side,
        tile_tokens,
        fewest,
        most,
        read_normalize(image, CLIP_MEAN, CLIP_STD),
        RESAMPLE[image.choice("resample", RESAMPLE, 3)],
    )
