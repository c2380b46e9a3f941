"""Memory of large results.

The allocator takes what is larger than 32 MiB from the system each time, and each of its 4 KiB
pages costs a fault when it is first written to: 10 ms of the 20 to 40 that a product of 35 MiB
takes. Linux gives pages of 2 MiB to who asks for them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

LARGE = 16 << 20  # bytes; what is smaller, the allocator mostly has still
PAGE = 2 << 20
ADVICE = 14  # MADV_HUGEPAGE of madvise(2)


def new_result(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that is not set, in large pages where it is worth it and can be had."""
    result = torch.empty(shape, dtype=dtype)
    if result.nbytes >= LARGE and (advise := _advise()) is not None:
        first = -(-result.data_ptr() // PAGE) * PAGE
        last = (result.data_ptr() + result.nbytes) // PAGE * PAGE
        advise(first, last - first, ADVICE)  # a system that has none of them says so: no harm
    return result


@lru_cache(maxsize=1)
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise
