"""Pages of files that are mapped into memory, released when what they hold has been read."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor


def release_pages(mapped: Tensor) -> None:
    """Take the whole pages of a contiguous tensor that is a view of a mapped file out of the memory
    of this process: they count as its own until then, and are read again when they are used. Only
    Linux is asked to.
    """
    if not sys.platform.startswith("linux"):
        return
    start = -(-mapped.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (mapped.data_ptr() + mapped.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
        ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)
