"""Ops that stand for several: what a plan's rewriting (`kernels/plan/fusion/`) makes of them for a
device on which each launch counts. Families never call these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.gather import kv_store
from mtmd.kernels.ops.norm import rms_norm
from mtmd.kernels.ops.op import need, need_floats, need_places, op
from mtmd.kernels.ops.rope import PAIRS, rope


def _add_norm_shape(
    x: Type,
    y: Type,
    w: Type,
    y_norm: Type | None = None,
    *,
    eps: float,  # noqa: ARG001
    y_eps: float | None = None,
) -> Type:
    need_floats(x, y, w, y_norm)
    need(x.shape == y.shape and x.dtype == y.dtype and len(x.shape) > 0, f"x {x}, y {y}")
    for weight in (w, y_norm):
        need(
            weight is None or weight.shape == x.shape[-1:],
            f"a weight {weight} does not match x {list(x.shape)}",
        )
    need((y_norm is None) == (y_eps is None), f"y_norm {y_norm} with y_eps {y_eps}")
    return Type.contiguous((2, *x.shape), x.dtype)


@op(shape=_add_norm_shape, flops=lambda n: 5 * n.type.count)
def add_norm(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    y_norm: Tensor | None = None,
    *,
    eps: float,
    y_eps: float | None = None,
) -> Tensor:
    """s = x + y, or x + rms_norm(y) with `y_norm`; then s and rms_norm(s), one behind the other

    x, y [..., D], w, y_norm [D] -> [2, ..., D]
    """
    added = y if y_norm is None or y_eps is None else rms_norm.reference(y, y_norm, eps=y_eps)
    total = x + added
    return torch.stack((total, rms_norm.reference(total, w, eps=eps)))


def _half_shape(x: Type, *, which: int) -> Type:
    need(len(x.shape) > 1 and 0 <= which < x.shape[0], f"half {which} of {list(x.shape)}")
    return Type.strided(x.shape[1:], x.dtype, x.strides[1:])


@op(view=True, shape=_half_shape)
def half(x: Tensor, *, which: int) -> Tensor:
    """x[which]          x [N, ...] -> [...]"""
    return x[which]


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
) -> Type:
    need_places(slots)
    need_floats(cache, k, v, table, k_norm)
    need(
        len(cache.shape) == 4
        and cache.shape[0] == 2
        and k.shape == v.shape
        and cache.shape[2:] == k.shape[1:]
        and slots.shape == k.shape[:1],
        f"k {list(k.shape)}, v {list(v.shape)} at slots {list(slots.shape)} into cache "
        f"{list(cache.shape)}",
    )
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


def _stored(node: Node) -> int:
    """Keys and values read and written, places and angles."""
    _, k, v, slots, table, _ = (*node.inputs, None)[:6]
    assert k is not None and v is not None and slots is not None and table is not None
    return 2 * (k.type.bytes + v.type.bytes) + slots.type.bytes + table.type.bytes


@op(
    shape=_rope_store_shape,
    flops=lambda n: 10 * (n.inputs[1].type.count if n.inputs[1] else 0),
    traffic=_stored,
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
) -> Tensor:
    """`kv_store` of keys that are normalised, with `eps`, by `k_norm` or ones, and turned, and of
    values that are normalised with `v_eps`

    cache [2, S, G, K]; k, v [T, G, K]; slots [T]; table [T, 2, R]
    """
    if eps is not None:
        k = rms_norm.reference(k, k_norm, eps=eps)
    if v_eps is not None:
        v = rms_norm.reference(v, None, eps=v_eps)
    turned = rope.reference(k, table, pairs=pairs, parts=parts)
    return kv_store.reference(cache, turned, v, slots)


def _gelu_shape(x: Type, w: Type, bias: Type) -> Type | None:
    need_floats(x, w, bias)
    need(
        len(w.shape) == 2
        and len(x.shape) >= 2
        and x.shape[-1] == w.shape[1]
        and bias.shape == w.shape[:1]
        and x.dtype == w.dtype == bias.dtype,
        f"x {x}, w {w}, bias {bias}",
    )
    return Type.contiguous((*x.shape[:-1], w.shape[0]), x.dtype) if x.is_contiguous else None


@op(
    shape=_gelu_shape,
    flops=lambda n: n.type.count * (2 * (n.inputs[1].shape[1] if n.inputs[1] else 0) + 10),
)
def matmul_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ w.T + bias), GELU by its tanh approximation: cuBLAS has it at the end of a product

    x [..., K], w [N, K], bias [N] -> [..., N]
    """
    if x.device.type not in ("cuda", "meta"):  # elsewhere torch's is not the approximation
        return F.gelu(F.linear(x, w, bias), approximate="tanh")
    rows = x.reshape(-1, x.shape[-1])
    return torch._addmm_activation(bias, rows, w.t(), use_gelu=True).view(*x.shape[:-1], w.shape[0])
