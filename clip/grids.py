"""Layout of patches: which of those that a tower reads belong to which picture, and where in it
each lies.

A tile is one picture, whose patches lie in reading order. A pack is several pictures of any sizes
as one that is a token wide: token below token, picture below picture, and nothing at the end. So
the patches of a token follow one another, as do those of a picture, and what averages or joins the
neighbours of a token finds them where it would in a picture of that shape.

A family that builds its graph from `Grids` reads both. Of a pack the graph knows how long it is and
nothing else: which pictures are in it are values of a run, so that few plans do for pictures of any
sizes (as cu_seqlens do in transformers' Qwen2-VL).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.graph import Node, Shape, graph_input


@dataclass(frozen=True)
class Cells:
    """A token stands for `merge` x `merge` patches of `patch` pixels a side."""

    patch: int
    merge: int = 1

    @property
    def side(self) -> int:
        """Pixels on a side of a token."""
        return self.patch * self.merge

    @property
    def patches(self) -> int:
        """Patches of a token."""
        return self.merge**2


@dataclass(frozen=True, eq=False)
class Part:
    """A picture of rows x columns patches, the `first` place that one of them has, and how many
    places behind that each has, in reading order: int64 [rows * columns].
    """

    rows: int
    columns: int
    first: int
    behind: Tensor

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def locations(self) -> slice:
        """Slice of all its patches."""
        return slice(self.first, self.first + self.patches)


class Grids(Protocol):
    """Interface through which a family's graph sees the patches that it reads."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of patches as they lie in what is read."""

    @property
    def segments(self) -> Node | None:
        """int32 [P, 2]: the first and the last patch of each patch's picture, bounds of attention;
        None where there is one picture.
        """

    def input(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
        fill: Callable[[Sequence[Part]], Tensor],
        **facts: Any,
    ) -> Node:
        """A value that follows from where the pictures of a run lie, with `facts` as `graph_input`
        has them.
        """

    def table(self, rows: Node, side: int, name: str, **how: Any) -> Node:
        """[P, C]: a table of positions, rows [side * side, C], scaled to each picture's grid; `how`
        are attributes of `resize2d`.
        """

    @property
    def patches(self) -> int:
        """All of them, P."""
        return self.shape[0] * self.shape[1]

    def positions(self) -> Node:
        """int64 [2, P]: the row and the column of each patch in its picture."""
        return self.of_patches("inp.positions", grid_positions, 2)

    def merged_segments(self, factor: int) -> Node | None:
        """`segments` of what is left when factor x factor patches have become one."""
        if self.segments is None:
            return None
        cells = factor**2
        shape, name = (self.patches // cells, 2), f"inp.segments.{factor}"
        return self.input(name, shape, torch.int32, lambda parts: _bounds(parts, shape[0], cells))

    def of_patches(
        self, name: str, of: Callable[[int, int], Tensor], count: int, flat: bool = False
    ) -> Node:
        """int64 [count, P], or, `flat`, [count * P]: what `of` says [count, rows * columns] of a
        picture's patches in reading order; 0 where there is no picture.
        """
        shape: Shape = (count * self.patches,) if flat else (count, self.patches)

        def fill(parts: Sequence[Part]) -> Tensor:
            values = torch.zeros(count, self.patches, dtype=torch.int64)
            for part in parts:
                values[:, part.first + part.behind] = of(part.rows, part.columns)
            return values.view(shape)

        return self.input(name, shape, torch.int64, fill)


class OneGrid(Grids):
    """One picture."""

    segments = None

    def __init__(self, rows: int, columns: int):
        self._shape = rows, columns

    @staticmethod
    def of(tiles: Node, cells: Cells) -> OneGrid:
        """Return the grid of the patches of tiles [B, C, Y, X]."""
        return OneGrid(tiles.shape[2] // cells.patch, tiles.shape[3] // cells.patch)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def input(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
        fill: Callable[[Sequence[Part]], Tensor],
        **facts: Any,
    ) -> Node:
        return graph_input(name, shape, dtype, lambda _: fill((self._part(),)), **facts)

    def _part(self) -> Part:
        return Part(*self._shape, 0, torch.arange(self.patches))

    def table(self, rows: Node, side: int, name: str, **how: Any) -> Node:
        return ops.resize2d(rows, grid=(side, side), size=self._shape, name=name, **how)


class PackedGrids(Grids):
    """Several, of a run whose batch has them as `parts`. `evaluate` computes a node that has no
    inputs of a run.
    """

    def __init__(self, tokens: int, cells: Cells, evaluate: Callable[[Node], Tensor]):
        self._shape = tokens * cells.merge, cells.merge
        self._cells, self._evaluate = cells, evaluate
        shape = self.patches, 2
        self._segments = self.input(
            "inp.segments", shape, torch.int32, lambda parts: _bounds(parts, shape[0])
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def segments(self) -> Node:
        return self._segments

    def input(
        self,
        name: str,
        shape: Shape,
        dtype: torch.dtype,
        fill: Callable[[Sequence[Part]], Tensor],
        **facts: Any,
    ) -> Node:
        return graph_input(name, shape, dtype, lambda pack: fill(pack.parts), **facts)

    def table(self, rows: Node, side: int, name: str, **how: Any) -> Node:
        merge = self._cells.merge

        def fill(parts: Sequence[Part]) -> Tensor:
            result = []
            for part in parts:
                grid = part.rows, part.columns
                scaled = self._evaluate(
                    ops.resize2d(rows, grid=(side, side), size=grid, name=name, **how)
                )
                cells = scaled.view(grid[0] // merge, merge, grid[1] // merge, merge, -1)
                result.append(cells.transpose(1, 2).flatten(0, 3))
            rest = self.patches - sum(map(len, result))
            return torch.cat((*result, result[0].new_zeros(rest, rows.shape[1])))

        return self.input(name, (self.patches, rows.shape[1]), rows.dtype, fill)


def _bounds(parts: Sequence[Part], length: int, cells: int = 1) -> Tensor:
    """int32 [length, 2]: the first and the last place of each place's picture, where `cells`
    patches that follow one another are one place.
    """
    bounds = nothing_seen(length)
    for part in parts:
        first, last = part.first // cells, (part.first + part.patches) // cells - 1
        bounds[first : last + 1] = torch.tensor((first, last), dtype=torch.int32)
    return bounds


def grid_positions(rows: int, columns: int) -> Tensor:
    """int64 [2, P]: the row and the column of each patch, in reading order."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).t().contiguous()


def nothing_seen(patches: int) -> Tensor:
    """int32 [P, 2]: bounds within which each row sees no key."""
    locations = torch.arange(patches, dtype=torch.int32)
    return torch.stack((locations, locations - 1), 1)


def token_by_token(rows: int, columns: int, merge: int) -> Tensor:
    """int64 [P]: where each patch, in reading order, lies in a picture that is a token wide."""
    row, column = grid_positions(rows, columns)
    token = row // merge * (columns // merge) + column // merge
    locations: Tensor = token * merge**2 + row % merge * merge + column % merge
    return locations
