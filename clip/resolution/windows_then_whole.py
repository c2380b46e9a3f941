"""Windows of a picture, each scaled to a tile, and then the whole picture on a square, larger than
a tile (Step3-VL's, arXiv:2601.09668). How large a window is follows from the picture's shape.

Sizes are (width, height) in pixels, grids (columns, rows) of windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_RATIO = 96  # of a picture's longer side to its shorter one
MAX_SIDE = 1 << 13  # pixels of a picture that is cut
NARROW, THIN = 32, 4  # a picture of a shorter side and a longer shape is put on a black square
ELONGATED = 1.5  # a picture of a longer shape is cut even where it is no larger than the whole
REST = 0.2  # of a window: what is left beyond that becomes a window of its own


@dataclass(frozen=True)
class Layout:
    """The size of the picture as a whole, that in which it is cut, the pixels of a window's side
    and the grid of windows; (0, 0) where it is not cut.
    """

    whole: Size
    cut: Size
    window: int
    grid: Size

    @property
    def windows(self) -> int:
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class WindowsThenWhole:
    """Tiles of `tile` pixels a side and the whole on a square of `side` pixels; pictures are
    scaled to `longest` pixels of their longer side. A token stands for `step` pixels a side.
    """

    side: int
    tile: int
    longest: int
    step: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Raises ImageError for a picture that is too narrow."""
        pixels = _squared(pixels)
        size = (pixels.shape[1], pixels.shape[0])
        layout, notes = self.choose(size, budget)
        whole = self._resized(self._resized(pixels, *layout.whole), self.side, self.side)
        tiles = [whole]
        if layout.windows:
            tiles = [*self._windows(pixels, layout), whole]
        columns, rows = layout.grid
        return ImagePlan(
            tuple(self.normalize(tile) for tile in tiles),
            tuple((tile.shape[1], tile.shape[0]) for tile in tiles),
            self.tokens(layout.windows),
            cut=(max(rows, 1), max(columns, 1)),
            notes=notes,
        )

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Layout, tuple[str, ...]]:
        """Return how a picture is shown, and notes: cut from a smaller copy, or not at all, where
        the budget leaves no room. Raises ImageError for a picture that is too narrow.
        """
        ways = [self.layout(size, self.longest)]
        if budget != DEFAULT_BUDGET:
            smaller = range(self.longest - self.tile, self.tile, -self.tile)
            others = [self.layout(size, longest) for longest in smaller]
            # A very thin copy may be cut into more, as its sides are whole pixels
            ways += [way for way in others if way.windows <= ways[0].windows]
            ways.append(Layout(ways[0].whole, ways[0].whole, 0, (0, 0)))
        chosen, notes = budget.choose([self.tokens(way.windows) for way in ways])
        return ways[chosen], notes

    def layout(self, size: Size, longest: int) -> Layout:
        """Return the windows of a picture whose longer side has at most `longest` pixels."""
        if max(size) > MAX_RATIO * min(size):
            raise ImageError(
                f"the picture has {size[0]} x {size[1]} pixels, expected a longer side of at most "
                f"{MAX_RATIO} times the shorter; crop it to a less narrow shape"
            )
        if max(size) > longest:
            scale = longest / max(size)
            size = max(1, int(size[0] * scale)), max(1, int(size[1] * scale))
        window = self._window(size)
        if not window:
            return Layout(size, size, 0, (0, 0))
        width, height = (_snapped(edge, window) for edge in size)
        grid = max(1, width // window), max(1, height // window)
        return Layout(size, (width, height), window, grid)

    def _window(self, size: Size) -> int:
        """Return the pixels of a window's side, 0 where the picture is not cut."""
        short, long = min(size), max(size)
        if long <= self.side:
            return short if long / short > ELONGATED else 0
        return min(short, self.tile) if long / short > THIN else self.tile

    def _windows(self, pixels: Pixels, layout: Layout) -> list[Pixels]:
        """The picture's windows as tiles, line by line; one may be less high or less wide than
        others would be, and is stretched.
        """
        scaled = self._resized(pixels, *layout.cut)
        width, height = layout.cut
        starts = (range(0, edge, layout.window) for edge in (height, width))
        rows, columns = (list(start) for start in starts)
        side = layout.window
        return [
            self._resized(scaled[y : y + side, x : x + side], self.tile, self.tile)
            for y in rows
            for x in columns
        ]

    def _resized(self, pixels: Pixels, width: int, height: int) -> Pixels:
        return resize_tensor(pixels, width, height, self.resample)

    @property
    def max_windows(self) -> int:
        """Return how many a picture may be cut into: as many as tiles on the largest square, or
        those of the thinnest, more than `MAX_RATIO` where its shorter side is rounded down.
        """
        shortest = max(1, (self.longest - 1) // MAX_RATIO)
        return max(-(-self.longest // shortest), (-(-self.longest // self.tile)) ** 2)

    def tokens(self, windows: int) -> int:
        return windows * (self.tile // self.step) ** 2 + (self.side // self.step) ** 2

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum([self.tokens(self.max_windows), self.tokens(0)])

    def tile_type(self) -> Type:
        return tile_of(self.tile, self.tile)

    def largest_tile_type(self) -> Type:
        return tile_of(self.side, self.side)


def _snapped(edge: int, window: int) -> int:
    """The next lower number of windows, or the next higher one where much is left."""
    if edge < window:
        return edge
    return window * (edge // window + (edge % window > REST * window))


def _squared(pixels: Pixels) -> Pixels:
    """The picture at the top left of a black square, where it is very thin."""
    height, width = pixels.shape[:2]
    short, long = min(width, height), max(width, height)
    if short >= NARROW or long / short <= THIN:
        return pixels
    if long > MAX_SIDE:
        raise ImageError(
            f"the picture has {width} x {height} pixels, expected at most {MAX_SIDE} on the longer "
            f"side where the shorter has less than {NARROW}; crop it to a less narrow shape"
        )
    square = np.zeros((long, long, 3), np.uint8)
    square[:height, :width] = pixels
    return square


def read_windows_then_whole(image: Settings, side: int, step: int) -> WindowsThenWhole:
    """Read it from an image processor's settings; the tower has a table of positions for `side`
    pixels. Raises ModelError where they do not fit together.
    """
    size, tile = image.part("size"), image.count("patch_size", 504)
    edges = size.count("height", side), size.count("width", side)
    if edges != (side, side) or side % step or tile % step or tile > side:
        raise ModelError(
            f"{image.where}: size is {edges[1]} x {edges[0]} and patch_size {tile}, expected "
            f"{side} x {side}, the image_size of config.json, and no larger tiles, both multiples "
            f"of {step}"
        )
    longest = image.count("max_image_size", 3024, maximum=MAX_SIDE)
    if longest < side:
        raise ModelError(
            f"{image.where}: max_image_size is {longest}, expected {side} at least, the whole's"
        )
    return WindowsThenWhole(
        side=side,
        tile=tile,
        longest=longest,
        step=step,
        normalize=fused(read_normalize(image, CLIP_MEAN, CLIP_STD)),
        resample=read_resample(image, 2, MODES),
    )
