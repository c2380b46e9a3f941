"""Quantization to the types with blocks of 32 or 64 values: fp32 [n, values] -> uint8 [n,
bytes].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import half_bytes, pack
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import header
from mtmd.kernels.quantization.scale_search import (
    Entries,
    Whole,
    best_line,
    best_scale,
    inverse,
    weighted,
)

HALF_MAX = 65504.0
# Shares of a line's range that are cut off at its ends, by the highest code; chosen by the errors
# of normal values. Numbers at the ends may count little where weights differ: so the last share.
_CUTS = {3: (0, 0.12, 0.24, 0.32), 15: (0, 0.04, 0.08, 0.14), 31: (-0.02, 0.005, 0.03, 0.07)}
E4M3_MAX = 448.0
MXFP4_BIAS = 128  # of the exponent, for tables of doubled values


def shares(highest: int, w: Tensor | None) -> list[tuple[float, float]]:
    """Ranges to try, as `best_line` takes them, for codes up to `highest`."""
    cuts = _CUTS[highest][: None if w is not None else -1]
    return [(low, 1 - high) for low in cuts for high in cuts]


def as_half(x: Tensor) -> Tensor:
    """The fp16 numbers that will be stored, as fp32."""
    return x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16).float()


def q8_0(x: Tensor, w: Tensor | None) -> Tensor:
    scale = as_half(best_scale(*_turned(x, w), Whole(-127, 127), (127.0, 127.4)))
    codes = Whole(-127, 127)(x * inverse(scale)[:, None]).to(torch.int8)
    return torch.cat((half_bytes(scale), codes.view(torch.uint8)), 1)


def q4_0(x: Tensor, w: Tensor | None) -> Tensor:
    scale, codes = _around_zero(x, w, 8)
    return torch.cat((half_bytes(scale), pack(codes, 4, 16)), 1)


def q5_0(x: Tensor, w: Tensor | None) -> Tensor:
    scale, codes = _around_zero(x, w, 16)
    return torch.cat((half_bytes(scale), _five_bits(codes)), 1)


def q4_1(x: Tensor, w: Tensor | None) -> Tensor:
    scale, offset, codes = _line(x, w, 15)
    return torch.cat((half_bytes(scale), half_bytes(offset), pack(codes, 4, 16)), 1)


def q5_1(x: Tensor, w: Tensor | None) -> Tensor:
    scale, offset, codes = _line(x, w, 31)
    return torch.cat((half_bytes(scale), half_bytes(offset), _five_bits(codes)), 1)


def iq4_nl(x: Tensor, w: Tensor | None) -> Tensor:
    grid = Entries(IQ4_VALUES)
    scale = as_half(best_scale(*_turned(x, w), grid, table_divisors(), refined=2))
    codes = grid.codes(x * inverse(scale)[:, None])
    return torch.cat((half_bytes(scale), pack(codes, 4, 16)), 1)


def mxfp4(x: Tensor, w: Tensor | None) -> Tensor:
    """Take the power of two with the smallest error, of those with which the largest number is
    within the table or not far beyond it.
    """
    grid = Entries(FP4_VALUES)
    exponent = torch.frexp(x.abs().amax(1))[1]  # the largest is below 2^exponent
    best, lowest = torch.zeros_like(exponent), torch.full_like(x[:, 0], torch.inf)
    for lower in (4, 3, 2):
        e = (exponent - lower).clamp(-MXFP4_BIAS + 1, 254 - MXFP4_BIAS)
        scale = torch.ldexp(torch.ones_like(lowest), e)[:, None]
        error = weighted((grid(x / scale) * scale - x).square_(), w).sum(1)
        better = error < lowest
        best, lowest = torch.where(better, e, best), torch.where(better, error, lowest)
    codes = grid.codes(x / torch.ldexp(torch.ones_like(lowest), best)[:, None])
    return torch.cat(((best + MXFP4_BIAS).to(torch.uint8)[:, None], pack(codes, 4, 16)), 1)


def f8_64(x: Tensor, w: Tensor | None) -> Tensor:  # noqa: ARG001
    """The largest number becomes the largest there is; floats gain nothing by a search."""
    head = header(x.abs().amax(1) / E4M3_MAX)
    scale = (head.view(torch.int32) & ~255).view(torch.float32)
    codes = (x * inverse(scale)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat((head, codes.view(torch.uint8)), 1)


def table_divisors() -> tuple[float, ...]:
    """Return where the largest number may lie on IQ4's table, which reaches from -127 to 113."""
    return -139.0, -127.0, -117.0, -107.0, -97.0, 85.0, 95.0, 105.0, 113.0


def whole_divisors(low: int) -> list[float]:
    """Return where the largest number may lie among the whole numbers from -low to low - 1."""
    return [sign * (low - back / 2) for sign in (-1, 1) for back in range(-1, 4)]


def _around_zero(x: Tensor, w: Tensor | None, low: int) -> tuple[Tensor, Tensor]:
    """Scales [n], and codes from 0 whose `low` is zero."""
    grid = Whole(-low, low - 1)
    scale = as_half(best_scale(*_turned(x, w), grid, whole_divisors(low), refined=2))
    return scale, grid(x * inverse(scale)[:, None]).add_(low).to(torch.uint8)


def _line(x: Tensor, w: Tensor | None, highest: int) -> tuple[Tensor, Tensor, Tensor]:
    scale, offset = map(as_half, best_line(*_turned(x, w), highest, shares(highest, w), refined=3))
    codes = Whole(0, highest)((x - offset[:, None]) * inverse(scale)[:, None])
    return scale, offset, codes.to(torch.uint8)


def _turned(x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x.t().contiguous(), None if w is None else w.t().contiguous()


def _five_bits(codes: Tensor) -> Tensor:
    """Bit i of 4 bytes is the fifth of value i; then 16 bytes with the lower 4 bits: [n, 20]."""
    return torch.cat((pack(codes >> 4, 1, 1), pack(codes & 15, 4, 16)), 1)
