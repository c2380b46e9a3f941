"""Tiles of a picture, stretched to the grid of them that is closest to its shape, and then the
whole picture on a square, larger than a tile (arXiv:2510.18234).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.closest_grid import grids_of
from mtmd.clip.resolution.letterbox import on_square
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, closest_grid, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

HALF = (0.5, 0.5, 0.5)
GROUND = (127, 127, 127)


@dataclass(frozen=True)
class TilesThenWhole:
    """`fewest` to `maximum` tiles of `tile` pixels a side of a picture that is larger than one, and
    the whole of it on a square of `side` pixels, of the colour `ground`. A token stands for `step`
    pixels a side; the family's separator follows all of them.

    `newlines`: what the encoder gives of a tile begins with a newline, which is put after each row
    of the tokens of all tiles, and of those of the whole. `by_tensor`: resized as torchvision does,
    not as Pillow.
    """

    side: int
    tile: int
    step: int
    fewest: int
    maximum: int
    newlines: bool
    normalize: Normalize
    resample: str
    ground: tuple[int, ...] = GROUND
    by_tensor: bool = False

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """No tiles where the picture is no larger than one, or the budget leaves no room."""
        size = (pixels.shape[1], pixels.shape[0])
        grid, notes = self.choose(size, budget)
        columns, rows = grid
        tiles = [self._whole(pixels)]
        if columns * rows:
            stretched = self._resized(pixels, columns * self.tile, rows * self.tile)
            tiles = [*cut(stretched, rows, columns), *tiles]
        order = self._order(grid)
        return ImagePlan(
            tuple(self.normalize(tile) for tile in tiles),
            tuple((tile.shape[1], tile.shape[0]) for tile in tiles),
            len(order),
            cut=(max(rows, 1), max(columns, 1)),
            order=order,
            notes=notes,
        )

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Size, tuple[str, ...]]:
        """The grid, (columns, rows) of tiles or (0, 0), for a picture of a size, (width, height),
        and notes.
        """
        own: Size = (0, 0)
        if max(size) > self.tile:
            own = closest_grid(size, grids_of(self.fewest, self.maximum), self.tile)
        ways = [own]
        if budget != DEFAULT_BUDGET:
            ways.append((0, 0))
            ways += [
                closest_grid(size, grids_of(self.fewest, maximum), self.tile)
                for maximum in range(self.fewest, self.maximum + 1)
            ]
        chosen, notes = budget.choose([self.tokens(grid) for grid in ways])
        return ways[chosen], notes

    def tokens(self, grid: Size) -> int:
        columns, rows = grid
        small, large = self._tokens_a_side(self.tile), self._tokens_a_side(self.side)
        return (
            rows * small * (columns * small + self.newlines) + large * (large + self.newlines) + 1
        )

    def _tokens_a_side(self, pixels: int) -> int:
        return -(-pixels // self.step)

    def _order(self, grid: Size) -> np.ndarray:
        """int64 [T]: which of the rows that the encoder gives of all tiles, -1 the separator."""
        columns, rows = grid
        small, large = self._tokens_a_side(self.tile), self._tokens_a_side(self.side)
        each, count = small**2 + self.newlines, rows * columns
        cells = np.arange(count * each, dtype=np.int64).reshape(count, each)[:, self.newlines :]
        whole = count * each + self.newlines + np.arange(large**2, dtype=np.int64)
        if not self.newlines:
            return np.concatenate((cells.ravel(), whole, [-1]))
        lines = [whole.reshape(large, large)]
        if count:
            tiled = cells.reshape(rows, columns, small, small).transpose(0, 2, 1, 3)
            lines.insert(0, tiled.reshape(rows * small, columns * small))
        newline = count * each  # of the whole: those of the tiles are the same
        ended = (np.pad(line, ((0, 0), (0, 1)), constant_values=newline) for line in lines)
        return np.concatenate((*(line.ravel() for line in ended), [-1]))

    def _whole(self, pixels: Pixels) -> Pixels:
        return on_square(pixels, self.side, self.ground, self._resized)

    def _resized(self, pixels: Pixels, width: int, height: int) -> Pixels:
        way = resize_tensor if self.by_tensor else resize
        return way(pixels, width, height, self.resample)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        largest = max(grids_of(self.fewest, self.maximum), key=self.tokens)
        return budget.maximum([self.tokens(largest), self.tokens((0, 0))])

    def tile_type(self) -> Type:
        return tile_of(self.tile, self.tile)

    def largest_tile_type(self) -> Type:
        side = max(self.side, self.tile)
        return tile_of(side, side)


def read_tiles_then_whole(
    image: Settings,
    *,
    side: int,
    tile: int,
    maximum: int,
    step: int,
    newlines: bool,
    by_tensor: bool = False,
) -> TilesThenWhole:
    """Read it from an image processor's settings; the numbers are the family's defaults. Raises
    ModelError where they do not fit together.
    """
    image.choice("crop_to_patches", (True,), True)
    size = image.part("size")
    height, width = size.count("height", side), size.count("width", side)
    edge = image.count("tile_size", tile)
    if height != width or height % step or edge % step or edge > height:
        raise ModelError(
            f"{image.where}: size is {height} x {width} and tile_size {edge}, expected a square "
            f"and a tile of at most its size, multiples of {step}"
        )
    fewest = image.count("min_patches", 2, maximum=MAX_TILES)
    limit = image.count("max_patches", maximum, maximum=MAX_TILES)
    if fewest > limit:
        raise ModelError(
            f"{image.where}: min_patches is {fewest}, expected at most max_patches, {limit}"
        )
    normalize = read_normalize(image, HALF, HALF)
    ground = image.get("background_color", list(GROUND))
    if (
        not isinstance(ground, (list, tuple))
        or len(ground) != 3
        or any(type(c) is not int or not 0 <= c < 256 for c in ground)
    ):
        raise ModelError(
            f"{image.where}: background_color is {ground!r:.60}, expected three numbers from 0 to "
            "255"
        )
    return TilesThenWhole(
        side=height,
        tile=edge,
        step=step,
        fewest=fewest,
        maximum=limit,
        newlines=newlines,
        normalize=fused(normalize) if by_tensor else normalize,
        resample=read_resample(image, 3, MODES),
        ground=tuple(ground),
        by_tensor=by_tensor,
    )
