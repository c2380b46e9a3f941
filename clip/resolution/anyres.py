"""The whole picture stretched to a tile, then tiles of it on the canvas that shows most of it
(arXiv:2310.03744, AnyRes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, sqrt

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.base.text import plural
from mtmd.clip.image.pixels import Normalize, Pixels
from mtmd.clip.image.resize import resize
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.resolution.resolution import ImagePlan, closed, tile_of
from mtmd.clip.resolution.sizes import MAX_IN_A_ROW, Size, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_CANVASES = 64
CANVASES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
THINNED = 1.1  # times the edge that a canvas may have before it is thinned


@dataclass(frozen=True)
class AnyResolution:
    """Tiles of `side` pixels a side, of `grid` x `grid` tokens each. The tokens of a canvas that
    show the picture, not its black borders, follow row by row, the family's separator after each.

    `maximum`: a canvas of clearly more tokens than so many tiles have is thinned to as many, by
    mixing neighbours (arXiv:2408.03326, 3.2). `saved`: the tower sees so many pixels a side from
    the top left, None for all: whole patches.
    """

    side: int
    grid: int
    canvases: tuple[Size, ...]
    normalize: Normalize
    resample: str
    maximum: int | None = None
    saved: int | None = None

    @property
    def seen(self) -> int:
        """Pixels a side of a tile."""
        return self.side if self.saved is None else self.saved

    @property
    def tile_tokens(self) -> int:
        return self.grid**2

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """None but the first tile where the budget leaves no room."""
        size = (pixels.shape[1], pixels.shape[0])
        ways: list[Size | None] = [
            best_canvas(size, self.canvases),
            *((*self.canvases, None) if replace(budget, several=False) != DEFAULT_BUDGET else ()),
        ]
        orders = [self._order(size, canvas) for canvas in ways]
        chosen, notes = budget.choose([len(order) for order, _ in orders])
        tiles, canvas = [resize(pixels, self.side, self.side, self.resample)], ways[chosen]
        rows = columns = 1
        if canvas is not None:
            rows, columns = canvas[1] // self.side, canvas[0] // self.side
            tiles += cut(letterboxed(pixels, canvas, self.resample), rows, columns)
        order, weights = orders[chosen]
        return ImagePlan(
            tuple(self.normalize(tile[: self.seen, : self.seen]) for tile in tiles),
            ((self.seen, self.seen),) * len(tiles),
            len(order),
            cut=(rows, columns),
            order=order,
            weights=weights,
            notes=notes,
        )

    def _order(self, size: Size, canvas: Size | None) -> tuple[np.ndarray, np.ndarray | None]:
        """The first tile's tokens, then those of the canvas that show the picture, row by row, a
        separator after each; int64 [T], or [T, 4] and their weights
        """
        count, grid = self.tile_tokens, self.grid
        first = np.arange(count, dtype=np.int64)
        if canvas is None:
            return np.append(first, -1), None
        rows, columns = canvas[1] // self.side, canvas[0] // self.side
        locations = count + np.arange(rows * columns * count, dtype=np.int64)
        cells = locations.reshape(rows, columns, grid, grid)
        cells = unpadded(cells.transpose(0, 2, 1, 3).reshape(rows * grid, columns * grid), size)
        fewer = self._thinned(cells.shape[0], cells.shape[1])
        if fewer is None:
            return np.append(first, np.append(cells, np.full((len(cells), 1), -1), 1)), None
        order, weights = mixed(cells, *fewer)
        alone = np.array([1, 0, 0, 0], np.float32)
        order = np.append(order, np.full((fewer[0], 1, 4), -1), 1).reshape(-1, 4)
        weights = np.append(weights, np.broadcast_to(alone, (fewer[0], 1, 4)), 1).reshape(-1, 4)
        return (
            np.append(np.repeat(first[:, None], 4, 1), order, 0),
            np.append(np.broadcast_to(alone, (count, 4)), weights, 0),
        )

    def _thinned(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Return how many rows and columns stay of so many; None for all."""
        if self.maximum is None:
            return None
        ratio = sqrt(rows * columns / (self.maximum * self.tile_tokens))
        return (int(rows // ratio), int(columns // ratio)) if ratio > THINNED else None

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        maximum = [self._max_of(canvas) for canvas in self.canvases]
        return budget.maximum([max(maximum), *maximum, self.tile_tokens + 1])

    def _max_of(self, canvas: Size) -> int:
        """The most tokens of a picture on it, of one that is just not thinned where it can be."""
        rows, columns = (edge // self.side * self.grid for edge in reversed(canvas))
        shown = rows * columns
        if self.maximum is not None and shown > (
            just := THINNED**2 * self.maximum * self.tile_tokens
        ):
            shown = int(just)
        return self.tile_tokens + shown + rows

    def tile_type(self) -> Type:
        return tile_of(self.seen, self.seen)

    largest_tile_type = tile_type


@dataclass(frozen=True)
class AnyAlone(AnyResolution):
    """A picture alone; one of several goes `among` others whole, a separator behind it."""

    among: FixedSquare = field(kw_only=True)

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        if not budget.several:
            return super().prepare(pixels, budget)
        plan = closed(self.among.prepare(pixels, budget), 1)
        return replace(
            plan, notes=(f"one of several, so shown whole, in {plural(plan.tokens, 'token')}",)
        )


def mixed(cells: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A grid [Y, X] brought to rows x columns between its neighbours, as torch's bilinear
    interpolation does it in fp32: which four, int64 [rows, columns, 4], and their weights.
    """
    (top, bottom, down), (left, right, across) = (
        _between(old, new) for old, new in zip(cells.shape, (rows, columns), strict=True)
    )
    order = [cells[y][:, x] for y in (top, bottom) for x in (left, right)]
    weights = [y[:, None] * x for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(order, -1), np.stack(weights, -1)


def _between(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each of `new` positions along `old` cells, the cell before it, the one after it,
    and how far it is between them.
    """
    step = np.float32(old) / np.float32(new)
    at = np.maximum(
        (np.arange(new, dtype=np.float32) + np.float32(0.5)) * step - np.float32(0.5), 0
    )
    before = at.astype(np.int64)
    return before, np.minimum(before + 1, old - 1), at - before.astype(np.float32)


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


def read_canvases(
    top: Settings, image: Settings, side: int, default: list[list[int]] = CANVASES
) -> tuple[Size, ...]:
    """The resolutions, of whole tiles, that both config.json and the image processor's settings
    name, as (height, width) there.
    """
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
