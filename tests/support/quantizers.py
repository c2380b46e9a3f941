"""Quantizers by torch's operators, step by step: what those in machine code are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtmd.kernels.quantization.bits import half_bytes, pack
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES

Grid = Callable[[Tensor], Tensor]
"""Numbers in units of the scale to the nearest that a code stands for, in place."""


@dataclass(frozen=True)
class Whole:
    """The whole numbers from `low` to `high`."""

    low: int
    high: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(self.low, self.high)


@dataclass(frozen=True)
class Entries:
    """The entries of a table of whole numbers, at most 127 from zero."""

    values: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return _nearest(self.values)[0].index_select(0, self._cells(x)).view(x.shape)

    def codes(self, x: Tensor) -> Tensor:
        """The places of the nearest in the table, uint8."""
        return _nearest(self.values)[1].index_select(0, self._cells(x)).view(x.shape)

    def _cells(self, x: Tensor) -> Tensor:
        return x.mul(2).floor_().clamp_(-256, 255).add_(256).to(torch.int32).view(-1)


@lru_cache(maxsize=4)
def _nearest(values: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The nearest entry and its place for each cell of half a unit: two whole numbers have their
    middle at the border of two cells.
    """
    middles = torch.arange(-256, 256).double().div(2).add(0.25)
    with torch.inference_mode(False):
        table = torch.tensor(values, dtype=torch.float64)
        at = (middles[:, None] - table).abs().argmin(1)
        return table[at].float(), at.to(torch.uint8)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def weighted(x: Tensor, w: Tensor | None) -> Tensor:
    return x if w is None else x * w


def best_scale(
    x: Tensor, w: Tensor | None, grid: Grid, divisors: Iterable[float], *, refined: int = 1
) -> Tensor:
    """The scale with which `grid` is closest to x: [G, ...] -> [...].

    Each divisor suggests the number of largest magnitude divided by it. Of the numbers on the grid
    that a suggestion gives, the least-squares scale is taken, and is `refined` so many times more.
    """
    xw = weighted(x, w)
    low, high = x.amin(0), x.amax(0)
    extreme = torch.where(high > -low, high, low)
    best, gain = torch.zeros_like(extreme), torch.zeros_like(extreme)

    def consider(scale: Tensor) -> None:
        q = grid(x * inverse(scale))
        product = (xw * q).sum(0)
        square = weighted(q, w).mul(q).sum(0)
        result = product * product * inverse(square)
        better = result > gain
        best.copy_(torch.where(better, product * inverse(square), best))
        gain.copy_(torch.where(better, result, gain))

    for divisor in divisors:
        consider(extreme / divisor)
    for _ in range(refined):
        consider(best.clone())
    return best


def best_line(
    x: Tensor,
    w: Tensor | None,
    highest: int,
    shares: Iterable[tuple[float, float]],
    *,
    refined: int = 1,
    below_zero: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scale and offset with which scale q + offset, q from 0 to `highest`, is closest to x:
    [G, ...] -> [...] each.

    Each pair of shares suggests a range that begins and ends so far into that of x. `below_zero`:
    the offset is no more than 0.
    """
    xw = weighted(x, w)
    weight = torch.full_like(x[0], len(x)) if w is None else w.sum(0)
    total = xw.sum(0)
    low, high = x.amin(0), x.amax(0)
    if below_zero:
        low = low.clamp(max=0)
    scale, offset = torch.zeros_like(low), low.clone() if not below_zero else low * 0
    gain = torch.full_like(low, -torch.inf)
    grid = Whole(0, highest)

    def consider(step: Tensor, start: Tensor) -> None:
        q = grid((x - start) * inverse(step))
        qw = weighted(q, w)
        product, square, codes = (xw * q).sum(0), (qw * q).sum(0), qw.sum(0)
        by = inverse(weight * square - codes * codes)
        slope = (weight * product - total * codes) * by
        at = (square * total - codes * product) * by
        if below_zero:
            through_zero = (at > 0) | (by == 0)
            slope = torch.where(through_zero, product * inverse(square), slope)
            at = torch.where(through_zero, 0.0, at)
        else:
            at = torch.where(by == 0, total * inverse(weight), at)
        # How much of the weighted sum of squares the line explains.
        result = slope * product + at * total
        better = (result > gain) & (slope >= 0)
        scale.copy_(torch.where(better, slope, scale))
        offset.copy_(torch.where(better, at, offset))
        gain.copy_(torch.where(better, result, gain))

    for first, last in shares:
        start = torch.lerp(low, high, first)
        if below_zero:
            start.clamp_(max=0)
        consider((torch.lerp(low, high, last) - start) / highest, start)
    for _ in range(refined):
        consider(scale.clone(), offset.clone())
    return scale, offset


HALF_MAX = 65504.0
# Shares of a line's range that are cut off at its ends, by the highest code; chosen by the errors
# of normal values. Numbers at the ends may count little where weights differ: so the last share.
_CUTS = {3: (0, 0.12, 0.24, 0.32), 15: (0, 0.04, 0.08, 0.14), 31: (-0.02, 0.005, 0.03, 0.07)}


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


ENCODERS = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "IQ4_NL": iq4_nl,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_XS": iq4_xs,
}
