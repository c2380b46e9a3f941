"""Block types of our own, for quantized safetensors that fit none of GGUF's types exactly: decoded,
and packed from codes and scales.

Files of those formats keep scales in tensors beside the codes. Here they lie inside the blocks, as
GGUF has them, so that a row can be cut, moved and multiplied without its neighbours. A header word
holds a scale (the fp32 number whose lower 8 bits are zero: a relative error of at most 2^-17, none
for fp16 and bf16 scales) and in those 8 bits the zero point. All numbers are little endian.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import fields, half, int32s, lookup, table
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, UE4M3_HALVES

# Quantiles of the normal distribution (Dettmers et al. 2023, QLoRA, appendix E), as bitsandbytes
# rounds them.
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# The 4-bit floats of bitsandbytes, whose exponent differs from that of FP4_VALUES.
_BNB_FP4 = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
BNB_FP4_VALUES = (*_BNB_FP4, *(-value for value in _BNB_FP4))


def u4(blocks: Tensor) -> Tensor:
    """Header; codes of 4 bits: scale (q - zero). U4_32 and U4_64."""
    return _affine(fields(blocks[:, 4:], 4, 16), blocks)


def u8_64(blocks: Tensor) -> Tensor:
    """Header; codes of 8 bits: scale (q - zero)."""
    return _affine(blocks[:, 4:], blocks)


def f8_64(blocks: Tensor) -> Tensor:
    """Header with zero 0; 8-bit floats (4 bits exponent, 3 bits mantissa): scale q."""
    return blocks[:, 4:].view(torch.float8_e4m3fn).float().mul_(_scale(blocks))


def nf4_64(blocks: Tensor) -> Tensor:
    """Header with zero 0; codes of 4 bits: scale NF4_VALUES[q]."""
    return _looked_up(blocks, NF4_VALUES)


def fp4_64(blocks: Tensor) -> Tensor:
    """Header with zero 0; codes of 4 bits: scale BNB_FP4_VALUES[q]."""
    return _looked_up(blocks, BNB_FP4_VALUES)


def nv4_128(blocks: Tensor) -> Tensor:
    """An fp32 scale; 8 scales, 8-bit floats without sign; 8 times 16 4-bit floats, as NVFP4 has
    them: global (scale q).
    """
    scales = lookup(table(UE4M3_HALVES, (-1,), blocks.device), blocks[:, 4:12])
    values = lookup(table(FP4_VALUES, (-1,), blocks.device), fields(blocks[:, 12:], 4, 8))
    values.view(-1, 8, 16).mul_(scales.mul_(_word(blocks).view(torch.float32)).unsqueeze(2))
    return values


def a4_64(blocks: Tensor) -> Tensor:
    """Scale d and bias m, fp16; codes of 4 bits: d q + m."""
    return fields(blocks[:, 4:], 4, 16).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def a8_32(blocks: Tensor) -> Tensor:
    """Scale d and bias m, fp16; codes of 8 bits: d q + m."""
    return blocks[:, 4:].float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def bf16_32(blocks: Tensor) -> Tensor:
    """Numbers of 16 bits, bfloat16."""
    return _as_numbers(blocks, torch.bfloat16)


def f16_32(blocks: Tensor) -> Tensor:
    """Numbers of 16 bits, IEEE halves."""
    return _as_numbers(blocks, torch.float16)


def header(scales: Tensor, zeros: Tensor | int = 0) -> Tensor:
    """Header words: finite scales [..., blocks], zeros 0..255 of the same shape -> uint8 [...,
    blocks, 4].
    """
    bits = scales.float().view(torch.int32)
    # Rounded half up; the largest numbers would round to infinity, so they are cut.
    rounded = torch.where(bits & 0x7FFFFFFF < 0x7F7FFF80, bits + 128, bits) & ~255
    return _as_bytes((rounded | zeros).to(torch.int32))


def floats(*numbers: Tensor) -> Tensor:
    """Numbers [..., blocks] of one dtype, side by side as bytes: uint8 [..., blocks, bytes of
    all].
    """
    return torch.cat([_as_bytes(number) for number in numbers], dim=-1)


def nibbles(codes: Tensor, group: int = 16) -> Tensor:
    """Codes 0..15, uint8 [..., values], two to a byte: of every 2 `group` values the first half in
    the lower bits, the other half in the upper bits. [..., values / 2].
    """
    # Eight at a time: a code has four bits, so none reaches into its neighbour.
    pairs = codes.contiguous().view(torch.int64).unflatten(-1, (-1, 2, group // 8))
    packed: Tensor = (pairs[..., 1, :] << 4).bitwise_or_(pairs[..., 0, :])
    return packed.flatten(-2).view(torch.uint8)


def rows(heads: Tensor, codes: Tensor) -> Tensor:
    """Blocks of heads, uint8 [..., blocks, bytes], and codes, uint8 [..., bytes of all blocks]:
    uint8 [..., row_bytes].
    """
    count, size = heads.shape[-2:]
    width = codes.shape[-1] // count
    out = codes.new_empty((*codes.shape[:-1], count, size + width))
    out[..., :size] = heads
    out[..., size:] = codes.unflatten(-1, (count, width))
    return out.flatten(-2)


def _affine(codes: Tensor, blocks: Tensor) -> Tensor:
    zero = (_word(blocks) & 255).float()
    return codes.float().sub_(zero).mul_(_scale(blocks))


def _looked_up(blocks: Tensor, values: tuple[float, ...]) -> Tensor:
    codes = fields(blocks[:, 4:], 4, 16)
    return lookup(table(values, (-1,), blocks.device), codes).mul_(_scale(blocks))


def _word(blocks: Tensor) -> Tensor:
    return int32s(blocks, 0, 1)


def _scale(blocks: Tensor) -> Tensor:
    return (_word(blocks) & ~255).view(torch.float32)


def _as_numbers(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = blocks.clone() if blocks.storage_offset() % dtype.itemsize else blocks
    return aligned.view(dtype).float()


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().unsqueeze(-1).view(torch.uint8)
