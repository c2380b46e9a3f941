"""Search for the scales with which small integers, or the entries of a table, come closest to given
numbers: weighted least squares.

Numbers are fp32 [G, ...]: the G numbers that share a scale lie along the first axis, so that sums
over them run over whole vectors. Weights have the same shape, or are None where all count equally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

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
