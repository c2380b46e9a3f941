"""Calling kernels one by one."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def call(address: int, args: list[int], first: int, last: int, scratch: int = 0) -> None:
    """Units first to last of a kernel, in memory that ends where it says."""
    words = np.array(args, np.int64)
    KERNEL(address)(words.ctypes.data, first, last, scratch)


def bits(number: float) -> int:
    """A float32 as an argument."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
