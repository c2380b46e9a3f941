"""Convolution on the CPU: oneDNN's, over a grid whose channels lie next to each other, which makes
no rows of windows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.image import Padding

# Measured on torch 2.13 with AVX-512 and AMX: oneDNN holds the weight twice in other orders, in
# bf16 three times.
WEIGHTS, BF16_WEIGHTS = 2, 3


def rejects(x: Type, w: Type, b: Type | None = None, **attrs: object) -> str | None:  # noqa: ARG001
    for name, type_ in (("x", x), ("w", w)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    return None


def _conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    grid: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,
) -> Tensor:
    cells = x.unflatten(1, grid)
    top, bottom, left, right = padding
    if top != bottom or left != right:  # torch's takes one number for both sides
        cells = F.pad(cells, (0, 0, left, right, top, bottom))
        top = left = 0
    made = F.conv2d(cells.permute(0, 3, 1, 2), w, b, stride, (top, left), groups=groups)
    return made.permute(0, 2, 3, 1).reshape(x.shape[0], -1, w.shape[0]).contiguous()


def workspace(
    x: Type,
    w: Type,
    b: Type | None = None,  # noqa: ARG001
    *,
    grid: tuple[int, int],
    stride: tuple[int, int] = (1, 1),  # noqa: ARG001
    padding: Padding = (0, 0, 0, 0),
    groups: int = 1,  # noqa: ARG001
) -> int:
    """Bytes of the weight in other orders, and of the padded grid where its sides differ."""
    packed = w.bytes * (BF16_WEIGHTS if x.dtype.itemsize == 2 else WEIGHTS)
    top, bottom, left, right = padding
    if top == bottom and left == right:
        return packed
    cells = (grid[0] + top + bottom) * (grid[1] + left + right)
    return packed + x.bytes // x.shape[1] * cells


KERNEL = Kernel(_conv2d, rejects, workspace)
