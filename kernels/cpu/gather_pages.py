"""Pages of a cache on the CPU: a run of neighbours is looked at where it is, and what is quantized
becomes numbers in machine code, on torch's threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.dtype import DTYPES
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.gather import gather_pages as copied
from mtmd.kernels.quantization.kv_rows import part_of, part_types
from mtmd.kernels.resources.result_memory import new_result

TYPES = {"fp32": "f32", "bf16": "bf16"}
CHUNK = 64  # heads of a token that a thread claims at once


def gather_pages(
    cache: Tensor, pages: Tensor, *, which: int, size: int, dtype: str | None = None
) -> Tensor:
    """The `gather_pages` op; no copy is made where each page follows on the one before, as those of
    a sequence alone do. Nothing writes to the result: attention reads it.
    """
    first, count = int(pages[0]), len(pages)
    if (
        cache.is_contiguous()
        and int(pages[-1]) == first + count - 1
        and torch.equal(pages, torch.arange(first, first + count))
    ):
        rows = cache[which, first * size : (first + count) * size].unsqueeze(0)
        return rows if dtype is None else rows.to(DTYPES[dtype])
    return copied.reference(cache, pages, which=which, size=size, dtype=dtype)


def rejects_quantized(
    cache: Type,  # noqa: ARG001
    pages: Type,  # noqa: ARG001
    *,
    quant: str | None = None,
    **attrs: object,  # noqa: ARG001
) -> str | None:
    """None if the kernel supports the cache, else why not."""
    return None if quant is None else f"the cache is {quant}; the kernel copies numbers"


def rejects(
    cache: Type,
    pages: Type,  # noqa: ARG001
    *,
    which: int,  # noqa: ARG001
    size: int,  # noqa: ARG001
    dtype: str | None = None,
    quant: str | None = None,
    head: int | None = None,  # noqa: ARG001
) -> str | None:
    """None if the kernel supports the cache, else why not."""
    if quant is None:
        return "the cache has numbers as they are; the kernel dequantizes them"
    if dtype not in TYPES:
        return f"the result is {dtype}; the kernel makes fp32 or bf16"
    return None if cache.is_contiguous else f"the cache has strides {list(cache.strides)}"


def dequantized(
    cache: Tensor, pages: Tensor, *, which: int, size: int, dtype: str, quant: str, head: int
) -> Tensor:
    """The `gather_pages` op: a quantized cache, pages [P] -> [1, P * size, G, head]"""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.native.kv_rows import emit_gather
    from mtmd.kernels.cpu.tiled import team

    pages, groups = pages.contiguous(), cache.shape[2]
    out = new_result(1, len(pages) * size, groups, head, dtype=DTYPES[dtype])
    address = compile_kernel(emit_gather, part_types(quant)[which], head, TYPES[dtype])
    rows = part_of(cache, which, quant, head).data_ptr()
    args = [rows, pages.data_ptr(), size, groups, out.data_ptr(), cache.stride(2)]
    team.run(address, args, len(pages) * size * groups, CHUNK)
    return out


def workspace(
    cache: Type,
    pages: Type,
    *,
    which: int,  # noqa: ARG001
    size: int,
    **attrs: object,  # noqa: ARG001
) -> int:
    """Bytes beyond the result."""
    from mtmd.kernels.cpu.tiled import team

    copied_pages = 0 if pages.is_contiguous else pages.bytes
    units = pages.shape[0] * size * cache.shape[2]
    return copied_pages + team.scratch_bytes(0, units, CHUNK)


KERNEL = Kernel(gather_pages, rejects_quantized)
DEQUANTIZED = Kernel(dequantized, rejects, workspace)
