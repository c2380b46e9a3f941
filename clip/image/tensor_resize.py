"""Resizing as torchvision does it on tensors, which is not Pillow's result: the weights of a
pixel's neighbours are rounded otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from mtmd.clip.image.pixels import Pixels
from mtmd.kernels.resources.threads import one_thread

MODES = ("bilinear", "bicubic", "lanczos")


def resize_tensor(pixels: Pixels, width: int, height: int, mode: str) -> Pixels:
    """uint8 [H, W, 3] to uint8 [height, width, 3], with antialiasing; equal bit by bit to
    torchvision's on the same machine.

    As there, bilinear goes by way of numbers with a fraction on processors for which torch has no
    uint8 kernel that is exact.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    planes = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    exact = mode != "bilinear" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    with one_thread():
        resized = F.interpolate(
            planes if exact else planes.float(),
            (height, width),
            mode=mode,
            align_corners=False,
            antialias=True,
        )
        if not exact:
            resized = resized.round_().to(torch.uint8)
        return resized[0].permute(1, 2, 0).contiguous().numpy()


def resize_numbers(pixels: Pixels, width: int, height: int, mode: str) -> np.ndarray:
    """uint8 [H, W, 3] to fp32 [3, height, width], with antialiasing and not rounded: what
    overshoots at edges stays. Equal bit by bit to torchvision's on tensors of such numbers.
    """
    planes = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32))[None]
    if pixels.shape[:2] != (height, width):
        with one_thread():
            planes = F.interpolate(
                planes, (height, width), mode=mode, align_corners=False, antialias=True
            )
    result: np.ndarray = planes[0].numpy()
    return result
