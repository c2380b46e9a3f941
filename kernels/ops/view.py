"""Ops that look at the same values in another shape."""

from __future__ import annotations

from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.op import need, op


@op(view=True)
def reshape(x: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """The same elements in row-major order under another shape; one size may be -1. A copy where
    x's strides forbid a view.
    """
    return x.reshape(shape)


@op(view=True)
def kv_half(cache: Tensor, *, which: int) -> Tensor:
    """The keys (0) or the values (1) of a cache, as a batch of one

    cache [2, S, G, K] -> [1, S, G, K]
    """
    return cache[which].unsqueeze(0)


def _rows_shape(x: Type, *, start: int, stop: int) -> Type:
    need(
        len(x.shape) > 0 and 0 <= start < stop <= x.shape[0],
        f"rows {start} to {stop} of {list(x.shape)}",
    )
    return Type.strided((stop - start, *x.shape[1:]), x.dtype, x.strides)


@op(view=True, shape=_rows_shape)
def rows(x: Tensor, *, start: int, stop: int) -> Tensor:
    """x[start:stop]          x [T, ...] -> [stop - start, ...]"""
    return x[start:stop]


def _columns_shape(x: Type, *, start: int, stop: int) -> Type:
    need(
        len(x.shape) > 0 and 0 <= start < stop <= x.shape[-1],
        f"columns {start} to {stop} of {list(x.shape)}",
    )
    return Type.strided((*x.shape[:-1], stop - start), x.dtype, x.strides)


@op(view=True, shape=_columns_shape)
def columns(x: Tensor, *, start: int, stop: int) -> Tensor:
    """x[..., start:stop], apart in memory as x's rows are

    x [..., D] -> [..., stop - start]
    """
    return x[..., start:stop]


def _half_shape(x: Type, *, which: int) -> Type:
    need(len(x.shape) > 1 and 0 <= which < x.shape[0], f"half {which} of {list(x.shape)}")
    return Type.strided(x.shape[1:], x.dtype, x.strides[1:])


@op(view=True, shape=_half_shape)
def half(x: Tensor, *, which: int) -> Tensor:
    """x[which]          x [N, ...] -> [...]"""
    return x[which]
