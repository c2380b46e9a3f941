"""Ops that work on each element by itself."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.op import need, need_floats, op, same_as_first


def _add_shape(a: Type, b: Type) -> Type | None:
    fits = len(b.shape) <= len(a.shape) and all(n in (1, m) for n, m in zip(b.shape[::-1], a.shape[::-1], strict=False))
    need(fits, f"b {list(b.shape)} does not broadcast to a {list(a.shape)}")
    return same_as_first(a) if a.dtype == b.dtype else None


@op(shape=_add_shape, flops=lambda n: n.type.count, in_place=lambda a, b: a.add_(b))
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b          b broadcasts to a's shape"""
    return a + b


def _gelu_in_place(x: Tensor, *, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate=approximate)  # type: ignore[no-any-return]


@op(shape=same_as_first, flops=lambda n: 10 * n.type.count, in_place=_gelu_in_place)
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """x * Phi(x), with Phi the normal distribution ("none") or its tanh approximation ("tanh"); arXiv:1606.08415"""
    return F.gelu(x, approximate=approximate)


def _gated_shape(gate: Type, up: Type, *, approximate: str) -> Type | None:  # noqa: ARG001
    need(gate.shape == up.shape, f"gate {list(gate.shape)} and up {list(up.shape)} differ")
    need_floats(gate, up)
    return same_as_first(gate) if gate.dtype == up.dtype else None


@op(shape=_gated_shape, flops=lambda n: 11 * n.type.count,
    in_place=lambda gate, up, approximate: _gelu_in_place(gate, approximate=approximate).mul_(up))
def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """gelu(gate) * up, the gated unit of arXiv:2002.05202"""
    return F.gelu(gate, approximate=approximate).mul_(up)


@op(shape=same_as_first, flops=lambda n: 10 * n.type.count, in_place=lambda x, cap: x.div_(cap).tanh_().mul_(cap))
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return (x / cap).tanh_().mul_(cap)
