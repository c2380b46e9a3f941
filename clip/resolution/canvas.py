"""Pictures within the best of several canvases of tiles, and zeros beside them: the canvas is one
tile, whose shape says how it is cut (arXiv:2407.21783).

Sizes are (width, height) in pixels, grids (rows, columns) of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_IN_A_ROW, Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class TiledCanvas:
    """Up to `tiles` tiles of `side` pixels a side, and one token for all."""

    side: int
    tiles: int
    normalize: Normalize
    resample: str

    @property
    def grids(self) -> list[tuple[int, int]]:
        """All there are, in the order by which models count them."""
        counts = range(1, self.tiles + 1)
        return [
            (rows, columns) for rows in counts for columns in counts if rows * columns <= self.tiles
        ]

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        budget.check_fixed(1)
        size = pixels.shape[1], pixels.shape[0]
        rows, columns = grid = self.grid(size)
        width, height = self.size(size, grid)
        canvas = np.zeros((rows * self.side, columns * self.side, 3), np.uint8)
        canvas[:height, :width] = resize(pixels, width, height, self.resample)
        shape = (columns * self.side, rows * self.side)
        return ImagePlan((self.normalize(canvas),), (shape,), 1, cut=grid)

    def grid(self, size: Size) -> tuple[int, int]:
        """The grid in which a picture is enlarged least, or, where it is larger than all, shrunk
        least; of several the smallest.
        """
        scales = [
            min(rows * self.side / size[1], columns * self.side / size[0])
            for rows, columns in self.grids
        ]
        enlarging = [scale for scale in scales if scale >= 1]
        chosen = min(enlarging) if enlarging else max(scales)
        fitting = [grid for grid, scale in zip(self.grids, scales, strict=True) if scale == chosen]
        return min(fitting, key=lambda grid: grid[0] * grid[1])

    def size(self, size: Size, grid: tuple[int, int]) -> Size:
        """The size of a picture within its canvas: no smaller than a tile."""
        width, height = (
            min(max(edge, self.side), count * self.side)
            for edge, count in zip(size, grid[::-1], strict=True)
        )
        across, down = width / size[0], height / size[1]
        if across < down:
            return width, min(math.floor(size[1] * across) or 1, height)
        return min(math.floor(size[0] * down) or 1, width), height

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        return 1

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    def largest_tile_type(self) -> Type:
        return tile_of(self.side * self.tiles, self.side)


def read_tiled_canvas(image: Settings, side: int, tiles: int) -> TiledCanvas:
    """Read it from an image processor's settings; `side` and `tiles` are config.json's. Raises
    ModelError where they do not fit together.
    """
    size = image.part("size")
    edges = size.count("height", 224), size.count("width", 224)
    limit = image.count("max_image_tiles", 4, maximum=MAX_IN_A_ROW)
    if edges != (side, side) or limit != tiles:
        raise ModelError(
            f"{image.where}: {limit} tiles of {edges[0]} x {edges[1]} pixels, expected {tiles} of "
            f"{side} x {side} as config.json says; correct one of them"
        )
    for step in ("do_resize", "do_pad"):
        image.choice(step, (True,), True)
    return TiledCanvas(side, tiles, read_normalize(image), read_resample(image, 2))
