"""Pictures stretched to the grid of tiles that is closest to their shape, or that scales them
least, cut, and once more as a whole (arXiv:2404.16821).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, canvas_grid, closest_grid, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class StretchedTiling:
    """`fewest` to `maximum` tiles of `tile` pixels a side, each of `tile_tokens`; the whole follows
    where there are several. `closest` chooses the grid for a size, `scale` resizes.
    """

    tile: int
    tile_tokens: int
    fewest: int
    maximum: int
    normalize: Normalize
    resample: str
    closest: Callable[[Size, Sequence[Size], int], Size] = closest_grid
    scale: Callable[[Pixels, int, int, str], Pixels] = resize

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        grid, notes = self.choose((pixels.shape[1], pixels.shape[0]), budget)
        tiles = tuple(self.tiles(pixels, grid))
        return ImagePlan(
            tiles,
            ((self.tile, self.tile),) * len(tiles),
            self.tokens(grid[0] * grid[1]),
            cut=(grid[1], grid[0]),
            notes=notes,
        )

    def tokens(self, tiles: int) -> int:
        return (tiles + (tiles > 1)) * self.tile_tokens

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Size, tuple[str, ...]]:
        """The grid, (columns, rows) of tiles, for a picture of a size, (width, height), and
        notes.
        """
        ranges = [(self.fewest, self.maximum)]
        if budget != DEFAULT_BUDGET:
            counts, minimum, maximum = (
                range(1, self.maximum + 1),
                budget.min_tokens or 0,
                budget.max_tokens,
            )
            first = next((n for n in counts if self.tokens(n) >= minimum), self.maximum)
            last = max(
                (n for n in counts if maximum is None or self.tokens(n) <= maximum), default=1
            )
            ranges += [(1, 1), (1, last), (first, self.maximum), (min(first, last), last)]
        grids = [self.closest(size, grids_of(*limits), self.tile) for limits in ranges]
        chosen, notes = budget.choose([self.tokens(columns * rows) for columns, rows in grids])
        return grids[chosen], notes

    def tiles(self, pixels: Pixels, grid: Size) -> list[np.ndarray]:
        """fp32 [3, Y, X] each, line by line, the whole picture last"""
        columns, rows = grid
        tiles = cut(
            self.scale(pixels, columns * self.tile, rows * self.tile, self.resample), rows, columns
        )
        if len(tiles) > 1:
            tiles.append(self.scale(pixels, self.tile, self.tile, self.resample))
        return [self.normalize(tile) for tile in tiles]

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum([self.tokens(self.maximum), self.tokens(1)])

    def tile_type(self) -> Type:
        return tile_of(self.tile, self.tile)

    largest_tile_type = tile_type


@lru_cache
def grids_of(fewest: int, maximum: int) -> tuple[Size, ...]:
    """(columns, rows) of so many tiles, by their number, of equal numbers the narrowest first: at a
    tie of shapes the order decides.
    """
    counts = range(fewest, maximum + 1)
    return tuple(
        (columns, count // columns)
        for count in counts
        for columns in range(1, count + 1)
        if count % columns == 0
    )


def read_stretched_tiling(
    image: Settings, side: int, tile_tokens: int, usual: int = 384
) -> StretchedTiling:
    """Read it from an image processor's settings; `side` is config.json's, `usual` the processor's
    default. Raises ModelError where they do not fit together.

    crop_to_patches is not read: the reference cuts whatever it says.
    """
    size = image.part("size")
    if {size.count("height", usual), size.count("width", usual)} != {side}:
        raise ModelError(
            f"{size.where} is {size.values!r:.60}, expected height and width {side} as "
            "config.json's image_size; correct one"
        )
    fewest, maximum = (
        image.count("min_patches", 1, maximum=MAX_TILES),
        image.count("max_patches", 12, maximum=MAX_TILES),
    )
    if fewest > maximum:
        raise ModelError(
            f"{image.where}: min_patches is {fewest}, expected at most max_patches, {maximum}"
        )
    return StretchedTiling(
        tile=side,
        tile_tokens=tile_tokens,
        fewest=fewest,
        maximum=maximum,
        normalize=read_normalize(image, CLIP_MEAN, CLIP_STD),
        resample=read_resample(image, 3),
    )


def read_canvas_tiling(image: Settings, side: int, tile_tokens: int) -> StretchedTiling:
    """Read it as `read_stretched_tiling`, for a processor that chooses the grid which scales a
    picture least, from one tile on, cuts if `crop_to_patches`, and resizes tensors.
    """
    tiling = read_stretched_tiling(image, side, tile_tokens, usual=512)
    return replace(
        tiling,
        fewest=1,
        maximum=tiling.maximum if image.flag("crop_to_patches", True) else 1,
        normalize=fused(tiling.normalize),
        resample=read_resample(image, 3, MODES),
        closest=canvas_grid,
        scale=resize_tensor,
    )
