"""The whole picture stretched to a tile, then tiles of it on the canvas that shows most of it
(arXiv:2310.03744, AnyRes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from mtmd.clip.image.pixels import Normalize, Pixels
from mtmd.clip.image.resize import resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_IN_A_ROW, Size, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Type

MAX_CANVASES = 64


@dataclass(frozen=True)
class AnyResolution:
    """Tiles of `side` pixels a side, of `grid` x `grid` tokens each. The tokens of a canvas that
    show the picture, not its black borders, follow row by row, the family's separator after each.
    """

    side: int
    grid: int
    canvases: tuple[Size, ...]
    normalize: Normalize
    resample: str

    @property
    def tile_tokens(self) -> int:
        return self.grid**2

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """None but the first tile where the budget leaves no room."""
        size = (pixels.shape[1], pixels.shape[0])
        ways: list[Size | None] = [
            best_canvas(size, self.canvases),
            *((*self.canvases, None) if budget != DEFAULT_BUDGET else ()),
        ]
        orders = [self._order(size, canvas) for canvas in ways]
        chosen, notes = budget.choose([len(order) for order in orders])
        tiles, canvas = [resize(pixels, self.side, self.side, self.resample)], ways[chosen]
        rows = columns = 1
        if canvas is not None:
            rows, columns = canvas[1] // self.side, canvas[0] // self.side
            tiles += cut(letterboxed(pixels, canvas, self.resample), rows, columns)
        return ImagePlan(
            tuple(self.normalize(tile) for tile in tiles),
            ((self.side, self.side),) * len(tiles),
            len(orders[chosen]),
            cut=(rows, columns),
            order=orders[chosen],
            notes=notes,
        )

    def _order(self, size: Size, canvas: Size | None) -> np.ndarray:
        """The first tile's tokens, then those of the canvas that show the picture, row by row, a
        separator after each; int64 [T]
        """
        count, grid = self.tile_tokens, self.grid
        first = np.arange(count, dtype=np.int64)
        if canvas is None:
            return np.append(first, -1)
        rows, columns = canvas[1] // self.side, canvas[0] // self.side
        places = count + np.arange(rows * columns * count, dtype=np.int64)
        cells = places.reshape(rows, columns, grid, grid)
        cells = unpadded(cells.transpose(0, 2, 1, 3).reshape(rows * grid, columns * grid), size)
        return np.append(first, np.append(cells, np.full((len(cells), 1), -1), 1))

    def most_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        patch = self.side // self.grid
        most = [
            self.tile_tokens + down // patch * (across // patch + 1)
            for across, down in self.canvases
        ]
        return budget.most([max(most), *most, self.tile_tokens + 1])

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    largest_tile_type = tile_type


def best_canvas(size: Size, canvases: Sequence[Size]) -> Size:
    """The canvas that shows most of a picture's pixels, and of several such the one with least left
    over; arXiv:2310.03744
    """

    def worth(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[0] / size[0], canvas[1] / size[1])
        shown = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        return shown, shown - canvas[0] * canvas[1]

    return max(canvases, key=worth)


def letterboxed(pixels: Pixels, canvas: Size, resample: str) -> Pixels:
    """The picture scaled to fit the canvas, rounded up, in the middle of black."""
    height, width = pixels.shape[:2]
    across, down = canvas[0] / width, canvas[1] / height
    by_width, by_height = (
        (canvas[0], min(ceil(height * across), canvas[1])),
        (min(ceil(width * down), canvas[0]), canvas[1]),
    )
    fit: Size = by_width if across < down else by_height
    black = np.zeros((canvas[1], canvas[0], 3), np.uint8)
    left, top = (canvas[0] - fit[0]) // 2, (canvas[1] - fit[1]) // 2
    black[top : top + fit[1], left : left + fit[0]] = resize(pixels, *fit, resample)
    return black


def unpadded(cells: np.ndarray, size: Size) -> np.ndarray:
    """The rows and columns [Y, X] of a letterboxed canvas that show the picture of `size`."""
    rows, columns = cells.shape
    if size[0] / size[1] > columns / rows:
        edge = (rows - int(round(size[1] * (columns / size[0]), 7))) // 2
        return cells[edge : rows - edge]
    edge = (columns - int(round(size[0] * (rows / size[1]), 7))) // 2
    return cells[:, edge : columns - edge]


def read_canvases(top: Settings, image: Settings, side: int) -> tuple[Size, ...]:
    """The resolutions, of whole tiles, that both config.json and the image processor's settings
    name, as (height, width) there.
    """
    default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    pinpoints = top.get("image_grid_pinpoints", default)
    if image.get("image_grid_pinpoints", default) != pinpoints:
        raise ModelError(
            f"{image.where}: image_grid_pinpoints differ from those of config.json; correct one of "
            "them"
        )
    edges = range(side, MAX_IN_A_ROW * side + 1, side)
    fits = (
        isinstance(pinpoints, list)
        and 0 < len(pinpoints) <= MAX_CANVASES
        and all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(edge) is int and edge in edges for edge in pair)
            for pair in pinpoints
        )
    )
    if not fits:
        raise ModelError(
            f"{top.where}: image_grid_pinpoints have to be pairs of height and width, multiples of "
            f"{side}, of at most "
            f"{MAX_IN_A_ROW} tiles each; found {pinpoints!r:.60}"
        )
    return tuple((width, height) for height, width in pinpoints)
