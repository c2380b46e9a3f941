"""Pictures as a whole, and, where one tile does not show them well, in the smallest grid of tiles
that does (arXiv:2405.20797).
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, cut
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

COVERED = 0.9  # of a picture's pixels that are shown without shrinking


@dataclass(frozen=True)
class CoveringTiling:
    """Tiles of `side` pixels a side and `tile_tokens` each, up to `tiles` of them."""

    side: int
    tile_tokens: int
    tiles: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        size = pixels.shape[1], pixels.shape[0]
        counts = [self.tiles] if budget == DEFAULT_BUDGET else [*range(self.tiles, 0, -1)]
        grids = [self.grid(size, count) for count in counts]
        chosen, notes = budget.choose([self._tokens(grid) for grid in grids])
        columns, rows = grids[chosen]
        tiles = [resize(pixels, self.side, self.side, self.resample)]
        if columns * rows > 1:
            scaled = resize(pixels, columns * self.side, rows * self.side, self.resample)
            tiles += cut(scaled, rows, columns)
        return ImagePlan(
            tuple(map(self.normalize, tiles)),
            ((self.side, self.side),) * len(tiles),
            self._tokens((columns, rows)),
            cut=(rows, columns),
            notes=notes,
        )

    def grid(self, size: Size, maximum: int) -> tuple[int, int]:
        """Columns and rows. As the reference does, grids are judged with the one as the other."""
        counts = range(1, maximum + 1)
        grids = sorted(
            ((a, b) for a in counts for b in counts if a * b <= maximum),
            key=lambda grid: grid[0] * grid[1],
        )
        covered = [(grid, self._covered(size, grid)) for grid in grids]
        enough = [(grid, share) for grid, share in covered if share > COVERED]
        if enough:
            return min(enough, key=lambda one: (one[0][0] * one[0][1], -one[1]))[0]
        return min(covered, key=lambda one: (-one[1], one[0][0] * one[0][1]))[0]

    def _covered(self, size: Size, grid: tuple[int, int]) -> float:
        """Return the share of a picture's pixels that are left when each part of a grid of rows and
        columns fits into a tile.
        """
        (width, height), (rows, columns) = size, grid
        heights = [height // rows] * (rows - 1)
        widths = [width // columns] * (columns - 1)
        heights.append(height - sum(heights))
        widths.append(width - sum(widths))
        area: float = 0
        for tall in heights:
            for wide in widths:
                long, short = max(wide, tall), float(min(wide, tall))
                if long > self.side:
                    short, long = short / long * self.side, self.side
                area += long * short
        return area / (width * height)

    def _tokens(self, grid: tuple[int, int]) -> int:
        count = grid[0] * grid[1]
        return (count + (count > 1)) * self.tile_tokens

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum([self._tokens((count, 1)) for count in range(self.tiles, 0, -1)])

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    largest_tile_type = tile_type


def read_covering_tiling(image: Settings, side: int, tile_tokens: int) -> CoveringTiling:
    """Read it from an image processor's settings. Raises ModelError for tiles of another size."""
    size = image.part("size")
    edges = size.count("height", 384), size.count("width", 384)
    if edges != (side, side):
        raise ModelError(
            f"{size.where} is {edges[0]} x {edges[1]}, expected {side} x {side} as config.json "
            "says; correct one of them"
        )
    crops = image.flag("crop_to_patches", False)
    if crops:
        image.choice("use_covering_area_grid", (True,), True)
    return CoveringTiling(
        side=side,
        tile_tokens=tile_tokens,
        tiles=image.count("max_patches", 12, maximum=MAX_TILES) if crops else 1,
        normalize=read_normalize(image, CLIP_MEAN, CLIP_STD),
        resample=read_resample(image, 3),
    )
