"""Ops that pick rows, or put them somewhere."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.dtype import DTYPES
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_cache, need_floats, need_positions, op, values_in
from mtmd.kernels.quantization.blocks import dequantize
from mtmd.kernels.quantization.kv_rows import (
    PAIRS,
    ROW_TYPES,
    cached_parts,
    dequantize_cache,
    dequantize_rows,
    part_of,
    part_types,
    quantize_rows,
)

FLOATS = ("fp32", "bf16", "fp16")


def _rows_traffic(node: Node) -> int:
    """The rows that are picked, read and written, and their numbers; not the table they are picked
    from.
    """
    return 2 * node.type.bytes + min(
        i.type.bytes for i in node.operands if not i.dtype.is_floating_point
    )


def _written_traffic(node: Node) -> int:
    """Return what is written, read and written, and the places."""
    *rows, locations = list(node.operands)[1:]
    return sum(2 * r.type.bytes for r in rows) + locations.type.bytes


def _embed_traffic(node: Node) -> int:
    """The rows that are picked, as they are kept, the rows that are written, and their numbers."""
    tokens, table = node.operands
    return (
        node.shape[0] * table.shape[1] * table.dtype.itemsize + node.type.bytes + tokens.type.bytes
    )


def _embed_shape(
    tokens: Type,
    table: Type,
    *,
    scale: float = 1.0,  # noqa: ARG001
    quant: str | None = None,
    dtype: str | None = None,
) -> Type:
    need_positions(tokens)
    need(len(table.shape) == 2, f"table {list(table.shape)}")
    if quant is None:
        need_floats(table)
        need(dtype is None, f"dtype {dtype} without quant; rows have the type of their table")
        return Type.contiguous((tokens.shape[0], table.shape[1]), table.dtype)
    need(dtype in FLOATS, f"dtype {dtype} with quant {quant}; expected one of {', '.join(FLOATS)}")
    return Type.contiguous((tokens.shape[0], values_in(table, quant)), DTYPES[str(dtype)])


@op(shape=_embed_shape, traffic=_embed_traffic)
def embed(
    tokens: Tensor,
    table: Tensor,
    *,
    scale: float = 1.0,
    quant: str | None = None,
    dtype: str | None = None,
) -> Tensor:
    """table[tokens] * scale

    tokens [T], table [V, D] -> [T, D]; scale is rounded to the result's type first, as Gemma
    does

    `quant` names the GGUF block type of the table, which then is u8 [V, bytes of D values]; the
    result is of `dtype`.
    """
    rows = F.embedding(tokens, table)
    if quant is not None:
        rows = dequantize(rows, quant).to(DTYPES[str(dtype)])
    return rows if scale == 1.0 else rows * rounded_to(scale, rows.dtype)


def rounded_to(number: float, dtype: torch.dtype) -> float:
    """Round as a tensor of this type would. No tensor is made, as reading one waits for the
    device.
    """
    if dtype == torch.float16:
        return float(struct.unpack("e", struct.pack("e", number))[0])
    if dtype == torch.float64:
        return number
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    if dtype == torch.bfloat16:  # to the nearest, of two alike to the even one
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _location(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    return x.index_copy_(0, at, rows.to(x.dtype))


def _location_shape(x: Type, rows: Type, at: Type) -> Type | None:
    need_positions(at)
    need(
        len(x.shape) == 2 and rows.shape == (at.shape[0], x.shape[1]),
        f"rows {list(rows.shape)} for at {list(at.shape)} and x {list(x.shape)}",
    )
    return x if x.is_contiguous else None


@op(shape=_location_shape, traffic=_written_traffic, in_place=_location)
def place_rows(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """x with x[at[i]] = rows[i]          x [T, D], rows [M, D], at [M]"""
    return _location(x.clone(), rows, at)


def _take_shape(x: Type, at: Type) -> Type:
    need_positions(at)
    need(len(x.shape) >= 2, f"x {list(x.shape)}")
    return Type.contiguous((*x.shape[:-2], at.shape[0], x.shape[-1]), x.dtype)


@op(shape=_take_shape, traffic=_rows_traffic)
def take_rows(x: Tensor, at: Tensor) -> Tensor:
    """x[..., at, :]          x [..., T, D], at [M] -> [..., M, D]"""
    return x.index_select(-2, at)


def _add_rows(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    return x.index_add_(0, at, rows.to(x.dtype))


@op(shape=_location_shape, traffic=_written_traffic, in_place=_add_rows)
def add_rows(x: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """x with x[at[i]] += rows[i]          x [T, D], rows [M, D], at [M], all different"""
    return _add_rows(x.clone(), rows, at)


def _concat_shape(a: Type, b: Type, *, axis: int) -> Type:
    need_floats(a, b)
    need(
        a.dtype == b.dtype and len(a.shape) == len(b.shape) and 0 <= axis < len(a.shape),
        f"a {a}, b {b} along {axis}",
    )
    need(
        all(m == n for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if i != axis),
        f"a {list(a.shape)} and b {list(b.shape)} differ beside axis {axis}",
    )
    return Type.contiguous(
        (*a.shape[:axis], a.shape[axis] + b.shape[axis], *a.shape[axis + 1 :]), a.dtype
    )


@op(shape=_concat_shape)
def concat(a: Tensor, b: Tensor, *, axis: int) -> Tensor:
    """a, then b, along an axis"""
    return torch.cat((a, b), axis)


def _prepend_shape(x: Type, row: Type) -> Type:
    need_floats(x, row)
    need(
        len(x.shape) == 3 and row.shape == x.shape[2:] and row.dtype == x.dtype,
        f"row {row} before x {x}",
    )
    return Type.contiguous((x.shape[0], x.shape[1] + 1, x.shape[2]), x.dtype)


@op(shape=_prepend_shape)
def prepend(x: Tensor, row: Tensor) -> Tensor:
    """The same row before each batch's rows, as a class token is

    x [B, P, C], row [C] -> [B, P + 1, C]
    """
    return torch.cat((row.expand(x.shape[0], 1, -1), x), 1)


def _pages_shape(
    cache: Type,
    pages: Type,
    *,
    which: int,
    size: int,
    dtype: str | None = None,
    quant: str | None = None,
    head: int | None = None,
) -> Type:
    need_positions(pages)
    need(
        len(cache.shape) == 4
        and 0 <= which < cached_parts(cache.shape[0], quant)
        and cache.shape[1] % size == 0,
        f"half {which} of cache {list(cache.shape)} in pages of {size}",
    )
    need(dtype is None or dtype in FLOATS, f"dtype {dtype}; expected one of {', '.join(FLOATS)}")
    need(
        (quant is None and head is None) or (dtype is not None and head is not None),
        f"quant {quant}, head {head}, dtype {dtype}: expected all three, or no quant and no head",
    )
    row = cache.shape[3] if head is None else head
    need_cache(cache, cache.shape[2], row, quant)
    kind = cache.dtype if dtype is None else DTYPES[dtype]
    return Type.contiguous((1, pages.shape[0] * size, cache.shape[2], row), kind)


def _pages_traffic(node: Node) -> int:
    """The pages of the table as they are stored, read, and the result, written."""
    cache, pages = node.operands
    rows, quant = pages.shape[0] * int(node.attrs["size"]), node.attrs.get("quant")
    row = cache.type.bytes // (cache.shape[0] * cache.shape[1])
    if quant in PAIRS:
        kind = part_types(quant)[node.attrs["which"]]
        row = cache.shape[2] * ROW_TYPES[kind].row_bytes(int(node.attrs["head"]))
    return node.type.bytes + rows * row


@op(shape=_pages_shape, traffic=_pages_traffic)
def gather_pages(
    cache: Tensor,
    pages: Tensor,
    *,
    which: int,
    size: int,
    dtype: str | None = None,
    quant: str | None = None,
    head: int | None = None,
) -> Tensor:
    """The keys (0) or values (1) of a cache's pages, one after another, in `dtype` or the cache's

    cache [2, S, G, K], or [1, S, G, K] of keys alone, pages [P] -> [1, P * size, G, K]

    `quant` names the type of rows of a cache u8 [2, S, G, bytes of a head], or those of keys and of
    values of a cache [1, S, G, bytes of both] (`kv_rows`); then K = `head`.
    """
    saved: Tensor = cache[which] if quant is None else part_of(cache, which, quant, head or 0)
    rows: Tensor = saved.unflatten(0, (-1, size)).index_select(0, pages).flatten(0, 1).unsqueeze(0)
    if quant is not None:
        rows = dequantize_rows(rows, part_types(quant)[which], head or 0)
    return rows if dtype is None else rows.to(DTYPES[dtype])


def _store_shape(cache: Type, k: Type, v: Type, slots: Type, *, quant: str | None = None) -> Type:
    need_stored(cache, k, v, slots, quant)
    return cache


def need_stored(cache: Type, k: Type, v: Type, slots: Type, quant: str | None) -> None:
    """Refuse keys and values [T, G, K] that do not belong into a cache at these slots."""
    need_positions(slots)
    need(
        len(k.shape) == 3 and k.shape == v.shape and slots.shape == k.shape[:1],
        f"k {list(k.shape)}, v {list(v.shape)} at slots {list(slots.shape)}",
    )
    need_cache(cache, k.shape[1], k.shape[2], quant)


def as_numbers(
    op: str, result: Tensor, inputs: Sequence[Tensor | None], options: Mapping[str, Any]
) -> Tensor:
    """Return the numbers by which a result is compared: of a quantized cache that was written,
    those that are read from it.
    """
    quant = options.get("quant")
    if op not in ("kv_store", "rope_store") or quant is None:
        return result
    k = inputs[1]
    assert k is not None
    return dequantize_cache(result, quant, k.shape[-1])


def stored_bytes(node: Node) -> int:
    """Return what is read and written: keys and values, places, rows of the cache."""
    cache, *others = node.operands
    row = cache.type.bytes // cache.shape[1]
    return sum(i.type.bytes for i in others) + others[0].shape[0] * row


@op(shape=_store_shape, traffic=stored_bytes, writes_first=True)
def kv_store(
    cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, quant: str | None = None
) -> Tensor:
    """The cache with k and v written at its slots, in place

    cache [2, S, G, K]; k, v [T, G, K]; slots [T]

    A cache [1, S, G, K] has no place for v: keys are its values, too (arXiv:2405.04434). `quant`
    names the type of rows of a cache u8 [2, S, G, bytes of a head], or those of keys and of values
    of a cache [1, S, G, bytes of both] (`kv_rows`).
    """
    if quant is None:
        for half, rows in zip(cache, (k, v), strict=False):
            half.index_copy_(0, slots, rows.to(cache.dtype))
        return cache
    both = (k, v)[: cached_parts(cache.shape[0], quant)]
    for which, (rows, kind) in enumerate(zip(both, part_types(quant), strict=False)):
        part_of(cache, which, quant, k.shape[-1]).index_copy_(0, slots, quantize_rows(rows, kind))
    return cache
