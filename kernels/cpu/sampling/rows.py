"""Draws from rows of logits that lie in numpy's hands, by machine code."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.sampling.draw import NOT_DRAWN, emit_draw, scratch_bytes

ROW = struct.Struct("<qqf4xqf4xf4xdqf4x")  # the words of a row, as `emit_draw` has them
ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
SHORT = 1 << 16  # logits gone over in some microseconds: less than getting the interpreter back
DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.uint16): "bf16"}
_own = threading.local()
Kernel = Callable[[int, int, int, int], Any]


def draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, point: float
) -> tuple[int | None, float]:
    """A token of a row [V], fp32, or bf16 as uint16, and the row's largest logit. At temperature 0
    it is the first that has that; else `point`, in [0, 1), tells which of those that the filters
    leave. None where the largest is not finite, or too many tokens are alike.
    """
    size, temperature32 = len(logits), ctypes.c_float(temperature).value
    own = _memory(size)
    spare = 1.0 - top_p if top_p < 1 else -1.0
    address = logits.__array_interface__["data"][0]
    ROW.pack_into(own.row, 0, address, size, temperature32, top_k, spare, min_p, point, 0, 0.0)
    _kernel(DTYPES[logits.dtype], size <= SHORT)(own.address, 0, 1, own.scratch)
    *_, token, peak = ROW.unpack_from(own.row)
    return (None if token == NOT_DRAWN else token), peak


@cache
def _kernel(dtype: str, keeps: bool) -> Kernel:
    """`keeps` the interpreter's lock, which others would take, and not give back at once."""
    kind = ctypes.PYFUNCTYPE if keeps else ctypes.CFUNCTYPE
    function: Kernel = kind(None, *ARGUMENTS)(compile_kernel(emit_draw, dtype))
    return function


def prepare(dtype: str) -> None:
    """Have it compiled for rows of f32 or bf16."""
    _kernel(dtype, True)


class _Memory:
    """Memory of a thread, for rows of up to `size` logits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.row = bytearray(ROW.size)
        self._bytes = np.empty(scratch_bytes(size) + 64, np.uint8)
        self.address: int = np.frombuffer(self.row, np.uint8).ctypes.data
        self.scratch: int = -(-self._bytes.ctypes.data // 64) * 64


def _memory(size: int) -> _Memory:
    memory: _Memory | None = getattr(_own, "memory", None)
    if memory is None or memory.size < size:
        memory = _own.memory = _Memory(size)
    return memory
