"""The picture at the top left of the canvas of tiles that it fits best, black around it, then the
whole stretched to a tile.

Sizes are (width, height) in pixels, grids (columns, rows) of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, RoundedNormalize, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

WHOLE = (1, 1)


@dataclass(frozen=True)
class PaddedCanvas:
    """Up to `maximum` tiles of `tile` pixels a side, each of `tile_tokens`; the whole follows where
    there are several. A picture is enlarged up to the size of a tile, or, with `enlarged`, of its
    canvas.
    """

    tile: int
    tile_tokens: int
    maximum: int
    enlarged: bool
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        size = (pixels.shape[1], pixels.shape[0])
        (columns, rows), notes = self._choose(size, budget)
        tiles = cut(self._canvas(pixels, (columns, rows)), rows, columns)
        if len(tiles) > 1:
            tiles.append(resize_tensor(pixels, self.tile, self.tile, self.resample))
        return ImagePlan(
            tuple(map(self.normalize, tiles)),
            ((self.tile, self.tile),) * len(tiles),
            self.tokens(len(tiles) - (len(tiles) > 1)),
            cut=(rows, columns),
            notes=notes,
        )

    def tokens(self, tiles: int) -> int:
        return (tiles + (tiles > 1)) * self.tile_tokens

    def _choose(self, size: Size, budget: Budget) -> tuple[Size, tuple[str, ...]]:
        limits = [self.maximum]
        if budget != DEFAULT_BUDGET:
            limits += [*range(1, self.maximum)]
        grids = [best_grid(size, self.tile, maximum, self.enlarged) for maximum in limits]
        chosen, notes = budget.choose([self.tokens(columns * rows) for columns, rows in grids])
        return grids[chosen], notes

    def _canvas(self, pixels: Pixels, grid: Size) -> Pixels:
        height, width = pixels.shape[:2]
        canvas = grid[0] * self.tile, grid[1] * self.tile
        room = canvas
        if not self.enlarged:
            room = (min(max(width, self.tile), canvas[0]), min(max(height, self.tile), canvas[1]))
        across, down = room[0] / width, room[1] / height
        if across < down:
            fit = room[0], min(floor(height * across), room[1])
        else:
            fit = min(floor(width * down), room[0]), room[1]
        fit = max(fit[0], 1), max(fit[1], 1)
        black = np.zeros((canvas[1], canvas[0], 3), np.uint8)
        black[: fit[1], : fit[0]] = resize_tensor(pixels, *fit, self.resample)
        return black

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum([self.tokens(n) for n in range(self.maximum, 0, -1)])

    def tile_type(self) -> Type:
        return tile_of(self.tile, self.tile)

    largest_tile_type = tile_type


@lru_cache
def _grids(maximum: int) -> tuple[Size, ...]:
    """(columns, rows) of up to so many tiles; those of one shape follow each other, at the place of
    the largest: at a tie the order decides.
    """
    shapes: dict[float, list[Size]] = {}
    for count in range(maximum, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                shapes.setdefault(rows / columns, []).append((columns, rows))
    return tuple(grid for grids in shapes.values() for grid in grids)


def best_grid(size: Size, tile: int, maximum: int, enlarged: bool) -> Size:
    """The grid to which a picture is enlarged least, with `enlarged` most; where all are too small,
    that which shrinks it least; of several the smallest. Scales are fp32, as the reference has
    them.
    """
    grids = _grids(maximum)
    width, height = (np.float32(edge) for edge in size)
    scales = [
        min(np.float32(columns * tile) / width, np.float32(rows * tile) / height)
        for columns, rows in grids
    ]
    enough = [scale for scale in scales if scale >= 1]
    chosen = (max(enough) if enlarged else min(enough)) if enough else max(scales)
    fitting = [grid for grid, scale in zip(grids, scales, strict=True) if scale == chosen]
    return min(fitting, key=lambda grid: grid[0] * grid[1])


def read_padded_canvas(image: Settings, side: int, tile_tokens: int) -> PaddedCanvas:
    """Read it from an image processor's settings; `side` is config.json's. Raises ModelError where
    they do not fit together.
    """
    size = image.part("size")
    if {size.count("height", 336), size.count("width", 336)} != {side}:
        raise ModelError(
            f"{size.where} is {size.values!r:.60}, expected height and width {side} as "
            "config.json's image_size; correct one"
        )
    plain = read_normalize(image)
    return PaddedCanvas(
        tile=side,
        tile_tokens=tile_tokens,
        maximum=image.count("max_patches", 16, maximum=MAX_TILES),
        enlarged=image.flag("resize_to_max_canvas", False),
        normalize=RoundedNormalize(plain.mean, plain.std, plain.scale),
        resample=read_resample(image, 2, MODES),
    )
