"""Norms, rotary embeddings and sums of many rows as machine code (`native.rows`).

They run on torch's threads, and on one where that takes a fraction of a millisecond: on a core that
others want, too, a thread is waited for longer than that.
"""

from __future__ import annotations

import struct
from math import prod

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.resources.result_memory import new_result

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
WORTH = 1 << 12  # values from which on it is faster than torch's operators
CHUNK = 1 << 18  # values that a thread claims at once, 20 to 150 us


def _rejects(x: Type, other: Type | None) -> str | None:
    if x.dtype not in TYPES:
        return f"x is {name_of(x.dtype)}; the kernel supports fp32 and bf16"
    if other is not None and (other.dtype != torch.float32 or not other.is_contiguous):
        return f"weights or angles are {other}, not contiguous fp32"
    if x.strides[-1] != 1:
        return "numbers of a row are not side by side"
    return f"{x.count} values; the kernel is for {WORTH} on" if x.count < WORTH else None


def _rejects_norm(x: Type, w: Type | None = None, *, eps: float) -> str | None:  # noqa: ARG001
    """None if the kernel supports tensors of these types, else why not."""
    from mtmd.kernels.cpu.native.rows import two_level  # loads LLVM

    if reason := _rejects(x, w):
        return reason
    whole = Type.contiguous(x.shape, x.dtype)
    fits = two_level(x.shape[:-1], x.strides[:-1], whole.strides[:-1])
    return None if fits else f"rows of {x} lie in three dimensions"


def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float) -> Tensor:
    """The `rms_norm` op          x [..., D], w fp32 [D]"""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.native.rows import emit_norm, two_level
    from mtmd.kernels.cpu.tiled import team

    out, size, kind = new_result(*x.shape, dtype=x.dtype), x.shape[-1], TYPES[x.dtype]
    levels = two_level(x.shape[:-1], x.stride()[:-1], out.stride()[:-1])
    assert levels is not None
    outer, inner, (strides, out_strides) = levels
    address = compile_kernel(emit_norm, "rms", kind, kind, w is not None)
    args = [x.data_ptr(), *strides, out.data_ptr(), *out_strides, inner, size, _bits(eps)]
    args += [0 if w is None else w.data_ptr()]
    team.run(address, args, outer * inner, _chunk(size))
    return out


def _rejects_rope(x: Type, table: Type, *, pairs: str = "half", parts: int = 1) -> str | None:  # noqa: ARG001
    """None if the kernel supports tensors of these types, else why not."""
    if parts != 1:
        return f"heads in {parts} parts"
    if len(x.shape) > 4:
        return f"x has {len(x.shape)} dimensions"
    return _rejects(x, table)


def rope(x: Tensor, table: Tensor, *, pairs: str = "half", parts: int = 1) -> Tensor:  # noqa: ARG001
    """The `rope` op          x [..., T, H, K], table fp32 [T, 2, R]"""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.native.rows import emit_rope
    from mtmd.kernels.cpu.tiled import team

    out, kind = new_result(*x.shape, dtype=x.dtype), TYPES[x.dtype]
    tokens, heads, size = x.shape[-3:]
    address = compile_kernel(emit_rope, kind, kind, pairs)
    several = zip(x, out, strict=True) if x.dim() > 3 else [(x, out)]
    for one, result in several:
        args = [one.data_ptr(), *one.stride()[:2], result.data_ptr(), *result.stride()[:2]]
        args += [heads, size, table.shape[2], table.data_ptr()]
        team.run(address, args, tokens * heads, _chunk(size))
    return out


def _rejects_add(a: Type, b: Type) -> str | None:
    """None if the kernel supports tensors of these types, else why not."""
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_contiguous and b.is_contiguous):
        return f"a {a} and b {b} are not alike and contiguous"
    return _rejects(a, None) if a.shape else "a single value"


def add(a: Tensor, b: Tensor) -> Tensor:
    """The `add` op"""
    return _add(a, b, new_result(*a.shape, dtype=a.dtype))


def _add(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.native.rows import BLOCK, emit_each
    from mtmd.kernels.cpu.tiled import team

    kind, count = TYPES[a.dtype], a.numel()
    args = [a.data_ptr(), 0, 0, b.data_ptr(), 0, 0, out.data_ptr(), 0, 0, 1, count]
    team.run(
        compile_kernel(emit_each, "add", kind, kind, kind), args, -(-count // BLOCK), _chunk(BLOCK)
    )
    return out


def _chunk(size: int) -> int:
    return max(1, CHUNK // size)


def _bits(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _of_norm(x: Type, w: Type | None = None, *, eps: float) -> int:  # noqa: ARG001
    """Bytes beyond the result."""
    from mtmd.kernels.cpu.tiled import team

    return team.scratch_bytes(0, prod(x.shape[:-1]), _chunk(x.shape[-1]))


def _of_rope(x: Type, table: Type, **attrs: object) -> int:  # noqa: ARG001
    """Bytes beyond the result."""
    return _of_norm(x, eps=0.0)


def _of_add(a: Type, b: Type) -> int:  # noqa: ARG001
    """Bytes beyond the result."""
    from mtmd.kernels.cpu.native.rows import BLOCK
    from mtmd.kernels.cpu.tiled import team

    return team.scratch_bytes(0, -(-a.count // BLOCK), _chunk(BLOCK))


ADD = Kernel(add, _rejects_add, _of_add, in_place=lambda a, b: _add(a, b, a))
RMS_NORM = Kernel(rms_norm, _rejects_norm, _of_norm)
ROPE = Kernel(rope, _rejects_rope, _of_rope)
