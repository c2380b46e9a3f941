"""Keys and values quantized on their way into a cache, as machine code on torch's threads."""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.quantization.kv_rows import cached_parts, value_offset

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
CHUNK = 16  # heads of a token that a thread claims at once


def rejects(
    cache: Type,
    k: Type,
    v: Type,
    slots: Type,  # noqa: ARG001
    *,
    quant: str | None = None,
) -> str | None:
    """None if the kernel writes tensors of these types, else why not."""
    if quant is None:
        return "the cache has numbers as they are; the kernel quantizes them"
    if k.dtype not in TYPES or v.dtype != k.dtype:
        return f"k is {name_of(k.dtype)}, v {name_of(v.dtype)}; the kernel supports fp32 or bf16"
    return None if cache.is_contiguous else f"the cache has strides {list(cache.strides)}"


def kv_store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, quant: str) -> Tensor:
    """The `kv_store` op: a quantized cache, k and v [T, G, K] -> cache"""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.native.kv_rows import emit_quantized_store
    from mtmd.kernels.cpu.tiled import team

    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    slots = slots.contiguous()
    tokens, groups, size = k.shape
    both = cached_parts(cache.shape[0], quant)
    address = compile_kernel(emit_quantized_store, TYPES[k.dtype], quant, size, both)
    args = [n for x in (k, v) for n in (x.data_ptr(), *x.stride()[:2])]
    of_value = value_offset(quant, size) or cache.stride(0)
    args += [slots.data_ptr(), cache.data_ptr(), of_value, groups]
    team.run(address, args, tokens * groups, CHUNK)
    return cache


def workspace(
    cache: Type,  # noqa: ARG001
    k: Type,
    v: Type,
    slots: Type,
    *,
    quant: str,  # noqa: ARG001
) -> int:
    """Bytes that are held beside: copies of what is not dense."""
    from mtmd.kernels.cpu.tiled import team

    copies = sum(x.bytes for x in (k, v) if x.strides[-1] != 1)
    copies += 0 if slots.is_contiguous else slots.bytes
    return copies + team.scratch_bytes(0, k.shape[0] * k.shape[1], CHUNK)


KERNEL = Kernel(kv_store, rejects, workspace)
