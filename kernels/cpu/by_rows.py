"""Ops that torch computes, over a block of rows after the other: what it makes on the way, and its
copy of the result, are a block's; the result lies in the memory of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mtmd.kernels.cpu import matmul
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.image import patch_embed, pool2d
from mtmd.kernels.ops.norm import layer_norm
from mtmd.kernels.resources.result_memory import new_result

LARGE = 4 << 20  # bytes of what is read, from which on it is worth it
BLOCK = 1 << 19  # bytes of a block of what is read; it stays in the second cache


def _small(x: Type, *others: Type | None, **attrs: Any) -> str | None:  # noqa: ARG001
    """None if it is worth it, else why not."""
    if not x.is_contiguous:
        return "x is not contiguous"
    return f"{x.bytes} bytes; the kernel is for {LARGE} on" if x.bytes < LARGE else None


def _parts(count: int, bytes_: int) -> Iterator[slice]:
    """Yield the parts of so many rows in as many bytes, the blocks."""
    step = max(1, count * BLOCK // bytes_)
    return (slice(start, start + step) for start in range(0, count, step))


def _layer_norm(x: Tensor, *weights: Tensor | None, eps: float) -> Tensor:
    out = new_result(*x.shape, dtype=x.dtype)
    rows, results = x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    for part in _parts(len(rows), x.nbytes):
        results[part] = layer_norm.reference(rows[part], *weights, eps=eps)
    return out


def _patch_embed(pixels: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    batch, _, height, width = pixels.shape
    size = w.shape[-1]
    lines = height // size
    out = new_result(batch, lines, width // size, w.shape[0], dtype=w.dtype)
    for part in _parts(lines, pixels.nbytes):
        seen = pixels[:, :, part.start * size : part.stop * size]
        out[:, part] = patch_embed.reference(seen, w, b).unflatten(1, (-1, width // size))
    return out.flatten(1, 2)


def _pool2d(x: Tensor, *, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    (rows, columns), (down, across) = grid, size
    lines = x.unflatten(1, (down, rows // down * columns))
    out = new_result(x.shape[0], down * across, x.shape[2], dtype=x.dtype)
    results = out.unflatten(1, size)
    for part in _parts(down, x.nbytes):
        seen = lines[:, part]
        some = seen.shape[1] * (rows // down), columns
        pooled = pool2d.reference(seen.flatten(1, 2), grid=some, size=(seen.shape[1], across))
        results[:, part] = pooled.unflatten(1, (-1, across))
    return out


def _small_or_uneven(x: Type, *, grid: tuple[int, int], size: tuple[int, int]) -> str | None:
    """None if parts of a grid do not overlap, and it is worth it, else why not."""
    if grid[0] % size[0] or grid[1] % size[1]:
        return f"a grid of {grid[0]} x {grid[1]} in {size[0]} x {size[1]} parts that overlap"
    return _small(x)


def _values(x: Type, rows: int) -> int:
    """Return the values of a block, where x has so many rows."""
    return x.count // rows * max(1, rows * BLOCK // x.bytes)


def _of_layer_norm(x: Type, *weights: Type | None, eps: float) -> int:  # noqa: ARG001
    """A block of the result."""
    return _values(x, x.count // x.shape[-1]) * x.dtype.itemsize


def _of_patches(pixels: Type, w: Type, b: Type | None = None) -> int:  # noqa: ARG001
    """The patches and embeddings of a block, and the weight as it may be packed."""
    size, (batch, channels, height, width) = w.shape[-1], pixels.shape
    lines = max(1, height // size * BLOCK // pixels.bytes)
    count, columns = batch * lines * (width // size), channels * size * size
    packed = w.bytes
    if w.dtype.itemsize == 2:
        weight = Type.contiguous((w.shape[0], columns), w.dtype)
        rows = Type.contiguous((count, columns), w.dtype)
        packed = max(packed, matmul.packed_bytes(rows, weight))
    return count * (columns + w.shape[0]) * w.dtype.itemsize + packed


def _of_pool(x: Type, *, grid: tuple[int, int], size: tuple[int, int]) -> int:
    """A block in fp32, and its means."""
    values, item = _values(x, size[0]), x.dtype.itemsize
    means = values * size[0] * size[1] // (grid[0] * grid[1])
    return values * (0 if item == 4 else 4) + means * (4 + item)


LAYER_NORM = Kernel(_layer_norm, _small, _of_layer_norm)
PATCH_EMBED = Kernel(_patch_embed, _small, _of_patches)
POOL = Kernel(_pool2d, _small_or_uneven, _of_pool)
