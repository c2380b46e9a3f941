"""Ops that look at the same values in another shape."""
from __future__ import annotations

from torch import Tensor

from mtmd.kernels.ops.op import op


@op(view=True)
def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """The same elements in row-major order under another shape; one size may be -1. A copy where x's strides forbid a view."""
    return x.reshape(shape)


@op(view=True)
def kv_half(cache: Tensor, *, which: int) -> Tensor:
    """The keys (0) or the values (1) of a cache, as a batch of one          cache [2, S, G, K] -> [1, S, G, K]"""
    return cache[which].unsqueeze(0)
