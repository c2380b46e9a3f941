"""Pages of a cache on the CPU: a run of neighbours is looked at where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.gather import gather_pages as copied


def gather_pages(cache: Tensor, pages: Tensor, *, which: int, size: int) -> Tensor:
    """The `gather_pages` op; no copy is made where each page follows on the one before, as those of
    a sequence alone do. Nothing writes to the result: attention reads it.
    """
    first, count = int(pages[0]), len(pages)
    if (
        cache.is_contiguous()
        and int(pages[-1]) == first + count - 1
        and torch.equal(pages, torch.arange(first, first + count))
    ):
        return cache[which, first * size : (first + count) * size].unsqueeze(0)
    return copied.reference(cache, pages, which=which, size=size)


KERNEL = Kernel(gather_pages)
