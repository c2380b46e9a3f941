"""Quantization to the types with blocks of 256 values: fp32 [n, 256] -> uint8 [n, bytes].

Each group's scale (and offset) is searched for as if it were stored in fp32. Then the block's fp16
numbers and the groups' small integers are fitted in turn: the integers to either side of each are
tried, and the block's numbers are the smallest-squares ones for codes and integers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import half_bytes, pack
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES
from mtmd.kernels.quantization.encode_32 import as_half, shares, table_divisors, whole_divisors
from mtmd.kernels.quantization.scale_search import (
    Entries,
    Grid,
    Whole,
    best_line,
    best_scale,
    inverse,
    weighted,
)

VALUES = 256


def q2_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 16, 3, 15)
    packed = (scales | minima << 4, pack(codes, 2, 32), half_bytes(d), half_bytes(dmin))
    return torch.cat(packed, 1)


def q3_k(x: Tensor, w: Tensor | None) -> Tensor:
    grid = Whole(-4, 3)
    d, scales, units = _scales(x, w, 16, grid, whole_divisors(4), 32)
    codes = grid(units).add_(4).to(torch.uint8)
    stored = scales.add(32).to(torch.uint8)
    packed = (
        pack(codes >> 2, 1, 32),
        pack(codes & 3, 2, 32),
        pack(stored & 15, 4, 8),
        pack(stored >> 4, 2, 4),
        half_bytes(d),
    )
    return torch.cat(packed, 1)


def q4_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 8, 15, 63)
    return torch.cat(
        (half_bytes(d), half_bytes(dmin), _six_bits(scales, minima), pack(codes, 4, 32)), 1
    )


def q5_k(x: Tensor, w: Tensor | None) -> Tensor:
    d, dmin, scales, minima, codes = _lines(x, w, 8, 31, 63)
    factors, high = _six_bits(scales, minima), pack(codes >> 4, 1, 32)
    return torch.cat((half_bytes(d), half_bytes(dmin), factors, high, pack(codes & 15, 4, 32)), 1)


def q6_k(x: Tensor, w: Tensor | None) -> Tensor:
    grid = Whole(-32, 31)
    d, scales, units = _scales(x, w, 16, grid, whole_divisors(32), 128)
    codes = grid(units).add_(32).to(torch.uint8)
    packed = (
        pack(codes & 15, 4, 64),
        pack(codes >> 4, 2, 32),
        scales.to(torch.int8).view(torch.uint8),
        half_bytes(d),
    )
    return torch.cat(packed, 1)


def iq4_xs(x: Tensor, w: Tensor | None) -> Tensor:
    grid = Entries(IQ4_VALUES)
    d, scales, units = _scales(x, w, 8, grid, table_divisors(), 32)
    stored = scales.add(32).to(torch.uint8)
    high = pack(stored >> 4, 2, 1)
    codes = pack(grid.codes(units), 4, 16)
    return torch.cat((half_bytes(d), high, pack(stored & 15, 4, 1), codes), 1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and minima below 64, [n, 8] each, in 12 bytes; `k_quants.py` says how."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return torch.cat((first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4), 1)


def _grouped(x: Tensor | None, groups: int) -> Tensor | None:
    """[n, 256] -> [values of a group, groups, n]"""
    return None if x is None else x.view(len(x), groups, -1).permute(2, 1, 0).contiguous()


def _flat(x: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x.permute(2, 1, 0).reshape(x.shape[2], -1)


def _scales(
    values: Tensor, weights: Tensor | None, groups: int, grid: Grid, at: Iterable[float], low: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Block scales [n], integers from -low to low - 1 for the groups [n, groups], and the values
    in units of their products [n, 256].
    """
    x, w = _grouped(values, groups), _grouped(weights, groups)
    assert x is not None
    best = best_scale(x, w, grid, at)
    lowest, highest = best.amin(0), best.amax(0)
    extreme = torch.where(highest > -lowest, highest, lowest)
    d = as_half(extreme / -low)
    ints = (best * inverse(d)).round_().clamp_(-low, low - 1)
    ints = _tried(x, w, grid, d, ints, low)
    q = grid(x * inverse(d * ints)) * ints
    d = as_half((weighted(q, w) * x).sum((0, 1)) * inverse((weighted(q, w) * q).sum((0, 1))))
    return d, ints.t(), _flat(x * inverse(d * ints))


def _tried(x: Tensor, w: Tensor | None, grid: Grid, d: Tensor, ints: Tensor, low: int) -> Tensor:
    """The integers, or those beside them, with the smallest error: [groups, n]."""
    best, smallest = ints, torch.full_like(ints, torch.inf)
    for step in (0, -1, 1):
        tried = (ints + step).clamp_(-low, low - 1)
        scale = d * tried
        error = weighted((grid(x * inverse(scale)) * scale).sub_(x).square_(), w).sum(0)
        better = error < smallest
        best, smallest = torch.where(better, tried, best), torch.where(better, error, smallest)
    return best


def _lines(
    values: Tensor, weights: Tensor | None, groups: int, highest: int, limit: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d and dmin [n]; integers up to `limit` for the scales and minima of the groups, uint8
    [n, groups] each; codes, uint8 [n, 256].
    """
    x, w = _grouped(values, groups), _grouped(weights, groups)
    assert x is not None
    grid = Whole(0, highest)
    scale, offset = best_line(x, w, highest, shares(highest, weights), refined=2, below_zero=True)
    d, dmin = as_half(scale.amax(0) / limit), as_half(offset.amin(0) / -limit)
    scales = (scale * inverse(d)).round_().clamp_(0, limit)
    minima = (offset * -inverse(dmin)).round_().clamp_(0, limit)
    scales, minima = _tried_lines(x, w, grid, d, dmin, scales, minima, limit)
    # The smallest-squares d and dmin of x = d (scale q) - dmin minimum.
    a = grid((x + dmin * minima) * inverse(d * scales)).mul_(scales)
    aw = weighted(a, w)
    ones = torch.full_like(minima, len(x)) if w is None else w.sum(0)
    aa, ab, bb = (aw * a).sum((0, 1)), (aw.sum(0) * minima).sum(0), (ones * minima**2).sum(0)
    ax, bx = (aw * x).sum((0, 1)), (weighted(x, w).sum(0) * minima).sum(0)
    by = inverse(aa * bb - ab * ab)
    fitted, other = (ax * bb - bx * ab) * by, (ax * ab - bx * aa) * by
    usable = (by != 0) & (fitted > 0) & (other >= 0)
    d, dmin = as_half(torch.where(usable, fitted, d)), as_half(torch.where(usable, other, dmin))
    codes = grid((x + dmin * minima) * inverse(d * scales))
    return (
        d,
        dmin,
        scales.t().to(torch.uint8),
        minima.t().to(torch.uint8),
        _flat(codes).to(torch.uint8),
    )


def _tried_lines(
    x: Tensor,
    w: Tensor | None,
    grid: Grid,
    d: Tensor,
    dmin: Tensor,
    scales: Tensor,
    minima: Tensor,
    limit: int,
) -> tuple[Tensor, Tensor]:
    """The integers for scales and minima, or those beside them, with the smallest error."""
    best, smallest = (scales, minima), torch.full_like(scales, torch.inf)
    for up in (0, -1, 1):
        for more in (0, -1, 1):
            s, m = (scales + up).clamp_(0, limit), (minima + more).clamp_(0, limit)
            scale, start = d * s, dmin * m
            moved = x + start
            error = weighted(grid(moved * inverse(scale)).mul_(scale).sub_(moved).square_(), w).sum(
                0
            )
            better = error < smallest
            best = torch.where(better, s, best[0]), torch.where(better, m, best[1])
            smallest = torch.where(better, error, smallest)
    return best
