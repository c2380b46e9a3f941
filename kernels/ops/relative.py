"""Relative positions of a grid of patches, for rows and columns apart (arXiv:2112.01526, SAM's of
arXiv:2304.02643): a score gets what its query says of how many rows and columns the key is away,

    score(t, s) = scale q_t . k_s + q_t . h[row(t) - row(s)] + q_t . w[column(t) - column(s)]

Keys are few rows and columns, so this is a product of longer heads: a query brings its numbers for
each row and each column of the grid, a key a 1 where it lies. Attention to these needs no mask, and
no scores of all patches exist.

A sequence is a grid whose rows add nothing, in lines as long as what a query sees: all of it, or a
window that slides (arXiv:1803.02155, arXiv:2005.08100). Within a window of W keys each has another
place in lines of W, so its place tells how far away it is: w[c] and w[c - W] are of one distance.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op

STEP = 16  # heads are as long as a multiple of it, which kernels load and multiply at once


def wide_head(head: int, grid: tuple[int, int], rows: bool = True) -> int:
    """Return the size of a head with a number for each column of a grid, and for each of its
    `rows`.
    """
    return -(-(head + grid[1] + grid[0] * rows) // STEP) * STEP


def _check(x: Type, grid: tuple[int, int], rows: bool) -> Type:
    need_floats(x)
    cells = grid[0] * grid[1]
    shortest = cells if rows else cells - grid[1] + 1
    need(
        len(x.shape) == 4 and min(grid) > 0 and shortest <= x.shape[1] <= cells,
        f"heads {list(x.shape)} are not of a grid of {grid[0]} x {grid[1]}",
    )
    return Type.contiguous((*x.shape[:3], wide_head(x.shape[3], grid, rows)), x.dtype)


def _queries_shape(
    q: Type,
    rows: Type | None,
    columns: Type,
    *,
    grid: tuple[int, int],
    scale: float,  # noqa: ARG001
) -> Type:
    for table, size in ((rows, grid[0]), (columns, grid[1])):
        if table is None:
            continue
        shared = len(table.shape) == 2 and table.shape[1] == q.shape[-1] and table.shape[0] % 2
        need(
            bool(shared) or table.shape == (2 * size - 1, *q.shape[2:]),
            f"a table {list(table.shape)} of distances for heads {list(q.shape)}",
        )
        need(table.dtype == q.dtype, f"q is {q}, a table {table}: of several types")
    return _check(q, grid, rows is not None)


def _queries_flops(node: Node) -> int:
    q, rows, (lines, columns) = *node.inputs[:2], node.attrs["grid"]
    assert q is not None
    return int(2 * q.type.count * (columns + (0 if rows is None else lines)))


def _by_distance(table: Tensor, size: int) -> Tensor:
    """[D, ...] -> [size, size, ...]: of each query's place, for each key's. A table [D, K] of other
    distances is stretched over these.
    """
    distances = 2 * size - 1
    if len(table) != distances:
        stretched = F.interpolate(table.float().t()[None], distances, mode="linear")
        table = stretched[0].t().to(table.dtype)
    cells = torch.arange(size, device=table.device)
    rows = table.index_select(0, (cells.unsqueeze(1) - cells + (size - 1)).flatten())
    return rows.view(size, size, *table.shape[1:])


@op(shape=_queries_shape, flops=_queries_flops)
def relative_queries(
    q: Tensor, rows: Tensor | None, columns: Tensor, *, grid: tuple[int, int], scale: float
) -> Tensor:
    """Queries that bring what is added to their scores, for `relative_keys`

    q [B, T, H, K], T = R * C of `grid`, rows [D, K], columns [E, K], by distance, D and E odd ->
    [B, T, H, K + R + C + zeros]; `scale` is that of the attention, which does not scale these.
    Tables of each head are [2 R - 1, H, K], [2 C - 1, H, K]. Without `rows` [B, T, H, K + C +
    zeros], and the last row of the grid may end early.
    """
    cells = F.pad(q, (0, 0, 0, 0, 0, grid[0] * grid[1] - q.shape[1])).unflatten(1, grid)
    products = []
    for table, size, axis in ((rows, grid[0], "r"), (columns, grid[1], "c")):
        if table is not None:
            far, head = _by_distance(table, size), "h" * (table.ndim - 2)
            product = torch.einsum(f"brchk,{axis}s{head}k->brchs", cells, far)
            products.append(product.flatten(1, 2).narrow(1, 0, q.shape[1]).div_(scale))
    return torch.cat((q, *products, _zeros(q, grid, rows is not None)), 3)


def _keys_shape(k: Type, *, grid: tuple[int, int], rows: bool = True) -> Type:
    return _check(k, grid, rows)


@op(shape=_keys_shape)
def relative_keys(k: Tensor, *, grid: tuple[int, int], rows: bool = True) -> Tensor:
    """Keys with a 1 for their row, but for queries without `rows`, and one for their column, for
    `relative_queries`

    k [B, T, H, K], T = R * C of `grid` -> [B, T, H, K + R + C + zeros], or [B, T, H, K + C + zeros]
    """
    ones = []
    for axis, size in enumerate(grid):
        if axis or rows:
            of_each = torch.eye(size, dtype=k.dtype, device=k.device).unsqueeze(1 - axis)
            cells = of_each.expand(*grid, size).flatten(0, 1).narrow(0, 0, k.shape[1])
            ones.append(cells.unsqueeze(1).expand(*k.shape[:3], size))
    return torch.cat((k, *ones, _zeros(k, grid, rows)), 3)


def _zeros(x: Tensor, grid: tuple[int, int], rows: bool) -> Tensor:
    """Zeros that make its heads a multiple of STEP."""
    count = wide_head(x.shape[3], grid, rows) - x.shape[3] - grid[1] - grid[0] * rows
    return x.new_zeros(()).expand(*x.shape[:3], count)
