"""Ops that work on each element by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.op import need, need_floats, op, same_as_first

GELUS = ("none", "tanh", "quick")


def _broadcast_shape(a: Type, b: Type) -> Type | None:
    fits = len(b.shape) <= len(a.shape) and all(
        n in (1, m) for n, m in zip(b.shape[::-1], a.shape[::-1], strict=False)
    )
    need(fits, f"b {list(b.shape)} does not broadcast to a {list(a.shape)}")
    return same_as_first(a, b) if a.dtype == b.dtype else None


@op(shape=_broadcast_shape, flops=lambda n: n.type.count, in_place=lambda a, b: a.add_(b))
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b          b broadcasts to a's shape"""
    return a + b


@op(shape=_broadcast_shape, flops=lambda n: n.type.count, in_place=lambda a, b: a.mul_(b))
def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b          b broadcasts to a's shape"""
    return a * b


@op(
    shape=same_as_first,
    flops=lambda n: 2 * n.type.count,
    in_place=lambda x, factor, offset=0.0: (
        x.mul_(factor).add_(offset) if offset else x.mul_(factor)
    ),
)
def scale(x: Tensor, *, factor: float, offset: float = 0.0) -> Tensor:
    """x * factor + offset"""
    return x.mul(factor).add_(offset) if offset else x.mul(factor)


def _clamp_shape(x: Type, low: Type, high: Type) -> Type | None:
    need(
        low.shape == high.shape == (1,) and low.dtype == high.dtype == x.dtype,
        f"x is {x}, low {low}, high {high}; expected limits [1]",
    )
    return same_as_first(x)


@op(
    shape=_clamp_shape,
    flops=lambda n: 2 * n.type.count,
    in_place=lambda x, low, high: x.clamp_(low, high),
)
def clamp(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x, no less than low and no more than high          low, high [1] in x's type"""
    return x.clamp(low, high)


def _cast_shape(x: Type, *, dtype: torch.dtype) -> Type | None:
    need_floats(x)
    return Type.contiguous(x.shape, dtype) if x.is_contiguous and x.dtype != dtype else None


@op(shape=_cast_shape)
def cast(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x in another type"""
    return x.to(dtype, copy=True)


def _gelu_in_place(x: Tensor, *, approximate: str) -> Tensor:
    if approximate == "quick":
        return x.mul_(torch.sigmoid(1.702 * x))
    return torch.ops.aten.gelu_(x, approximate=approximate)  # type: ignore[no-any-return]


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return (
        torch.sigmoid(1.702 * x).mul_(x)
        if approximate == "quick"
        else F.gelu(x, approximate=approximate)
    )


def _gelu_shape(x: Type, *, approximate: str) -> Type | None:
    need(approximate in GELUS, f"approximate {approximate!r}, expected one of {', '.join(GELUS)}")
    return same_as_first(x)


@op(shape=_gelu_shape, flops=lambda n: 10 * n.type.count, in_place=_gelu_in_place)
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """x * Phi(x), with Phi the normal distribution ("none"), its tanh approximation ("tanh") or
    sigmoid(1.702 x) ("quick")

    arXiv:1606.08415
    """
    return _gelu(x, approximate)


@op(
    shape=same_as_first,
    flops=lambda n: 5 * n.type.count,
    in_place=lambda x: F.silu(x, inplace=True),
)
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x); arXiv:1702.03118"""
    return F.silu(x)


@op(shape=same_as_first, flops=lambda n: 3 * n.type.count, in_place=lambda x: x.relu_())
def relu(x: Tensor) -> Tensor:
    """max(x, 0)"""
    return x.relu()


@op(shape=same_as_first, flops=lambda n: 4 * n.type.count, in_place=lambda x: x.sigmoid_())
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))"""
    return x.sigmoid()


@op(shape=same_as_first, flops=lambda n: 6 * n.type.count)
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))"""
    return F.softplus(x)


def _in_order(x: Type) -> Type | None:
    """Halves of one projection lie apart in memory; what is made of them does not."""
    in_order = all(
        outer >= inner * size
        for outer, inner, size in zip(x.strides, x.strides[1:], x.shape[1:], strict=False)
    )
    return Type.contiguous(x.shape, x.dtype) if in_order else None


def _gated_shape(gate: Type, up: Type, **attrs: str) -> Type | None:
    need(gate.shape == up.shape, f"gate {list(gate.shape)} and up {list(up.shape)} differ")
    need_floats(gate, up)
    need(
        attrs.get("approximate", "none") in GELUS,
        f"approximate {attrs.get('approximate')!r}, expected one of {', '.join(GELUS)}",
    )
    if gate.dtype != up.dtype:
        return None
    return _in_order(gate)


@op(
    shape=_gated_shape,
    flops=lambda n: 11 * n.type.count,
    in_place=lambda gate, up, approximate: _gelu_in_place(gate, approximate=approximate).mul_(up),
)
def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """gelu(gate) * up, the gated unit of arXiv:2002.05202"""
    return _gelu(gate, approximate).mul_(up)


@op(
    shape=_gated_shape,
    flops=lambda n: 6 * n.type.count,
    in_place=lambda gate, up: F.silu(gate, inplace=True).mul_(up),
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, SwiGLU's gated unit of arXiv:2002.05202"""
    return F.silu(gate).mul_(up)


def _sigmoid_gate_shape(x: Type, gate: Type, y: Type | None = None) -> Type | None:
    fits = gate.shape in (x.shape, (*x.shape[:-1], 1)) and (y is None or y.shape == x.shape)
    need(fits, f"x {list(x.shape)}, gate {list(gate.shape)}, y {y and list(y.shape)}")
    need(all(t is None or t.dtype == x.dtype for t in (gate, y)), f"x {x}, gate {gate}, y {y}")
    need_floats(x)
    return _in_order(x)


def _sigmoid_gate_in_place(x: Tensor, gate: Tensor, y: Tensor | None = None) -> Tensor:
    x.mul_(torch.sigmoid(gate))
    return x if y is None else x.add_(y)


@op(shape=_sigmoid_gate_shape, flops=lambda n: 6 * n.type.count, in_place=_sigmoid_gate_in_place)
def sigmoid_gate(x: Tensor, gate: Tensor, y: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate) + y

    x, y [..., D], gate [..., D] or [..., 1]; y zeros where it is absent
    """
    made = x * torch.sigmoid(gate)
    return made if y is None else made.add_(y)


@op(
    shape=same_as_first,
    flops=lambda n: 10 * n.type.count,
    in_place=lambda x, cap: x.div_(cap).tanh_().mul_(cap),
)
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return (x / cap).tanh_().mul_(cap)
