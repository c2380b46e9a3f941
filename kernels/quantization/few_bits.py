"""Dequantization of the types whose values are -1, 0 and 1 times a scale, or -1 and 1: uint8 [n,
bytes] -> fp32 [n, values].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import fields, half


def tq1_0(blocks: Tensor) -> Tensor:
    """Ternary digits, five to a byte, four in the last bytes: d (digit - 1).

    A byte is a fraction of 256 in base 3: multiplying by a power of three, modulo 256, brings each
    digit to the front.
    """
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    parts = [
        blocks[:, start:stop] * 3**location
        for start, stop, locations in runs
        for location in range(locations)
    ]
    digits = torch.cat(parts, dim=1).to(torch.int16).mul_(3) >> 8
    return digits.sub_(1).float().mul_(half(blocks, 52))


def tq2_0(blocks: Tensor) -> Tensor:
    """Ternary digits of 2 bits: d (digit - 1)."""
    return fields(blocks[:, :64], 2, 32).sub_(1).view(torch.int8).float().mul_(half(blocks, 64))


def q1_0(blocks: Tensor) -> Tensor:
    """Scale d; 128 bits: d where it is set, else -d."""
    return fields(blocks[:, 2:], 1, 1).float().mul_(2).sub_(1).mul_(half(blocks, 0))
