"""Describes what torch's matrix products hold beyond their result, for the memory prediction."""

from __future__ import annotations

from functools import lru_cache

import torch

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.matmul import matmul

# Measured with benchmarks/memory.py's method on AVX-512 (MKL, one thread; a second thread adds 0.5
# MiB): fp32 packs the weight in blocks of 384 columns and the rows in one panel.
BLOCK = 384
PANEL_BYTES = 5 << 18
# bf16 without AMX (torch 2.13, an AMD EPYC with AVX-512 and its bf16 products): oneDNN packs blocks
# of 64 rows of the weight and as many columns, and has sums of 64 x so many rows of x in fp32.
# Without those products (a Xeon with AVX-512) it has all sums in fp32, and packs nothing.
BF16_COLUMNS, BF16_ROWS, BF16_MORE_BYTES = 1024, 256, 3 << 10


def rejects(
    x: Type,  # noqa: ARG001
    w: Type,  # noqa: ARG001
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: str | None = None,
    int8: bool = False,  # noqa: ARG001
) -> str | None:
    return f"weights are {quant}; torch multiplies plain ones" if quant else None


def workspace(
    x: Type,
    w: Type,
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: None = None,  # noqa: ARG001
) -> int:
    """Bytes beyond the result."""
    return packed_bytes(x, w)


def packed_bytes(x: Type, w: Type) -> int:
    """Bytes of packed operands          x [..., K], w [N, K]

    Blocks and not the whole weight as a bound: that would put a 120 MiB encode 10 % too high, and
    a table of 262,144 tokens by gigabytes.
    """
    rows = x.count // max(x.shape[-1], 1)
    if rows <= 1:
        return 0
    if w.dtype.itemsize == 2:
        if not _is_by_onednn():  # torch multiplies it itself then, where it lies
            return 0
        if _has("amx-bf16"):
            # A copy of the weight where it is longer than wide, next to nothing else.
            return w.bytes if w.shape[1] > w.shape[0] else 0
        if not _has("avx512bf16"):
            return rows * w.shape[0] * 4  # all sums, in fp32
        block = min(w.shape[1], BF16_COLUMNS) * 2 + min(rows, BF16_ROWS) * 4
        return min(64 * block + BF16_MORE_BYTES, x.bytes + w.bytes)
    return min(w.shape[0] * min(w.shape[1], BLOCK) * 4 + PANEL_BYTES, x.bytes + w.bytes)


@lru_cache(maxsize=1)
def _is_by_onednn() -> bool:
    """Products of bf16 on this CPU: not where it has AVX2 alone, or torch was built without it."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@lru_cache(maxsize=8)
def _has(feature: str) -> bool:
    """Name the feature of this CPU, as LLVM calls it: by what oneDNN multiplies bf16."""
    from mtmd.kernels.cpu.native.compile import host  # loads LLVM

    return host().has(feature)


KERNEL = Kernel(matmul.reference, rejects, workspace)
