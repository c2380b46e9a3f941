"""Relative positions of a grid of patches, for rows and columns apart (arXiv:2112.01526, SAM's of
arXiv:2304.02643): a score gets what its query says of how many rows and columns the key is away,

    score(t, s) = scale q_t . k_s + q_t . h[row(t) - row(s)] + q_t . w[column(t) - column(s)]

Keys are few rows and columns, so this is a product of longer heads: a query brings its numbers for
each row and each column of the grid, a key a 1 where it lies. Attention to these needs no mask, and
no scores of all patches exist.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op

STEP = 16  # heads are as long as a multiple of it, which kernels load and multiply at once


def wide_head(head: int, grid: tuple[int, int]) -> int:
    """Return the size of a head with a number for each row and column of a grid."""
    return -(-(head + sum(grid)) // STEP) * STEP


def _check(x: Type, grid: tuple[int, int]) -> Type:
    need_floats(x)
    need(
        len(x.shape) == 4 and x.shape[1] == grid[0] * grid[1],
        f"heads {list(x.shape)} are not of a grid of {grid[0]} x {grid[1]}",
    )
    return Type.contiguous((*x.shape[:3], wide_head(x.shape[3], grid)), x.dtype)


def _queries_shape(
    q: Type,
    rows: Type,
    columns: Type,
    *,
    grid: tuple[int, int],
    scale: float,  # noqa: ARG001
) -> Type:
    for table in (rows, columns):
        need(
            len(table.shape) == 2 and table.shape[1] == q.shape[-1] and table.shape[0] % 2 == 1,
            f"a table {list(table.shape)} of distances for heads {list(q.shape)}",
        )
        need(table.dtype == q.dtype, f"q is {q}, a table {table}: of several types")
    return _check(q, grid)


def _queries_flops(node: Node) -> int:
    q = node.inputs[0]
    assert q is not None
    return int(2 * q.type.count * sum(node.attrs["grid"]))


def _by_distance(table: Tensor, size: int) -> Tensor:
    """[D, K] -> [size, size, K]: of each query's place, for each key's. A table of other distances
    is stretched over these.
    """
    distances = 2 * size - 1
    if len(table) != distances:
        stretched = F.interpolate(table.float().t()[None], distances, mode="linear")
        table = stretched[0].t().to(table.dtype)
    cells = torch.arange(size, device=table.device)
    rows = table.index_select(0, (cells[:, None] - cells + (size - 1)).flatten())
    return rows.view(size, size, -1)


@op(shape=_queries_shape, flops=_queries_flops)
def relative_queries(
    q: Tensor, rows: Tensor, columns: Tensor, *, grid: tuple[int, int], scale: float
) -> Tensor:
    """Queries that bring what is added to their scores, for `relative_keys`

    q [B, T, H, K], T = R * C of `grid`, rows [D, K], columns [E, K], by distance, D and E odd ->
    [B, T, H, K + R + C + zeros]; `scale` is that of the attention, which does not scale these.
    """
    cells = q.unflatten(1, grid)
    vertical = torch.einsum("brchk,rsk->brchs", cells, _by_distance(rows, grid[0]))
    horizontal = torch.einsum("brchk,csk->brchs", cells, _by_distance(columns, grid[1]))
    far = (part.flatten(1, 2).div_(scale) for part in (vertical, horizontal))
    return torch.cat((q, *far, _zeros(q, grid)), 3)


def _keys_shape(k: Type, *, grid: tuple[int, int]) -> Type:
    return _check(k, grid)


@op(shape=_keys_shape)
def relative_keys(k: Tensor, *, grid: tuple[int, int]) -> Tensor:
    """Keys with a 1 for their row and one for their column, for `relative_queries`

    k [B, T, H, K], T = R * C of `grid` -> [B, T, H, K + R + C + zeros]
    """
    rows, columns = (torch.eye(size, dtype=k.dtype, device=k.device) for size in grid)
    lines = (*k.shape[:1], *grid, k.shape[2])
    row = rows[:, None, None].expand(*lines, -1).flatten(1, 2)
    column = columns[:, None].expand(*lines, -1).flatten(1, 2)
    return torch.cat((k, row, column, _zeros(k, grid)), 3)


def _zeros(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Zeros that make its heads a multiple of STEP."""
    count = wide_head(x.shape[3], grid) - x.shape[3] - sum(grid)
    return x.new_zeros(()).expand(*x.shape[:3], count)
