"""Activations of many values as machine code (`tiled.activation`), in place where that is asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.resources.result_memory import new_result

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
WORTH = 1 << 14  # values from which on it is faster than torch's, about 5 us
CHUNK = 1 << 15  # values that a thread claims at once, about 6 us


def _rejects(x: Type, gate: Type | None = None, *, approximate: str = "") -> str | None:
    """None if the kernel supports tensors of these types, else why not."""
    if x.dtype not in TYPES or (gate is not None and gate.dtype != x.dtype):
        types = ", ".join(name_of(t.dtype) for t in (x, gate) if t is not None)
        return f"operands are {types}; the kernel supports fp32 or bf16, all of one type"
    if not (x.is_contiguous and (gate is None or gate.is_contiguous)):
        return "operands are not contiguous"
    if approximate == "none" and gate is None:
        return "of the exact gelu torch's is as fast"
    if x.count < WORTH:
        return f"{x.count} values; the kernel is for {WORTH} on"
    from mtmd.kernels.cpu.tiled.cpu import host_form

    if host_form(TYPES[x.dtype]) is None:
        return "the CPU has neither AVX2 nor AVX-512"
    return None


def _run(activation: str, x: Tensor, gate: Tensor | None, out: Tensor) -> Tensor:
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.tiled import team
    from mtmd.kernels.cpu.tiled.activation import emit_activation

    address = compile_kernel(emit_activation, activation, TYPES[x.dtype], gate is not None)
    args = [x.data_ptr(), 0 if gate is None else gate.data_ptr(), out.data_ptr()]
    team.run(address, args, x.numel(), CHUNK)
    return out


def _like(x: Tensor) -> Tensor:
    return new_result(*x.shape, dtype=x.dtype)


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """The `gelu` op"""
    return _run(approximate, x, None, _like(x))


def silu(x: Tensor) -> Tensor:
    """The `silu` op"""
    return _run("silu", x, None, _like(x))


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """The `gelu_mul` op"""
    return _run(approximate, gate, up, _like(gate))


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """The `silu_mul` op"""
    return _run("silu", gate, up, _like(gate))


def _workspace(*types: Type | None, **attrs: Any) -> int:  # noqa: ARG001
    """Bytes beyond the result."""
    from mtmd.kernels.cpu.tiled import team

    assert types[0] is not None
    return team.scratch_bytes(0, types[0].count, CHUNK)


def _how(x: Type, *others: Type | None, **attrs: Any) -> str:  # noqa: ARG001
    """Return the key of its width of vectors."""
    from mtmd.kernels.cpu.tiled.cpu import host_form, named

    form = host_form(TYPES[x.dtype])
    assert form is not None
    return f"machine code ({named('single', form[1])})"


GELU = Kernel(
    gelu, _rejects, _workspace, in_place=lambda x, *, approximate: _run(approximate, x, None, x)
)
SILU = Kernel(silu, _rejects, _workspace, in_place=lambda x: _run("silu", x, None, x), how=_how)
GELU_MUL = Kernel(
    gelu_mul,
    _rejects,
    _workspace,
    in_place=lambda gate, up, *, approximate: _run(approximate, gate, up, gate),
    how=_how,
)
SILU_MUL = Kernel(
    silu_mul, _rejects, _workspace, in_place=lambda gate, up: _run("silu", gate, up, gate), how=_how
)
