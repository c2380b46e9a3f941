"""The whole picture on a square, and below it the picture stretched to a grid of crops that
overlap: one tile, whose shape says how it is cut. Moondream's (github.com/vikhyat/moondream).

Sizes are (width, height) in pixels, grids (rows, columns) of crops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import Normalize, Pixels
from mtmd.clip.image.resize import resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, squarest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Shape, Type

NARROW = 2  # a picture with a very short side has more crops than `crops`, here up to so many times


@dataclass(frozen=True)
class OverlappingCrops:
    """Crops of `side` pixels a side, which share `margin` pixels on each side with their
    neighbours; about `crops` of them at most. A picture takes `tokens`, however it is cut.
    """

    side: int
    margin: int
    crops: int
    tokens: int
    normalize: Normalize
    resample: str

    @property
    def step(self) -> int:
        """Pixels a side that a crop has for itself."""
        return self.side - 2 * self.margin

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Raises ImageError for a picture that is so narrow that it has too many crops."""
        budget.check_fixed(self.tokens)
        grid = self.grid((pixels.shape[1], pixels.shape[0]))
        width, height = self.size(grid)
        tile = np.zeros((self.side + height, width, 3), np.uint8)
        tile[: self.side, : self.side] = resize(pixels, self.side, self.side, self.resample)
        tile[self.side :] = resize(pixels, width, height, self.resample)
        size = width, self.side + height
        return ImagePlan((self.normalize(tile),), (size,), self.tokens, cut=grid)

    def grid(self, size: Size) -> tuple[int, int]:
        """The grid of a picture: one crop where a side is no longer than that, else as many as it
        takes, and more, in its shape, up to `crops`; of a large picture fewer than it takes.
        """
        width, height = (edge - 2 * self.margin for edge in size)
        if min(width, height) <= self.step:
            return 1, 1
        rows, columns = (math.ceil(edge / self.step) for edge in (height, width))
        if rows * columns > self.crops:
            share = math.sqrt(self.crops / (rows * columns))
            rows, columns = (max(math.floor(n * share), 1) for n in (rows, columns))
        else:
            rows = max(math.floor(math.sqrt(self.crops * height / width)), rows)
            columns = max(math.floor(math.sqrt(self.crops * width / height)), columns)
            if rows * columns > self.crops:
                if columns > rows:
                    columns = self.crops // rows
                else:
                    rows = self.crops // columns
        if rows * columns > NARROW * self.crops:
            raise ImageError(
                f"picture of {size[0]} x {size[1]} pixels would be cut into {rows * columns} "
                f"crops, expected at most {NARROW * self.crops}; crop it to a less narrow shape"
            )
        return rows, columns

    def size(self, grid: tuple[int, int]) -> Size:
        """The size of the picture that is cut."""
        rows, columns = grid
        return columns * self.step + 2 * self.margin, rows * self.step + 2 * self.margin

    def grid_of(self, tile: Shape) -> tuple[int, int]:
        """The grid of a tile [..., Y, X]."""
        height, width = tile[-2] - self.side - 2 * self.margin, tile[-1] - 2 * self.margin
        return height // self.step, width // self.step

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        return self.tokens

    def tile_type(self) -> Type:
        return self._tile(squarest_grid(self.crops))

    def largest_tile_type(self) -> Type:
        return self._tile((1, NARROW * self.crops))

    def _tile(self, grid: tuple[int, int]) -> Type:
        width, height = self.size(grid)
        return tile_of(width, self.side + height)


def read_overlapping_crops(vision: Settings, patch: int, normalize: Normalize) -> OverlappingCrops:
    """Read it from the tower's settings. Raises ModelError where they do not fit together."""
    side, margin = vision.count("crop_size", 378), vision.count("overlap_margin", 4)
    if side % patch or 2 * margin * patch >= side:
        raise ModelError(
            f"{vision.where}: crop_size is {side} with an overlap_margin of {margin} patches of "
            f"{patch} pixels, expected whole patches, and more than both margins take"
        )
    return OverlappingCrops(
        side=side,
        margin=margin * patch,
        crops=vision.count("max_crops", 12, maximum=MAX_TILES),
        tokens=(side // patch) ** 2,
        normalize=normalize,
        resample="lanczos",
    )
