"""Several pictures of unequal sizes in one run of a tower (`grids.py` says how they lie).

Small pictures keep neither the cores of a CPU nor a GPU busy, and those of families that read
pictures in their own size are hardly ever equal. What a pack is planned for is how long it is: to
the token on a CPU, where a plan costs little beside the run; in few sizes on a device that waits
for the host, which has then planned, compiled and recorded all there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mtmd.clip.grids import Cells, Grids, Part, token_by_token
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.plan.flash_choice import AttentionForm

# Patches of a pack, at most: of more, products gain nothing by more rows
# (benchmarks/results/2026-11-23-packing.md)
MAX_ON_HOST = 1024
SIZES = tuple(range(128, 2049, 128))  # patches that packs have on a device


@runtime_checkable
class Packs(Protocol):
    """A vision family whose tower reads packs."""

    @property
    def cells(self) -> Cells:
        """Return what a token stands for."""

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        """Build the graph as `graph` does, for tiles whose patches lie as `grids` says."""


@dataclass(frozen=True, eq=False)
class Pack:
    """`pixels` [1, 3, tokens * side, side], and where each picture lies in it."""

    pixels: Tensor
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Strip:
    """Packs of one tower: what fits in, and where it goes. `few`: only those of `SIZES`."""

    cells: Cells
    few: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of all the packs that there are, where they are few; of the longest."""
        patches = SIZES if self.few else (MAX_ON_HOST,)
        return tuple(dict.fromkeys(size // self.cells.patches for size in patches))

    def takes(self, shape: Shape) -> bool:
        """Return whether a tile [C, Y, X] can be in a pack."""
        channels, *sides = shape
        whole = channels == 3 and not any(side % self.cells.side for side in sides)
        return whole and 0 < self.tokens(shape) <= self.sizes[-1]

    def tokens(self, shape: Shape) -> int:
        return shape[1] * shape[2] // self.cells.side**2

    def length(self, shapes: Sequence[Shape]) -> int | None:
        """Tokens of a pack of such tiles; None where they do not go into one."""
        total = sum(map(self.tokens, shapes))
        if not all(map(self.takes, shapes)) or total > self.sizes[-1]:
            return None
        return next(size for size in self.sizes if size >= total) if self.few else total

    def choose(self, shapes: Sequence[Shape]) -> list[int]:
        """The first of these tiles, if it can be in a pack, and those that follow for which there
        is room.
        """
        chosen, room = [], self.sizes[-1]
        for index, shape in enumerate(shapes):
            if self.takes(shape) and self.tokens(shape) <= room:
                chosen.append(index)
                room -= self.tokens(shape)
            if not chosen or not room:
                break
        return chosen

    def tile(self, tokens: int) -> Shape:
        return 3, tokens * self.cells.side, self.cells.side

    def parts(self, shapes: Sequence[Shape]) -> tuple[Part, ...]:
        result, first = [], 0
        for _, height, width in shapes:
            grid = height // self.cells.patch, width // self.cells.patch
            result.append(Part(*grid, first, token_by_token(*grid, self.cells.merge)))
            first += result[-1].patches
        return tuple(result)

    def lay(self, tiles: Sequence[np.ndarray], strip: Tensor) -> None:
        """Tiles [3, Y, X] into a strip [3, tokens * side, side] of any type, in order; 0 behind."""
        side, first = self.cells.side, 0
        for tile in tiles:
            rows, columns = tile.shape[1] // side, tile.shape[2] // side
            values = torch.from_numpy(tile if tile.flags.writeable else tile.copy())
            cells = values.unflatten(1, (rows, side)).unflatten(3, (columns, side))
            end = first + tile.shape[1] * columns
            strip[:, first:end].unflatten(1, (rows, columns, side)).copy_(cells.transpose(2, 3))
            first = end
        strip[:, first:].zero_()

    def split(self, embeddings: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """embeddings [1, tokens, D] -> [T, D] of each tile"""
        counts = [self.tokens(shape) for shape in shapes]
        return list(embeddings[0, : sum(counts)].split(counts))


def all_equal(shapes: Sequence[Shape]) -> bool:
    return len(set(shapes)) == 1
