"""Ops that pick rows, or put them somewhere."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, need_places, op


def _rows_traffic(node: Node) -> int:
    """The rows that are picked, read and written, and their numbers; not the table they are picked from."""
    return 2 * node.type.bytes + min(i.type.bytes for i in node.operands if not i.dtype.is_floating_point)


def _written_traffic(node: Node) -> int:
    """What is written, read and written, and the places."""
    *rows, places = list(node.operands)[1:]
    return sum(2 * r.type.bytes for r in rows) + places.type.bytes


def _embed_shape(tokens: Type, table: Type, *, scale: float = 1.0) -> Type:  # noqa: ARG001
    need_places(tokens)
    need_floats(table)
    need(len(table.shape) == 2, f"table {list(table.shape)}")
    return Type.contiguous((tokens.shape[0], table.shape[1]), table.dtype)


@op(shape=_embed_shape, traffic=_rows_traffic)
def embed(tokens: Tensor, table: Tensor, *, scale: float = 1.0) -> Tensor:
    """table[tokens] * scale          tokens [T], table [V, D] -> [T, D]; scale is rounded to table's type first, as Gemma does"""
    rows = F.embedding(tokens, table)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype).item()


def _place(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    return x.index_copy_(0, at, rows.to(x.dtype))


def _place_shape(x: Type, rows: Type, at: Type) -> Type | None:
    need_places(at)
    need(len(x.shape) == 2 and rows.shape == (at.shape[0], x.shape[1]),
         f"rows {list(rows.shape)} for at {list(at.shape)} and x {list(x.shape)}")
    return x if x.is_contiguous else None


@op(shape=_place_shape, traffic=_written_traffic, in_place=_place)
def place_rows(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """x with x[at[i]] = rows[i]          x [T, D], rows [M, D], at [M]"""
    return _place(x.clone(), rows, at)


def _take_shape(x: Type, at: Type) -> Type:
    need_places(at)
    need(len(x.shape) == 2, f"x {list(x.shape)}")
    return Type.contiguous((at.shape[0], x.shape[1]), x.dtype)


@op(shape=_take_shape, traffic=_rows_traffic)
def take_rows(x: Tensor, at: Tensor) -> Tensor:
    """x[at]          x [T, D], at [M] -> [M, D]"""
    return x.index_select(0, at)


def _store_shape(cache: Type, k: Type, v: Type, slots: Type) -> Type:
    need_places(slots)
    need(len(cache.shape) == 4 and cache.shape[0] == 2 and k.shape == v.shape and cache.shape[2:] == k.shape[1:]
         and slots.shape == k.shape[:1],
         f"k {list(k.shape)}, v {list(v.shape)} at slots {list(slots.shape)} into cache {list(cache.shape)}")
    return cache


@op(shape=_store_shape, traffic=_written_traffic, writes_first=True)
def kv_store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """The cache with k and v written at its slots, in place          cache [2, S, G, K]; k, v [T, G, K]; slots [T]"""
    cache[0].index_copy_(0, slots, k.to(cache.dtype))
    cache[1].index_copy_(0, slots, v.to(cache.dtype))
    return cache
