"""Memory that goes back to the system: glibc's allocator keeps what is freed below a threshold that
it raises by itself, up to 32 MiB, as large pieces are freed. A server that has decoded eighty
pictures then holds the memory of all of them for ever.
"""

from __future__ import annotations

import ctypes
import sys

# malloc.h: both thresholds stay where they are put once either has been set.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
THRESHOLD = 1 << 20


def return_freed_memory() -> bool:
    """From here on, pieces of 1 MiB and more are mapped by themselves and unmapped when freed, and
    the heap is trimmed when as much is free at its end. For the whole process and for good. Returns
    whether the allocator takes such settings (glibc does; musl and macOS return large pieces
    anyway).

    Source: mallopt(3).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(M_MMAP_THRESHOLD, THRESHOLD)) and bool(mallopt(M_TRIM_THRESHOLD, THRESHOLD))
