"""Rotary position embeddings: a table of angles per run, and turning heads by it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.gather import kv_store, need_stored, stored_bytes
from mtmd.kernels.ops.norm import rms_norm
from mtmd.kernels.ops.op import need, need_floats, op

PAIRS = ("half", "adjacent")


def _table_shape(positions: Type, divisors: Type | None = None, *, rotary: Rotary) -> Type:
    count = len(rotary.frequencies)
    need(
        len(positions.shape) == 2 and not positions.dtype.is_floating_point,
        f"positions {positions}, expected integers [A, T]",
    )
    need(
        max(rotary.axes, default=0) < positions.shape[0],
        f"axes {sorted(set(rotary.axes))} in positions {list(positions.shape)}",
    )
    need(len(rotary.axes) in (0, count), f"{len(rotary.axes)} axes for {count} frequencies")
    need(
        divisors is None or (divisors.shape == (count,) and divisors.dtype == torch.float32),
        f"divisors {divisors}, {count} frequencies",
    )
    return Type.contiguous((positions.shape[1], 2, count), torch.float32)


@lru_cache(maxsize=64)
def _constants(rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Frequencies, and the axis of each, on a device: made in each run they would be two copies
    from the host, for which it waits.
    """
    with torch.inference_mode(False):
        axes = list(rotary.axes) or [0] * len(rotary.frequencies)
        return (
            torch.tensor(rotary.frequencies, dtype=torch.float32, device=device),
            torch.tensor(axes, dtype=torch.int64, device=device),
        )


@op(shape=_table_shape, flops=lambda n: 20 * n.type.count)
def rope_table(positions: Tensor, divisors: Tensor | None = None, *, rotary: Rotary) -> Tensor:
    """Cosines and sines of every token's angles, fp32

    positions [A, T] -> [T, 2, R], R = number of frequencies

    `divisors` fp32 [R] divide the frequencies, where a checkpoint has them as a tensor.
    """
    frequencies, axes = _constants(rotary, positions.device)
    if divisors is not None:
        frequencies = frequencies / divisors
    # Few launches: they are converted where they are multiplied, and written where they belong
    one_axis = not any(rotary.axes)
    angles = (
        positions[0, :, None] if one_axis else positions.index_select(0, axes).t()
    ) * frequencies
    shape = (angles.shape[0], 2, angles.shape[1])
    table = torch.empty(shape, dtype=torch.float32, device=angles.device)
    torch.cos(angles, out=table[:, 0])
    torch.sin(angles, out=table[:, 1])
    return table if rotary.scale == 1.0 else table.mul_(rotary.scale)


def _shape(x: Type, table: Type, *, pairs: str = "half", parts: int = 1) -> Type:
    need_floats(x, table)
    need(pairs in PAIRS, f"pairs {pairs!r}, expected one of {', '.join(PAIRS)}")
    fits = len(x.shape) >= 3 and len(table.shape) == 3 and table.shape[:2] == (x.shape[-3], 2)
    need(
        fits and 2 * table.shape[2] <= x.shape[-1], f"x {list(x.shape)}, table {list(table.shape)}"
    )
    need(
        parts == 1 or (2 * table.shape[2] == x.shape[-1] and table.shape[2] % parts == 0),
        f"{parts} parts of x {list(x.shape)}",
    )
    return Type.contiguous(x.shape, x.dtype)


@op(shape=_shape, flops=lambda n: 6 * n.type.count)
def rope(x: Tensor, table: Tensor, *, pairs: str = "half", parts: int = 1) -> Tensor:
    """Turn pairs of the first 2R dimensions of each head

    x [..., T, H, K], table [T, 2, R] from `rope_table`; arXiv:2104.09864

    `pairs`: "half" pairs x_i with x_{i+R}, "adjacent" x_{2i} with x_{2i+1}. `parts`: the head is
    cut into that many equal parts, each with pairs of its own and its share of the table. Products
    are fp32.
    """
    count = table.shape[2]
    turning = x[..., : 2 * count].float().unflatten(-1, (parts, 2 * count // parts))
    cos, sin = (table[:, i].unflatten(-1, (parts, count // parts))[:, None] for i in (0, 1))
    a, b = (turning[..., 0::2], turning[..., 1::2]) if pairs == "adjacent" else turning.chunk(2, -1)
    one, two = a * cos - b * sin, b * cos + a * sin
    turned = (
        torch.stack((one, two), -1).flatten(-2)
        if pairs == "adjacent"
        else torch.cat((one, two), -1)
    )
    turned = turned.flatten(-2).to(x.dtype)
    return (
        turned if 2 * count == x.shape[-1] else torch.cat((turned, x[..., 2 * count :]), -1)
    ).contiguous()


def _columns_shape(
    x: Type, table: Type, *, start: int, stop: int, head: int, pairs: str = "half", parts: int = 1
) -> Type | None:
    fits = 0 <= start < stop <= x.shape[-1] and (stop - start) % head == 0
    need(len(x.shape) >= 2 and fits, f"columns {start} to {stop} of {x}, heads of {head}")
    heads = Type.contiguous((*x.shape[:-1], (stop - start) // head, head), x.dtype)
    _shape(heads, table, pairs=pairs, parts=parts)
    return x if x.is_contiguous else None


def _turn_columns(x: Tensor, table: Tensor, start: int, stop: int, head: int, **how: Any) -> Tensor:
    part = x[..., start:stop]
    part.copy_(rope.reference(part.unflatten(-1, (-1, head)), table, **how).flatten(-2))
    return x


@op(
    shape=_columns_shape,
    flops=lambda n: 6 * n.type.count * (n.attrs["stop"] - n.attrs["start"]) // n.shape[-1],
    traffic=lambda n: 2 * n.type.bytes * (n.attrs["stop"] - n.attrs["start"]) // n.shape[-1],
    in_place=_turn_columns,
)
def rope_columns(
    x: Tensor,
    table: Tensor,
    *,
    start: int,
    stop: int,
    head: int,
    pairs: str = "half",
    parts: int = 1,
) -> Tensor:
    """x, of which columns `start` to `stop` are heads of `head` values each that `rope` turns: a
    joint product's queries and keys

    x [..., T, D], table [T, 2, R] -> [..., T, D]
    """
    return _turn_columns(x.clone(), table, start, stop, head, pairs=pairs, parts=parts)


def _rope_store_shape(
    cache: Type,
    k: Type,
    v: Type,
    slots: Type,
    table: Type,
    k_norm: Type | None = None,
    *,
    eps: float | None = None,
    v_eps: float | None = None,  # noqa: ARG001
    pairs: str = "half",
    parts: int = 1,
    quant: str | None = None,
) -> Type:
    need_floats(k, v, table, k_norm)
    need_stored(cache, k, v, slots, quant)
    need(pairs in PAIRS, f"pairs {pairs!r}, expected one of {', '.join(PAIRS)}")
    need(
        len(table.shape) == 3
        and table.shape[:2] == (k.shape[0], 2)
        and 2 * table.shape[2] <= k.shape[-1]
        and table.shape[2] % parts == 0
        and (parts == 1 or 2 * table.shape[2] == k.shape[-1]),
        f"k {list(k.shape)} in {parts} parts, table {list(table.shape)}",
    )
    need(
        k_norm is None or (eps is not None and k_norm.shape == k.shape[-1:]),
        f"k {list(k.shape)}, norm {k_norm} with eps {eps}",
    )
    return cache


@op(
    shape=_rope_store_shape,
    flops=lambda n: 10 * (n.inputs[1].type.count if n.inputs[1] else 0),
    traffic=stored_bytes,
    writes_first=True,
)
def rope_store(
    cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    table: Tensor,
    k_norm: Tensor | None = None,
    *,
    eps: float | None = None,
    v_eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
    quant: str | None = None,
) -> Tensor:
    """`kv_store` of keys that are normalised, with `eps`, by `k_norm` or ones, and turned, and of
    values that are normalised with `v_eps`

    cache [2, S, G, K]; k, v [T, G, K]; slots [T]; table [T, 2, R]; `quant` as there
    """
    if eps is not None:
        k = rms_norm.reference(k, k_norm, eps=eps)
    if v_eps is not None:
        v = rms_norm.reference(v, None, eps=v_eps)
    turned = rope.reference(k, table, pairs=pairs, parts=parts)
    return kv_store.reference(cache, turned, v, slots, quant=quant)
