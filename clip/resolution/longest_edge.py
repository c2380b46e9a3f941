"""Pictures scaled to their longest edge, stretched to whole tiles, cut, and once more as a whole
(arXiv:2408.12637).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_IN_A_ROW, Size, cut, read_longest
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

LONGEST = 4096  # what `scaled_to_edge` never goes beyond
MAX_TILE = 1024  # pixels on a side of a tile; published models have at most 512


@dataclass(frozen=True)
class LongestEdgeTiling:
    """Tiles of `tile` pixels a side and `tile_tokens` each, of pictures whose longest edge is
    scaled to `longest`; the whole picture follows. Without `splits` it is all there is. A budget
    can choose other edges, of up to `max_in_a_row` tiles.
    """

    tile: int
    tile_tokens: int
    longest: int
    splits: bool
    max_in_a_row: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Each step rounds as the reference does."""
        size, edges = (pixels.shape[1], pixels.shape[0]), self._edges(budget)
        grids = [edge_grid(size, edge, self.tile) for edge in edges]
        chosen, notes = budget.choose([self._tokens(grid) for grid in grids])
        rows, columns = grids[chosen]
        scaled = resize(pixels, *scaled_to_edge(size, edges[chosen] or self.longest), self.resample)
        if rows:
            scaled = resize(scaled, columns * self.tile, rows * self.tile, self.resample)
        tiles = [
            *(cut(scaled, rows, columns) if rows else []),
            resize(scaled, self.tile, self.tile, self.resample),
        ]
        return ImagePlan(
            tuple(self.normalize(tile) for tile in tiles),
            ((self.tile, self.tile),) * len(tiles),
            self._tokens((rows, columns)),
            cut=(rows, columns) if rows else (1, 1),
            notes=notes,
        )

    def _edges(self, budget: Budget) -> list[int]:
        """The longest edges at which a picture may be shown, the checkpoint's own first; 0 is the
        whole picture alone.
        """
        own = self.longest if self.splits else 0
        others = (
            [0, *(self.tile * count for count in range(2, self.max_in_a_row + 1))]
            if self.splits and budget != DEFAULT_BUDGET
            else []
        )
        return [own, *others]

    def _tokens(self, grid: tuple[int, int]) -> int:
        return (grid[0] * grid[1] + 1) * self.tile_tokens

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return budget.maximum(
            [self._tokens(edge_grid((1, 1), edge, self.tile)) for edge in self._edges(budget)]
        )

    def tile_type(self) -> Type:
        return tile_of(self.tile, self.tile)

    largest_tile_type = tile_type


def fitted(size: Size, longest: int) -> Size:
    """The longer edge at `longest`, the other by the shape, rounded down."""
    aspect = size[0] / size[1]
    return (
        (longest, int(longest / aspect)) if size[0] >= size[1] else (int(longest * aspect), longest)
    )


def scaled_to_edge(size: Size, longest: int) -> Size:
    """The longer edge at `longest`, the other rounded up to an even number, and none above
    LONGEST.
    """
    width, height = fitted(size, longest)
    if size[0] >= size[1]:
        height = max(height + height % 2, 1)
    else:
        width = max(width + width % 2, 1)
    if max(width, height) > LONGEST:
        width, height = fitted((width, height), LONGEST)
    return max(width, 1), max(height, 1)


def edge_grid(size: Size, longest: int, tile: int) -> tuple[int, int]:
    """(rows, columns) of the tiles that a picture scaled to its longest edge is stretched to; (0,
    0) where one is enough, or it is 0.
    """
    if not longest:
        return 0, 0
    scaled = scaled_to_edge(size, longest)
    width, height = fitted(scaled, ceil(max(scaled) / tile) * tile)
    rows, columns = ceil(height / tile), ceil(width / tile)
    return (rows, columns) if rows * columns > 1 else (0, 0)


def read_longest_edge_tiling(
    image: Settings, *, patch: int, positions: int, factor: int, max_in_a_row: int
) -> LongestEdgeTiling:
    """Read it from an image processor's settings; `patch`, `positions` on a side of the table of
    positions and `factor`, patches on a side of a token, are config.json's. Raises ModelError where
    they do not fit together.
    """
    tile, longest = read_longest(image, "max_image_size", 364), read_longest(image, "size", 4 * 364)
    if (
        not positions
        or tile % patch
        or (tile // patch) % factor
        or longest > MAX_IN_A_ROW * tile
        or tile > MAX_TILE
    ):
        raise ModelError(
            f"{image.where}: max_image_size {tile} does not fit size {longest}, or patch_size "
            f"{patch} and scale_factor {factor} of config.json; expected at most {MAX_IN_A_ROW} "
            f"tiles in a row, up to {MAX_TILE} wide, of whole groups"
        )
    return LongestEdgeTiling(
        tile=tile,
        tile_tokens=(tile // patch // factor) ** 2,
        longest=longest,
        splits=image.flag("do_image_splitting", True),
        max_in_a_row=max_in_a_row,
        normalize=read_normalize(image),
        resample=read_resample(image, 1),
    )
