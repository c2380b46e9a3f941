"""Rotary position embeddings."""
from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.op import need, need_floats, op


def _shape(x: Type, positions: Type, *, base: float, factor: float = 1.0) -> Type:  # noqa: ARG001
    fits = len(x.shape) == 3 and positions.shape == x.shape[:1] and x.shape[-1] % 2 == 0
    need_floats(x)
    need(fits, f"x {list(x.shape)}, positions {list(positions.shape)}")
    return Type.contiguous(x.shape, x.dtype)


@op(shape=_shape, flops=lambda n: 6 * n.type.count)
def rope(x: Tensor, positions: Tensor, *, base: float, factor: float = 1.0) -> Tensor:
    """Rotate pairs (x_i, x_{i+K/2}) by positions / factor * base^(-2i/K)          x [T, H, K], positions [T]; arXiv:2104.09864

    `factor` is linear position interpolation (arXiv:2306.15595). Angles and products are fp32.
    """
    half = x.shape[-1] // 2
    inverse = 1.0 / (base ** (torch.arange(0, 2 * half, 2, dtype=torch.float32, device=x.device) / (2 * half))) / factor
    angle = positions.float()[:, None, None] * inverse
    a, b = x.float().split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
