"""Pictures in their own size, with zeros to their right and below up to whole tokens; only those of
too many patches are made smaller (arXiv:2504.07491).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from mtmd.clip.image.pixels import Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import USUAL_SIDE, ImagePlan, tile_of
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Type

MEAN = STD = (0.5, 0.5, 0.5)
MAX_PATCHES = 1 << 20  # of a picture


@dataclass(frozen=True)
class PaddedResolution:
    """A token stands for `merge` x `merge` patches of `patch` pixels a side; a picture has at most
    `patches` whole ones, and `side` on a side. `by_tensor`: pictures are resized as tensors.
    """

    patch: int
    merge: int
    patches: int
    side: int
    normalize: Normalize
    resample: str
    by_tensor: bool

    @property
    def factor(self) -> int:
        """Pixels on a side of a token."""
        return self.patch * self.merge

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        given = pixels.shape[0], pixels.shape[1]
        (height, width), usual = self.size(*given, budget), self.size(*given)
        notes = (
            ()
            if (height, width) == usual
            else (
                f"scaled to {width} x {height} by the image budget, {usual[1]} x {usual[0]} "
                "without it",
            )
        )
        scale = resize_tensor if self.by_tensor else resize
        rows, columns = self._grid(height, width)
        canvas = np.zeros((rows * self.factor, columns * self.factor, 3), np.uint8)
        canvas[:height, :width] = scale(pixels, width, height, self.resample)
        shape = (columns * self.factor, rows * self.factor)
        return ImagePlan((self.normalize(canvas),), (shape,), rows * columns, notes=notes)

    def size(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Return height and width to which a picture is scaled, without its padding."""
        count = max(height // self.patch, 1.0) * max(width // self.patch, 1.0)
        longest = self.side * self.patch
        limits = (math.sqrt(self.patches / count), longest / height, longest / width)
        own = self._scaled(height, width, min(1.0, *limits))
        low, high = self._limits(budget)
        if low <= self._tokens(*own) <= high:
            return own
        long = max(height, width)

        def tokens(edge: int) -> int:
            return self._tokens(*self._scaled(height, width, edge / long))

        edges = range(1, longest + 1)
        edge = bisect_right(edges, high, key=tokens)
        if self._tokens(*own) < low:
            edge = min(bisect_left(edges, low, key=tokens) + 1, edge)
        return self._scaled(height, width, edge / long)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most that any picture takes: one that is scaled up to a least number may have a row
        or a column of tokens more.
        """
        low, high = self._limits(budget)
        return (
            high
            if budget.min_tokens is None or budget.max_tokens is not None
            else max(high, 2 * low)
        )

    def _scaled(self, height: int, width: int, scale: float) -> tuple[int, int]:
        longest = self.side * self.patch
        new = (min(max(1, int(edge * scale)), longest) for edge in (height, width))
        return next(new), next(new)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return -(-height // self.factor), -(-width // self.factor)

    def _tokens(self, height: int, width: int) -> int:
        rows, columns = self._grid(height, width)
        return rows * columns

    def _limits(self, budget: Budget) -> tuple[int, int]:
        rows, columns = self._largest()
        return budget.limits(1, rows * columns)

    def _largest(self) -> tuple[int, int]:
        """The grid of tokens that no picture has more of. A side of n tokens is longer than
        merge * (n - 1) patches. Of a picture that is h patches high, with its fractions, and w
        wide, at most `patches` are whole, less than one on each side is not, and so
        (h - 1) * (w - 1) < patches.
        """

        def columns(rows: int) -> int:
            beyond = self.merge * (rows - 1) - 1
            wide = self.side if beyond <= 0 else min(self.patches / beyond + 1, self.side)
            return math.ceil(wide / self.merge)

        grids = [(n, columns(n)) for n in range(1, -(-self.side // self.merge) + 1)]
        return max(grids, key=lambda grid: grid[0] * grid[1])

    def tile_type(self) -> Type:
        rows, columns = self._grid(*self.size(USUAL_SIDE, USUAL_SIDE))
        return tile_of(columns * self.factor, rows * self.factor)

    def largest_tile_type(self) -> Type:
        rows, columns = self._largest()
        return tile_of(columns * self.factor, rows * self.factor)


def read_padded(
    image: Settings, patch: int, merge: int, patches: int, side: int, by_tensor: bool
) -> PaddedResolution:
    """Read it from an image processor's settings, with the limits that were read. Raises ModelError
    for what is not followed.
    """
    image.choice("resample", (3,), 3)
    normalize = read_normalize(image, MEAN, STD)
    return PaddedResolution(
        patch=patch,
        merge=merge,
        patches=Settings({"limit": patches}, image.where).count("limit", maximum=MAX_PATCHES),
        side=Settings({"side": side}, image.where).count("side", maximum=MAX_WIDTH // patch),
        normalize=fused(normalize) if by_tensor else normalize,
        resample=MODES[1],
        by_tensor=by_tensor,
    )
