"""The whole on a square, then tiles of the picture as it lies at the top left of a grid of them:
those at its right and lower edge end with its last patch (Phi-4-multimodal's, arXiv:2503.01743).

Sizes are (width, height) in pixels, grids (columns, rows) of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.tensor_resize import resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_TILES, Size, closest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type
from mtmd.kernels.resources.threads import one_thread

SHORTEST = 10  # pixels of a side of the picture as it is shown
WHITE = 255
LINE_END, WHOLE_NEXT, MARKS = 0, 1, 2  # a tile's first embeddings: those that end lines and parts


@dataclass(frozen=True)
class RaggedTiles:
    """Up to `tiles` tiles of `side` pixels a side, in which `merge` x `merge` patches of `patch`
    pixels are a token. What a tower makes of a tile begins with `MARKS` embeddings, which stand at
    the end of each line of tokens and between the tiles and the whole.
    """

    side: int
    patch: int
    merge: int
    tiles: int
    normalize: Normalize

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Raises ImageError for a picture that is too narrow."""
        size = (pixels.shape[1], pixels.shape[0])
        ways = [self.tiles]
        if budget != DEFAULT_BUDGET:
            ways += range(self.tiles - 1, 0, -1)
        grids = [self.grid(size, maximum) for maximum in ways]
        chosen, notes = budget.choose([self.tokens(size, grid) for grid in grids])
        columns, rows = grid = grids[chosen]
        width, height = self.size(size, grid)
        canvas = np.full((rows * self.side, columns * self.side, 3), WHITE, np.uint8)
        canvas[:height, :width] = resize_tensor(pixels, width, height, "bilinear")
        planes = self.normalize.planes(canvas.transpose(2, 0, 1))
        shown = self.patches(size, grid)
        parts = [
            planes[:, y : y + down * self.patch, x : x + across * self.patch]
            for y, down in self._edges(shown[1])
            for x, across in self._edges(shown[0])
        ]
        tiles = (self._whole(planes), *map(np.ascontiguousarray, parts))
        order = self._order(shown)
        sizes = tuple((tile.shape[2], tile.shape[1]) for tile in tiles)
        return ImagePlan(tiles, sizes, len(order), cut=(rows, columns), order=order, notes=notes)

    def grid(self, size: Size, maximum: int) -> Size:
        """The grid of tiles that holds a picture in its size, or, where that has more than
        `maximum`, the one whose shape is closest to it.
        """
        columns, rows = (math.ceil(edge / self.side) for edge in size)
        if columns * rows > maximum:
            return closest_grid(size, _grids(maximum), self.side)
        return columns, rows

    def size(self, size: Size, grid: Size) -> Size:
        """The size of a picture that fills its grid in one direction. Raises ImageError for one
        that is too narrow.
        """
        room = grid[0] * self.side, grid[1] * self.side
        across, down = room[0] / size[0], room[1] / size[1]
        result = (
            (room[0], int(size[1] * across)) if across < down else (int(size[0] * down), room[1])
        )
        if min(result) < SHORTEST:
            raise ImageError(
                f"picture of {size[0]} x {size[1]} pixels would be shown as {result[0]} x "
                f"{result[1]}, expected {SHORTEST} at least on a side; crop it to a less narrow "
                "shape"
            )
        return result

    def patches(self, size: Size, grid: Size) -> Size:
        """(columns, rows) of patches that show something of the picture."""
        width, height = self.size(size, grid)
        left = grid[0] * self.side - width, grid[1] * self.side - height
        across, down = (
            count * (self.side // self.patch) - rest // self.patch
            for count, rest in zip(grid, left, strict=True)
        )
        return across, down

    def tokens(self, size: Size, grid: Size) -> int:
        across, down = self.patches(size, grid)
        lines = sum(self._cells(count) for _, count in self._edges(down))
        return (
            lines * (1 + sum(self._cells(count) for _, count in self._edges(across)))
            + 1
            + self._cells(self.side // self.patch) * (1 + self._cells(self.side // self.patch))
        )

    def _cells(self, patches: int) -> int:
        """Tokens along so many patches of a tile."""
        return -(-patches // self.merge)

    def _edges(self, patches: int) -> list[tuple[int, int]]:
        """Return where tiles begin along a side, in pixels, and the patches of each."""
        each = self.side // self.patch
        return [(at * self.patch, min(each, patches - at)) for at in range(0, patches, each)]

    def _whole(self, planes: np.ndarray) -> np.ndarray:
        """The canvas on a square, by bicubic interpolation of numbers without antialiasing."""
        if planes.shape[1:] == (self.side, self.side):
            return planes
        with one_thread():
            scaled = F.interpolate(
                torch.from_numpy(planes)[None],
                (self.side, self.side),
                mode="bicubic",
                align_corners=False,
                antialias=False,
            )
        whole: np.ndarray = scaled[0].numpy()
        return whole

    def _order(self, shown: Size) -> np.ndarray:
        """Return which embeddings of all tiles, the whole first, are the tokens: lines of the
        tiles together, then those of the whole.
        """
        side = self._cells(self.side // self.patch)
        first, grid = MARKS + side**2, []
        for _, down in self._edges(shown[1]):
            line = []
            for _, across in self._edges(shown[0]):
                shape = self._cells(down), self._cells(across)
                count = math.prod(shape)
                line.append(first + MARKS + np.arange(count).reshape(shape))
                first += MARKS + count
            grid.append(np.concatenate(line, 1))
        tiles = np.concatenate(grid)
        whole = MARKS + np.arange(side**2).reshape(side, side)
        ended = [
            np.pad(part, ((0, 0), (0, 1)), constant_values=LINE_END) for part in (tiles, whole)
        ]
        return np.concatenate((ended[0].flatten(), [WHOLE_NEXT], ended[1].flatten()))

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        column = [
            self.tokens((self.side, self.side * count), (1, count))
            for count in range(self.tiles, 0, -1)
        ]
        return budget.maximum(column)

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    largest_tile_type = tile_type


@lru_cache
def _grids(maximum: int) -> tuple[Size, ...]:
    """(columns, rows) of up to so many tiles, by their number."""
    counts = range(1, maximum + 1)
    grids = {(i, j) for n in counts for i in range(1, n + 1) for j in counts if i * j <= maximum}
    return tuple(sorted(grids, key=math.prod))


def read_ragged_tiles(image: Settings, side: int, patch: int, merge: int) -> RaggedTiles:
    """Read it from an image processor's settings; the tower has tiles of `side` pixels and patches
    of `patch`. Raises ModelError where the two do not fit together.
    """
    size = image.part("size")
    edges = size.count("height", side), size.count("width", side)
    if edges != (side, side) or image.count("patch_size", patch) != patch or side % (patch * merge):
        raise ModelError(
            f"{image.where}: tiles of {edges[0]} x {edges[1]} pixels, expected {side} x {side} in "
            f"patches of {patch} as config.json says, an even number of them; correct one of them"
        )
    image.choice("resample", (3,), 3)
    return RaggedTiles(
        side=side,
        patch=patch,
        merge=merge,
        tiles=image.count("dynamic_hd", 36, maximum=MAX_TILES),
        normalize=fused(read_normalize(image)),
    )
