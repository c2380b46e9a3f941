"""Memory that goes back to the system: glibc's allocator keeps what is freed below a threshold that
it raises by itself, up to 32 MiB, as large pieces are freed. A server that has decoded eighty
pictures then holds the memory of all of them for ever. And it makes eight heaps for each core, as
threads meet in one: each keeps holes of its own, some MiB, and a server has many threads.
"""

from __future__ import annotations

import ctypes
import sys

# malloc.h: both thresholds stay where they are put once either has been set.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
THRESHOLD = 1 << 20
HEAPS = 4  # a thread waits for another in its heap seldom: it keeps some small pieces at hand


def return_freed_memory() -> bool:
    """Return freed memory to the system: from here on, pieces of 1 MiB and more are mapped by
    themselves and unmapped when freed, and the heap is trimmed when as much is free at its end;
    smaller ones lie in `HEAPS` heaps. For the whole process and for good. Returns whether the
    allocator takes such settings (glibc does; musl and macOS return large pieces anyway).

    Source: mallopt(3).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    taken = [
        mallopt(M_MMAP_THRESHOLD, THRESHOLD),
        mallopt(M_TRIM_THRESHOLD, THRESHOLD),
        mallopt(M_ARENA_MAX, HEAPS),
    ]
    return all(taken)
