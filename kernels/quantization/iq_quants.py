"""Dequantization of the types whose codes choose a row of a grid: uint8 [n, bytes] -> fp32 [n,
256].

The grids hold 4 or 8 magnitudes a row; signs are stored apart, a bit for each value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization import iq_grids
from mtmd.kernels.quantization.bits import fields, grid, half, int32s, lookup, table, uint16s

IQ2_VALUES, IQ1_VALUES = (8, 25, 43), (-1, 0, 1)
IQ3_XXS_VALUES, IQ3_S_VALUES = (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_SHIFT = 0.125

# The signs that 7 bits stand for, 8 for each of 128 codes: the eighth makes the number of negative
# ones even.
_SEVEN_BIT_SIGNS = tuple(
    -1 if (code | code.bit_count() % 2 << 7) >> location & 1 else 1
    for code in range(128)
    for location in range(8)
)


def iq2_xxs(blocks: Tensor) -> Tensor:
    """8 groups of 32: four bytes of codes, then a word with four times 7 bits of signs and a scale
    of 4 bits.
    """
    words = int32s(blocks, 2, 16).view(-1, 8, 2)
    codes, word = words[:, :, 0].contiguous().view(torch.uint8), words[:, :, 1]
    scale = _times(half(blocks, 0), word >> 28 & 15, 0.25)
    return _signed(
        lookup(grid(iq_grids.IQ2_XXS, IQ2_VALUES, 8, blocks.device), codes),
        _packed_signs(word),
        scale,
    )


def iq2_xs(blocks: Tensor) -> Tensor:
    """16 groups of 16, each with a scale of 4 bits: codes of 9 bits with 7 bits of signs."""
    words = uint16s(blocks, 2, 32)
    scale = _times(half(blocks, 0), fields(blocks[:, 66:], 4, 1), 0.25)
    signs = lookup(table(_SEVEN_BIT_SIGNS, (-1, 8), blocks.device), words >> 9)
    return _signed(
        lookup(grid(iq_grids.IQ2_XS, IQ2_VALUES, 8, blocks.device), words & 511), signs, scale
    )


def iq2_s(blocks: Tensor) -> Tensor:
    """16 groups of 16, each with a scale of 4 bits: codes of 8 bits and 2 more, 8 bits of signs."""
    codes = blocks[:, 2:34].to(torch.int32) | fields(blocks[:, 66:74], 2, 1).to(torch.int32) << 8
    scale = _times(half(blocks, 0), fields(blocks[:, 74:], 4, 1), 0.25)
    return _signed(
        lookup(grid(iq_grids.IQ2_S, IQ2_VALUES, 8, blocks.device), codes),
        _sign_bits(blocks[:, 34:66]),
        scale,
    )


def iq3_xxs(blocks: Tensor) -> Tensor:
    """8 groups of 32: codes of 8 bits for 4 values each; a word with four times 7 bits of signs and
    a scale of 4 bits.
    """
    word = int32s(blocks, 66, 8)
    scale = _times(half(blocks, 0), word >> 28 & 15, 0.5)
    return _signed(
        lookup(grid(iq_grids.IQ3_XXS, IQ3_XXS_VALUES, 4, blocks.device), blocks[:, 2:66]),
        _packed_signs(word),
        scale,
    )


def iq3_s(blocks: Tensor) -> Tensor:
    """8 groups of 32, each with a scale of 4 bits: codes of 8 bits and 1 more for 4 values each,
    signs.
    """
    codes = blocks[:, 2:66].to(torch.int32) | fields(blocks[:, 66:74], 1, 1).to(torch.int32) << 8
    scale = half(blocks, 0) * (fields(blocks[:, 106:], 4, 1) * 2 + 1)
    return _signed(
        lookup(grid(iq_grids.IQ3_S, IQ3_S_VALUES, 4, blocks.device), codes),
        _sign_bits(blocks[:, 74:106]),
        scale,
    )


def iq1_s(blocks: Tensor) -> Tensor:
    """8 groups of 32: codes of 8 bits and 3 more for 8 values each; a word has those, a scale of 3
    bits and the sign of a shift.
    """
    word = uint16s(blocks, 34, 8)
    high = word.unsqueeze(2) >> torch.arange(0, 12, 3, dtype=torch.int32, device=blocks.device) & 7
    rows = lookup(
        grid(iq_grids.IQ1, IQ1_VALUES, 8, blocks.device),
        blocks[:, 2:34].to(torch.int32) | high.view(-1, 32) << 8,
    )
    scale = half(blocks, 0) * ((word >> 12 & 7) * 2 + 1)
    rows.view(-1, 8, 32).add_(_shift(word & 0x8000).unsqueeze(2)).mul_(scale.unsqueeze(2))
    return rows.view(-1, 256)


def iq1_m(blocks: Tensor) -> Tensor:
    """16 groups of 16: codes of 8 bits and 3 more for 8 values each, with the sign of a shift;
    scales of 3 bits.

    The 4 words of scales keep the fp16 scale of the block, cut into 4 parts, in their upper bits.
    """
    words = uint16s(blocks, 48, 4)
    d = (
        words[:, :1] >> 12
        | words[:, 1:2] >> 8 & 0xF0
        | words[:, 2:3] >> 4 & 0xF00
        | words[:, 3:] & 0xF000
    )
    scale = (
        words.unsqueeze(2) >> torch.arange(0, 12, 3, dtype=torch.int32, device=blocks.device) & 7
    )
    scale = d.to(torch.int16).view(torch.float16).float() * (scale.view(-1, 16) * 2 + 1)
    high = fields(blocks[:, 32:48], 4, 1).to(torch.int32)
    rows = lookup(
        grid(iq_grids.IQ1, IQ1_VALUES, 8, blocks.device),
        blocks[:, :32].to(torch.int32) | (high & 7) << 8,
    )
    rows.add_(_shift(high & 8).unsqueeze(2))
    rows.view(-1, 16, 16).mul_(scale.unsqueeze(2))
    return rows.view(-1, 256)


def _times(d: Tensor, scale: Tensor, factor: float) -> Tensor:
    """d (scale + 1/2) factor, rounded in this order."""
    return d * scale.float().add_(0.5) * factor


def _signed(rows: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """scale · magnitude · sign: rows and signs of 256 values a block each, scale [n, groups] -> [n,
    256].
    """
    values = rows.view(*scale.shape, -1).mul_(scale.unsqueeze(2))
    return values.view(signs.shape).mul_(signs).view(-1, 256)


def _shift(negative: Tensor) -> Tensor:
    """The number that is added to the grid's, less where a bit is set."""
    return torch.where(negative == 0, _IQ1_SHIFT, -_IQ1_SHIFT)


def _sign_bits(packed: Tensor) -> Tensor:
    """A bit for each value, set where it is negative: [n, m] -> ±1, fp32 [n, m * 8]."""
    return fields(packed, 1, 1).float().mul_(-2).add_(1)


def _packed_signs(word: Tensor) -> Tensor:
    """Four times 7 bits of signs, low bits first, for 8 values each: int32 [n, groups] -> ±1, fp32
    [n, groups, 4, 8].
    """
    index = word.unsqueeze(2) >> torch.arange(0, 28, 7, dtype=torch.int32, device=word.device) & 127
    return lookup(table(_SEVEN_BIT_SIGNS, (-1, 8), word.device), index)
