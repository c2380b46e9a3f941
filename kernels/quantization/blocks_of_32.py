"""Dequantization of the types with blocks of 32 or 64 values: uint8 [n, bytes] -> fp32 [n,
values].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import fields, half, int8s, lookup, table

# ggml's kvalues_iq4nl: a non-linear scale of 4-bit codes.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The values of a 4-bit float (2 bits exponent, 1 bit mantissa), doubled to be whole; the scales are
# halved in turn.
# OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _ue4m3_half(code: int) -> float:
    """Half the number that an 8-bit float without sign stands for; 0x7F, not a number, counts as
    zero as it does in ggml.
    """
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8)


UE4M3_HALVES = tuple(map(_ue4m3_half, range(256)))


def q8_0(blocks: Tensor) -> Tensor:
    """Scale d; 32 signed bytes: d q."""
    return int8s(blocks, 2, 32).float().mul_(half(blocks, 0))


def q4_0(blocks: Tensor) -> Tensor:
    """Scale d; 32 codes of 4 bits: d (q - 8)."""
    return fields(blocks[:, 2:], 4, 16).sub_(8).view(torch.int8).float().mul_(half(blocks, 0))


def q4_1(blocks: Tensor) -> Tensor:
    """Scale d, minimum m; 32 codes of 4 bits: d q + m."""
    return fields(blocks[:, 4:], 4, 16).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """Scale d; 32 fifth bits, then the lower 4: d (q - 16)."""
    return _five_bits(blocks[:, 2:]).sub_(16).view(torch.int8).float().mul_(half(blocks, 0))


def q5_1(blocks: Tensor) -> Tensor:
    """Scale d, minimum m; 32 fifth bits, then the lower 4: d q + m."""
    return _five_bits(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def iq4_nl(blocks: Tensor) -> Tensor:
    """Scale d; 32 codes of 4 bits: d value[q]."""
    return lookup(table(IQ4_VALUES, (-1,), blocks.device), fields(blocks[:, 2:], 4, 16)).mul_(
        half(blocks, 0)
    )


def mxfp4(blocks: Tensor) -> Tensor:
    """One exponent e, the scale is 2^(e - 127); 32 4-bit floats."""
    e = blocks[:, :1].to(torch.int32)
    # The bits of 2^(e - 128) as fp32, half the scale; the two smallest are subnormal.
    scale = torch.where(e < 2, (e + 1) << 21, (e - 1) << 23).view(torch.float32)
    return lookup(table(FP4_VALUES, (-1,), blocks.device), fields(blocks[:, 1:], 4, 16)).mul_(scale)


def nvfp4(blocks: Tensor) -> Tensor:
    """Four scales, 8-bit floats without sign (4 bits exponent, 3 bits mantissa); 4 times 16 4-bit
    floats.
    """
    scales = lookup(table(UE4M3_HALVES, (-1,), blocks.device), blocks[:, :4])
    values = lookup(table(FP4_VALUES, (-1,), blocks.device), fields(blocks[:, 4:], 4, 8))
    values.view(-1, 4, 16).mul_(scales.unsqueeze(2))
    return values


def _five_bits(packed: Tensor) -> Tensor:
    """4 bytes of fifth bits, bit i for value i, then 16 bytes with the lower 4 bits: [n, 20] -> [n,
    32].
    """
    high = fields(packed[:, :4], 1, 1)
    return fields(packed[:, 4:], 4, 16).bitwise_or_(high.bitwise_left_shift_(4))
