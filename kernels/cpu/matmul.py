"""What torch's matrix products hold beyond their result, for the memory prediction."""

from __future__ import annotations

from mtmd.kernels.graph import Type

# Measured with benchmarks/memory.py's method on AVX-512 (MKL, one thread; a second thread adds 0.5
# MiB): fp32 packs the weight in
# blocks of 384 columns and the rows in one panel.
BLOCK = 384
PANEL_BYTES = 5 << 18


def workspace(x: Type, w: Type) -> int:
    """Bytes of packed operands          x [..., K], w [N, K]"""
    rows = x.count // max(x.shape[-1], 1)
    if rows <= 1:
        return 0
    if (
        w.dtype.itemsize == 2
    ):  # oneDNN: a copy of the weight where it is longer than wide, next to nothing else
        return w.bytes if w.shape[1] > w.shape[0] else 0
    return min(w.shape[0] * min(w.shape[1], BLOCK) * 4 + PANEL_BYTES, x.bytes + w.bytes)
