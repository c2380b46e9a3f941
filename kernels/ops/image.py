"""Ops on pictures and grids of patches."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op


def _patch_flops(node: Node) -> int:
    w = node.inputs[1]
    assert w is not None
    return 2 * node.type.count * (w.type.count // w.shape[0])


def _patch_shape(pixels: Type, w: Type, b: Type | None = None) -> Type:
    need(len(pixels.shape) == len(w.shape) == 4 and w.shape[2] == w.shape[3], f"pixels {list(pixels.shape)}, w {list(w.shape)}")
    need_floats(pixels)
    need(all(t is None or t.dtype == pixels.dtype for t in (w, b)), f"pixels are {pixels}, w {w}, b {b}: of several types")
    batch, _, height, width = pixels.shape
    size = w.shape[-1]
    need(height % size == 0 and width % size == 0, f"pixels {list(pixels.shape)} are no multiple of patch {size}")
    need(pixels.shape[1] == w.shape[1] and (b is None or b.shape == w.shape[:1]), f"pixels {list(pixels.shape)}, w {list(w.shape)}")
    return Type.contiguous((batch, (height // size) * (width // size), w.shape[0]), w.dtype)


@op(shape=_patch_shape, flops=_patch_flops)
def patch_embed(pixels: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """One embedding per patch, row by row          pixels [B, 3, Y, X], w [C, 3, S, S], b [C] -> [B, P, C], P = (Y/S)(X/S)"""
    size = w.shape[-1]
    batch, channels, height, width = pixels.shape
    patches = pixels.reshape(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.reshape(batch, -1, channels * size * size), w.reshape(w.shape[0], -1), b)


def _pool_shape(x: Type, *, grid: tuple[int, int], kernel: int) -> Type:
    need_floats(x)
    need(len(x.shape) == 3, f"x {list(x.shape)}")
    rows, columns = grid
    need(x.shape[1] == rows * columns, f"x {list(x.shape)} is not a grid of {rows} x {columns}")
    need(rows % kernel == 0 and columns % kernel == 0, f"grid {rows} x {columns} does not divide by {kernel}")
    return Type.contiguous((x.shape[0], x.shape[1] // kernel ** 2, x.shape[2]), x.dtype)


@op(shape=_pool_shape, flops=lambda n: n.type.count * n.attrs["kernel"] ** 2)
def pool2d(x: Tensor, *, grid: tuple[int, int], kernel: int) -> Tensor:
    """Average over kernel x kernel neighbours of a grid          x [B, P, C], P = rows * columns -> [B, P / kernel^2, C]"""
    rows, columns = grid
    cells: Tensor = x.unflatten(1, (rows // kernel, kernel, columns // kernel, kernel))
    return cells.float().mean((2, 4)).to(x.dtype).flatten(1, 2)
