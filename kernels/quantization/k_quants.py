"""Dequantization of the types with blocks of 256 values and no grid: uint8 [n, bytes] -> fp32 [n,
256].

A block has 8 or 16 groups of values, each with a small integer scale; one or two fp16 numbers scale
those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import fields, half, lookup, table, uint16s
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES


def q2_k(blocks: Tensor) -> Tensor:
    """16 groups: scale (4 bits) and minimum (4 bits) in a byte, codes of 2 bits: d scale q - dmin
    minimum.
    """
    scales = blocks[:, :16]
    scale, minimum = half(blocks, 80) * (scales & 15), half(blocks, 82) * (scales >> 4)
    return _scaled(fields(blocks[:, 16:80], 2, 32).float(), scale, minimum)


def q3_k(blocks: Tensor) -> Tensor:
    """16 groups: scale of 6 bits, codes of 2 bits and a third in a mask: d (scale - 32) (q - 4)."""
    # The scales' lower 4 bits are in 8 bytes, the upper 2 in 4 bytes.
    scales = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << 4
    high = fields(blocks[:, :32], 1, 32).bitwise_left_shift_(2)
    codes = fields(blocks[:, 32:96], 2, 32).bitwise_or_(high).sub_(4).view(torch.int8)
    return _scaled(codes.float(), half(blocks, 108) * scales.sub_(32).view(torch.int8))


def q4_k(blocks: Tensor) -> Tensor:
    """8 groups: scale and minimum of 6 bits, codes of 4 bits: d scale q - dmin minimum."""
    return _scaled(fields(blocks[:, 16:], 4, 32).float(), *_scale_and_minimum(blocks))


def q5_k(blocks: Tensor) -> Tensor:
    """Decode q4_k with a fifth bit."""
    high = fields(blocks[:, 16:48], 1, 32).bitwise_left_shift_(4)
    return _scaled(
        fields(blocks[:, 48:], 4, 32).bitwise_or_(high).float(), *_scale_and_minimum(blocks)
    )


def q6_k(blocks: Tensor) -> Tensor:
    """16 groups: scale of 8 bits, codes of 4 bits and of 2 more: d scale (q - 32)."""
    high = fields(blocks[:, 128:192], 2, 32).bitwise_left_shift_(4)
    codes = fields(blocks[:, :128], 4, 64).bitwise_or_(high).sub_(32).view(torch.int8)
    return _scaled(codes.float(), half(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def iq4_xs(blocks: Tensor) -> Tensor:
    """8 groups: scale of 6 bits, codes of 4 bits: d (scale - 32) value[q]."""
    high = (
        uint16s(blocks, 2, 1) >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device) & 3
    )
    scales = fields(blocks[:, 4:8], 4, 1).to(torch.int32).bitwise_or_(high << 4).sub_(32)
    codes = fields(blocks[:, 8:], 4, 16)
    return _scaled(lookup(table(IQ4_VALUES, (-1,), blocks.device), codes), half(blocks, 0) * scales)


def _scale_and_minimum(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of 8 groups, fp32 [n, 8] each: d and dmin, then 6-bit factors in 12
    bytes.

    Bytes 0-3 hold the factors of scales 0-3 and bytes 4-7 those of minima 0-3; their upper 2 bits
    are the upper bits of factors 4-7, whose lower 4 bits share bytes 8-11.
    """
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, low & 15 | first >> 2 & 48), dim=1)
    minimum = torch.cat((second & 63, low >> 4 | second >> 2 & 48), dim=1)
    return half(blocks, 0) * scale, half(blocks, 2) * minimum


def _scaled(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """scale q - minimum, in place: fp32 [n, 256] with a scale for each of [n, groups]."""
    groups = codes.view(*scale.shape, codes.shape[1] // scale.shape[1])
    groups.mul_(scale.unsqueeze(2))
    if minimum is not None:
        groups.sub_(minimum.unsqueeze(2))
    return codes
