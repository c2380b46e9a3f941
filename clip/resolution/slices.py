"""Pictures as a whole in their own shape, and, where they are large, once more in equal slices of
nearly the same number of pixels (arXiv:2408.01800).

Sizes are (width, height) in pixels, grids (columns, rows) of slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from mtmd.base.errors import ModelError
from mtmd.clip.image.glyphs import glyphs
from mtmd.clip.image.pixels import Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_RATIO, MAX_TILES, Size, cut, squarest_grid, too_narrow
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

WHOLE = (1, 1)
MAX_TOKENS = 1 << 16  # of a tile; published models have 64
ENLARGED = ("always", "never", "adaptive")
# Of MiniCPM-OCR's pictures that are enlarged by what they show
SMALL_GLYPH = 12  # pixels high
DENSE = 2  # glyphs for each 1000 pixels
TINY, TINY_SIDE = 6272, 84  # pixels of a picture, and the side of the square it becomes


@dataclass(frozen=True)
class SlicedTiling:
    """The whole picture, and each of up to `slices` slices, has about `side` x `side` pixels, and
    sides that are multiples of `factor`; 1 means that nothing is sliced. A tile has `each` tokens
    whatever its size, or, where that is None, one for every `factor` x `factor` pixels.

    `enlarged`: whether pictures of fewer pixels become that large; "adaptive" where they show small
    letters that are dense or are tiny, and slices that do not are shown with their own pixels.
    `by_tensor`: torchvision's resizing, not Pillow's.
    """

    factor: int
    side: int
    slices: int
    normalize: Normalize
    resample: str
    each: int | None = None
    enlarged: str = "always"
    by_tensor: bool = False

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        size = pixels.shape[1], pixels.shape[0]
        grid, notes = self.choose(size, budget)
        side = self.side if grid != WHOLE else self._shown_side(pixels)
        scale = resize_tensor if self.by_tensor else resize
        tiles = [scale(pixels, *self.whole(size, side), self.resample)]
        if grid != WHOLE:
            width, height = self.slice(size, grid)
            sliced = scale(pixels, width * grid[0], height * grid[1], self.resample)
            slices = cut(sliced, grid[1], grid[0])
            if self.enlarged == "adaptive":
                cells = _cells(pixels, grid)
                slices = [self._smaller(*both) for both in zip(cells, slices, strict=True)]
            tiles += slices
        sizes = tuple((tile.shape[1], tile.shape[0]) for tile in tiles)
        return ImagePlan(
            tuple(map(self.normalize, tiles)),
            sizes,
            sum(map(self._count, sizes)),
            cut=(grid[1], grid[0]),
            notes=notes,
        )

    def choose(self, size: Size, budget: Budget = DEFAULT_BUDGET) -> tuple[Size, tuple[str, ...]]:
        """The grid of a picture's slices, WHOLE for none, and notes. Raises ImageError for one
        that is too narrow.
        """
        if max(size) > MAX_RATIO * min(size):
            raise too_narrow(*size)
        own = self.grid(size, self.slices)
        if budget == DEFAULT_BUDGET:
            return own, ()
        grids = [own, *(self.grid(size, count) for count in range(1, self.slices + 1))]
        chosen, notes = budget.choose([self.tokens(size, grid) for grid in grids])
        return grids[chosen], notes

    def grid(self, size: Size, maximum: int) -> Size:
        """The grid whose shape is closest to a picture's, of nearly as many slices as have the
        picture's pixels, and at most `maximum` of them; of equally close ones that with more rows.
        """
        width, height = size
        wished = min(math.ceil(width * height / (self.side * self.side)), maximum)
        if wished <= 1:
            return WHOLE
        shape, best, closest = math.log(width / height), WHOLE, math.inf
        for count in (wished - 1, wished, wished + 1):
            if count == 1 or count > maximum:
                continue
            for rows in range(1, count + 1):
                if count % rows:
                    continue
                error = abs(shape - math.log(count // rows / rows))
                if error < closest or (error == closest and rows > best[1]):
                    best, closest = (count // rows, rows), error
        return best

    def whole(self, size: Size, side: int | None) -> Size:
        """The size in which a picture is shown as a whole: as many pixels as a square of `side`, or
        its own if they are no more than `self.side` has.
        """
        if side is None and size[0] * size[1] <= self.side**2:
            return _nearest(size[0], self.factor), _nearest(size[1], self.factor)
        return self._scaled(*size, side or self.side)

    def _shown_side(self, pixels: Pixels) -> int | None:
        """The side of the square whose pixels a picture is shown with; None for its own."""
        if self.enlarged != "adaptive":
            return self.side if self.enlarged == "always" else None
        area = pixels.shape[0] * pixels.shape[1]
        height, count = glyphs(pixels)
        if 0 < height <= SMALL_GLYPH and count * 1000 / area >= DENSE:
            return self.side
        return TINY_SIDE if area < TINY else None

    def _smaller(self, cell: Pixels, slice_: Pixels) -> Pixels:
        """Return a slice as it is, or, where that has fewer pixels, the part of the picture that it
        was made of, enlarged by what it shows.
        """
        size = cell.shape[1], cell.shape[0]
        if not 0 < cell.size // 3 <= self.side**2:
            return slice_
        side = self._shown_side(cell)
        width, height = self.whole(size, side)
        if side == self.side or width * height >= slice_.shape[0] * slice_.shape[1]:
            return slice_
        return resize_tensor(cell, width, height, "bicubic")

    def slice(self, size: Size, grid: Size) -> Size:
        """The size of each slice of a picture."""
        columns, rows = grid
        width, height = _nearest(size[0], columns) / columns, _nearest(size[1], rows) / rows
        return self._scaled(width, height, self.side)

    def tokens(self, size: Size, grid: Size) -> int:
        """All of a picture's; the most where what it shows decides."""
        sliced = 0 if grid == WHOLE else grid[0] * grid[1] * self._count(self.slice(size, grid))
        sides: tuple[int | None, ...] = (self.side,)
        if grid == WHOLE and self.enlarged != "always":
            sides = (None,) if self.enlarged == "never" else (self.side, None)
        return max(self._count(self.whole(size, side)) for side in sides) + sliced

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        tile = self.max_of_tile()
        return budget.maximum([(count + (count > 1)) * tile for count in (self.slices, 1)])

    def max_of_tile(self) -> int:
        """The most tokens of a tile."""
        return self.each or self._max_cells()

    def _max_cells(self) -> int:
        """The most squares of `factor` pixels of a tile: narrow ones are rounded up, beyond its
        pixels.
        """
        side = self.side / self.factor
        long = math.floor(math.sqrt(MAX_RATIO) * side + 0.5)
        # Of a side that rounds to so many rows, the least is half a row less.
        counts = [rows * math.floor(side**2 / (rows - 0.5) + 0.5) for rows in range(2, long + 1)]
        return max(1, long, *counts)

    def tile_type(self) -> Type:
        return tile_of(*self._scaled(self.side, self.side, self.side))

    def largest_tile_type(self) -> Type:
        """The squarest of the largest ones."""
        rows, columns = squarest_grid(self._max_cells())
        return tile_of(columns * self.factor, rows * self.factor)

    def _count(self, size: Size) -> int:
        return self.each or size[0] * size[1] // self.factor**2

    def _scaled(self, width: float, height: float, side: int) -> Size:
        """The size of about `side` x `side` pixels in the same shape, in whole tokens."""
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
        return _nearest(width, self.factor), _nearest(height, self.factor)


def _nearest(length: float, step: int) -> int:
    """Return the multiple of a step that is nearest, and is not 0."""
    return max(round(length / step) * step, step)


def _cells(pixels: Pixels, grid: Size) -> list[Pixels]:
    """Cut a picture into the parts that its slices show, line by line."""
    lines, columns = (
        [round(length * i / count) for i in range(count + 1)]
        for length, count in zip(pixels.shape[:2], grid[::-1], strict=True)
    )
    return [
        pixels[top:bottom, left:right]
        for top, bottom in pairwise(lines)
        for left, right in pairwise(columns)
    ]


def read_sliced_tiling(
    image: Settings, patch: int, merge: int, each: int | None = None, *, by_tensor: bool = False
) -> SlicedTiling:
    """Read it from an image processor's settings; `patch` is config.json's, of which `merge` x
    `merge` are a token, unless a tile has `each`. `by_tensor`: of torchvision's, which may say what
    is enlarged. Raises ModelError where they do not fit together.
    """
    if (value := image.count("patch_size", 14)) != patch:
        raise ModelError(
            f"{image.where}: patch_size is {value}, expected {patch} as config.json says; correct "
            "one of them"
        )
    factor, side = patch * merge, image.count("scale_resolution", 448)
    if (side // factor) ** 2 > MAX_TOKENS:
        raise ModelError(
            f"{image.where}: scale_resolution is {side}, expected at most "
            f"{math.isqrt(MAX_TOKENS) * factor} pixels"
        )
    slices = image.count("max_slice_nums", 9, maximum=MAX_TILES)
    normalize = read_normalize(image)
    return SlicedTiling(
        factor=factor,
        side=side,
        slices=slices if image.flag("slice_mode", True) else 1,
        normalize=fused(normalize) if by_tensor else normalize,
        resample=read_resample(image, 3, MODES if by_tensor else ()),
        each=each,
        enlarged=image.choice("small_image_upsize", ENLARGED, "always") if by_tensor else "always",
        by_tensor=by_tensor,
    )
