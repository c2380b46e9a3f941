"""Pictures that are small enough go in whole, at any resolution; larger ones in tiles, and perhaps
once more as a whole.

Sizes are (width, height) in pixels, grids (columns, rows) of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import (
    MAX_RATIO,
    MAX_TILES,
    Size,
    closest_grid,
    cut,
    squarest_grid,
    too_narrow,
    within,
)
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

WHOLE = (1, 1)
MAX_TILED = 1 << 24  # pixels of all tiles of a picture; published models have 2.6 million


@dataclass(frozen=True)
class AdaptiveTiling:
    """A token stands for `shuffle` x `shuffle` patches of `patch` pixels a side.

    A whole picture takes `minimum` to `maximum` tokens. One of more than `tolerance` times the most
    is cut into `fewest` to `tiles` tiles of `tile` pixels a side, 1 meaning that none is; with
    `thumbnail`, the whole picture follows its tiles.
    """

    patch: int
    shuffle: int
    minimum: int
    maximum: int
    tolerance: float
    tile: int
    fewest: int
    tiles: int
    thumbnail: bool
    normalize: Normalize
    resample: str

    @property
    def factor(self) -> int:
        """Pixels on a side of what becomes one token."""
        return self.patch * self.shuffle

    @property
    def cuts(self) -> bool:
        return self.tiles > 1

    @property
    def tile_tokens(self) -> int:
        return (self.tile // self.factor) ** 2

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        grid, whole, notes = self.plan((pixels.shape[1], pixels.shape[0]), budget)
        tiles = self.pictures(pixels, grid, whole)
        return ImagePlan(
            tuple(map(self.normalize, tiles)),
            tuple((tile.shape[1], tile.shape[0]) for tile in tiles),
            self.tokens(grid, whole),
            cut=(grid[1], grid[0]),
            notes=notes,
        )

    def plan(
        self, size: Size, budget: Budget = DEFAULT_BUDGET
    ) -> tuple[Size, Size, tuple[str, ...]]:
        """The grid of a picture's tiles, the size of the picture as a whole, and notes. Raises
        ImageError for one that is too narrow.
        """
        if max(size) > MAX_RATIO * min(size):
            raise too_narrow(*size)
        own = self._grid(size, self.tiles) if self._too_large(size) else WHOLE
        usual = self._scaled(size, self.minimum, self.maximum)
        if budget == DEFAULT_BUDGET:
            return own, usual, ()
        scaled = self._scaled(size, *self._limits(budget))
        if budget.max_tokens is not None:  # rounded up beyond what was asked for
            columns, rows = within(
                scaled[0] // self.factor, scaled[1] // self.factor, budget.max_tokens
            )
            scaled = columns * self.factor, rows * self.factor
        ways = [
            (own, usual),
            (WHOLE, scaled),
            *((self._grid(size, maximum), usual) for maximum in range(self.fewest, self.tiles + 1)),
        ]
        chosen, notes = budget.choose([self.tokens(*way) for way in ways])
        return *ways[chosen], notes

    def tokens(self, grid: Size, whole: Size) -> int:
        count = whole[0] * whole[1] // self.factor**2
        return (
            count
            if grid == WHOLE
            else grid[0] * grid[1] * self.tile_tokens + count * self.thumbnail
        )

    def pictures(self, pixels: Pixels, grid: Size, whole: Size) -> list[Pixels]:
        """The tiles, line by line, and the whole picture."""
        pictures = []
        if grid != WHOLE:
            stretched = resize_tensor(
                pixels, grid[0] * self.tile, grid[1] * self.tile, self.resample
            )
            pictures = cut(stretched, grid[1], grid[0])
        if grid == WHOLE or self.thumbnail:
            pictures.append(resize_tensor(pixels, *whole, self.resample))
        return pictures

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        whole = self.max_whole(budget)
        ways = [
            count * self.tile_tokens + self.max_whole() * self.thumbnail
            for count in range(self.fewest, self.tiles + 1)
            if count > 1
        ]
        return budget.maximum([max([whole, *ways]), whole, *ways])

    def max_whole(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most tokens of a picture as a whole: narrow and small ones are rounded up, beyond the
        limit if need be.
        """
        low, high = self._limits(budget)
        # Each side of a picture that is scaled up is rounded up: to two rows at worst where one and
        # a bit were meant.
        maximum = max(high, math.isqrt(MAX_RATIO * high), 2 * low, math.isqrt(MAX_RATIO * low) + 1)
        return maximum if budget.max_tokens is None else min(maximum, budget.max_tokens)

    def largest(self) -> Size:
        """The largest of what a picture can become: a tile, or the squarest of the whole ones with
        the most tokens.
        """
        maximum = self.max_whole()
        if self.cuts and self.tile_tokens >= maximum:
            return self.tile, self.tile
        rows, columns = squarest_grid(maximum)
        return columns * self.factor, rows * self.factor

    def tile_type(self) -> Type:
        """A whole picture of the most tokens, nearly a square, as a tile is in published models."""
        side = math.isqrt(self.maximum) * self.factor
        return tile_of(side, side)

    def largest_tile_type(self) -> Type:
        return tile_of(*self.largest())

    def _limits(self, budget: Budget) -> tuple[int, int]:
        """Tokens of a whole picture. Where it can be cut, it takes no more than the checkpoint's
        most: with more, it is.
        """
        low, high = budget.limits(self.minimum, self.maximum)
        if self.cuts:
            high = min(high, self.maximum)
        return min(low, high), high

    def _too_large(self, size: Size) -> bool:
        width, height = (max(self.patch, round(side / self.factor) * self.factor) for side in size)
        return self.cuts and width * height > self.maximum * self.factor**2 * self.tolerance

    def _grid(self, size: Size, maximum: int) -> Size:
        return closest_grid(size, _grids(self.fewest, maximum), self.tile)

    def _scaled(self, size: Size, minimum: int, maximum: int) -> Size:
        """Whole tokens on both sides, `minimum` to `maximum` of them in all, nearly in the same
        ratio.
        """
        factor, (width, height) = self.factor, size
        columns, rows = (max(1, round(side / factor)) for side in size)
        if columns * rows > maximum:
            shrink = math.sqrt(height * width / (maximum * factor**2))
            columns, rows = (max(1, math.floor(side / shrink / factor)) for side in size)
        elif columns * rows < minimum:
            grow = math.sqrt(minimum * factor**2 / (height * width))
            columns, rows = (math.ceil(side * grow / factor) for side in size)
        return columns * factor, rows * factor


@lru_cache
def _grids(fewest: int, maximum: int) -> tuple[Size, ...]:
    """Return the grids by their number of tiles; of equal numbers in the order of a set, as the
    reference has it: at a tie of shapes the order decides.
    """
    grids = [
        (columns, rows)
        for n in range(fewest, maximum + 1)
        for columns in range(1, n + 1)
        for rows in range(1, n + 1)
        if fewest <= columns * rows <= maximum
    ]
    return tuple(sorted(set(grids), key=lambda grid: grid[0] * grid[1]))


def read_adaptive(image: Settings, patch: int, shuffle: int) -> AdaptiveTiling:
    """Read it from an image processor's settings; `patch` and `shuffle` are config.json's. Raises
    ModelError where they do not fit together.
    """
    for key, expected, default in (
        ("encoder_patch_size", patch, 16),
        ("downsample_factor", shuffle, 2),
    ):
        if (value := image.count(key, default)) != expected:
            raise ModelError(
                f"{image.where}: {key} is {value}, expected {expected} as config.json says; "
                "correct one of them"
            )
    if patch * shuffle == 1:  # torch cannot resize to a single pixel
        raise ModelError(
            f"{image.where}: encoder_patch_size and downsample_factor are 1, expected tokens of "
            "several pixels"
        )
    fewest, tiles = (
        image.count("min_tiles", 2, maximum=MAX_TILES),
        image.count("max_tiles", 10, maximum=MAX_TILES),
    )
    minimum, maximum = image.count("min_image_tokens", 64), image.count("max_image_tokens", 256)
    if fewest > tiles or minimum > maximum:
        raise ModelError(
            f"{image.where}: {fewest} to {tiles} tiles and {minimum} to {maximum} tokens a "
            "picture, expected limits in order"
        )
    tile = image.count("tile_size", 512)
    if not image.flag("do_image_splitting", True):
        fewest = tiles = 1
    elif tile % (patch * shuffle):
        raise ModelError(
            f"{image.where}: tile_size is {tile}, expected a multiple of {patch * shuffle} pixels, "
            "the side of a token"
        )
    elif tiles * tile**2 > MAX_TILED:
        raise ModelError(
            f"{image.where}: {tiles} tiles of {tile} x {tile} pixels, expected at most "
            f"{MAX_TILED:,} pixels in all"
        )
    return AdaptiveTiling(
        patch=patch,
        shuffle=shuffle,
        minimum=minimum,
        maximum=maximum,
        tolerance=image.number("max_pixels_tolerance", 2.0),
        tile=tile,
        fewest=fewest,
        tiles=tiles,
        thumbnail=image.flag("use_thumbnail", True),
        normalize=fused(read_normalize(image)),
        resample=read_resample(image, 2, MODES),
    )
