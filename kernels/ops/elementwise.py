"""Ops that work on each element by itself."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.ops.op import need, op


@op(flops=lambda n: n.type.count, in_place=lambda a, b: a.add_(b))
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b          b broadcasts to a's shape"""
    need(torch.broadcast_shapes(a.shape, b.shape) == a.shape, f"b {list(b.shape)} does not broadcast to a {list(a.shape)}")
    return a + b


def _gelu_in_place(x: Tensor, *, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_(x, approximate=approximate)  # type: ignore[no-any-return]


@op(flops=lambda n: 10 * n.type.count, in_place=_gelu_in_place)
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """x * Phi(x), with Phi the normal distribution ("none") or its tanh approximation ("tanh"); arXiv:1606.08415"""
    return F.gelu(x, approximate=approximate)


@op(flops=lambda n: 11 * n.type.count,
    in_place=lambda gate, up, approximate: _gelu_in_place(gate, approximate=approximate).mul_(up))
def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """gelu(gate) * up, the gated unit of arXiv:2002.05202"""
    need(gate.shape == up.shape, f"gate {list(gate.shape)} and up {list(up.shape)} differ")
    return F.gelu(gate, approximate=approximate).mul_(up)


@op(flops=lambda n: 10 * n.type.count, in_place=lambda x, cap: x.div_(cap).tanh_().mul_(cap))
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return (x / cap).tanh_().mul_(cap)
