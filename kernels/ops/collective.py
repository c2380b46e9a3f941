"""Ops between the ranks that share a model out among themselves, and what a rank computes of a
whole value. A `group` knows its ranks and moves tensors between them; every rank's plan has the
same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.gather import embed
from mtmd.kernels.ops.op import need, need_floats, op, same_as_first

Ranges = tuple[tuple[int, int], ...]


class Group(Hashable, Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks; it may overwrite x."""

    def gather(self, x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        """Every rank's x one after another; `sizes` are theirs along the axis."""


@op(
    shape=same_as_first,
    flops=lambda n: n.type.count,
    workspace=lambda n: n.type.bytes,
    waits=True,
    in_place=lambda x, group: group.sum(x),
)
def all_reduce(x: Tensor, *, group: Group) -> Tensor:
    """The sum of the ranks' x"""
    return group.sum(x.clone(memory_format=torch.contiguous_format))


def _gather_shape(x: Type, *, group: Group, axis: int, sizes: tuple[int, ...]) -> Type:
    need_floats(x)
    need(
        len(sizes) == group.size and x.shape[axis] == sizes[group.rank],
        f"x {list(x.shape)} along {axis} in parts of {list(sizes)}",
    )
    return Type.contiguous((*x.shape[:axis], sum(sizes), *x.shape[axis + 1 :]), x.dtype)


@op(shape=_gather_shape, workspace=lambda n: 2 * n.type.bytes, waits=True)
def all_gather(x: Tensor, *, group: Group, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """The ranks' x, one after another along an axis"""
    return group.gather(x.contiguous(), axis, sizes)


def _part_shape(x: Type, *, axis: int, ranges: Ranges) -> Type:
    need(
        0 <= axis < len(x.shape)
        and all(0 <= start < stop <= x.shape[axis] for start, stop in ranges),
        f"{list(ranges)} of {list(x.shape)} along {axis}",
    )
    size = sum(stop - start for start, stop in ranges)
    return Type.contiguous((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


@op(shape=_part_shape, traffic=lambda n: 2 * n.type.bytes, workspace=lambda n: n.type.bytes)
def part(x: Tensor, *, axis: int, ranges: Ranges) -> Tensor:
    """Some ranges of an axis, one after another: what a rank computes with of a value it has
    whole
    """
    return torch.cat([x.narrow(axis, start, stop - start) for start, stop in ranges], axis)


@op(view=True, shape=lambda x, _: x)
def without(x: Tensor, added: Tensor) -> Tensor:  # noqa: ARG001
    """x: what the other ranks have of a sum where the first adds a whole value. They compute that
    value all the same, so that every rank's plan has the same collectives.
    """
    return x


def _embed_part_shape(
    tokens: Type,
    table: Type,
    *,
    first: int,
    scale: float = 1.0,
    quant: str | None = None,
    dtype: str | None = None,
) -> Type | None:
    need(first >= 0, f"first row {first}")
    assert embed.shape is not None
    return embed.shape(tokens, table, scale=scale, quant=quant, dtype=dtype)


def _embed_part_traffic(node: Node) -> int:
    tokens, table = node.operands
    return (
        node.shape[0] * table.shape[1] * table.dtype.itemsize + node.type.bytes + tokens.type.bytes
    )


@op(
    shape=_embed_part_shape,
    traffic=_embed_part_traffic,
    workspace=lambda n: n.shape[0] * 18 + 10 * n.type.count,
)
def embed_part(
    tokens: Tensor,
    table: Tensor,
    *,
    first: int,
    scale: float = 1.0,
    quant: str | None = None,
    dtype: str | None = None,
) -> Tensor:
    """Embed as `embed` does, from a table whose first row is that of token `first`; zeros for
    tokens that are not in it

    tokens [T], table [V / ranks, D] -> [T, D]
    """
    at = tokens - first
    inside = (at >= 0) & (at < table.shape[0])
    rows = embed.reference(
        at.clamp(0, table.shape[0] - 1), table, scale=scale, quant=quant, dtype=dtype
    )
    return rows.masked_fill(~inside[:, None], 0)
