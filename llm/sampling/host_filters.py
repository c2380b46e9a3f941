"""Describes which tokens may be drawn, how likely each is, and one of them by a random number. In
numpy, of one row: some ten calls, each of which goes over the vocabulary once; none of them sorts
it.

The filters and their order are those of transformers' logits processors: temperature, top-k, top-p
(Holtzman et al. 2019, "The curious case of neural text degeneration"), min-p (Nguyen et al. 2024,
arXiv 2407.01082).
"""

from __future__ import annotations

import math

import numpy as np

from mtmd.llm.sampling.options import Sampling

ROWS = 32  # of which the largest value is looked at in place of all
HEADS = (64, 1024)  # tokens among which the most probable ones are looked for first
BLOCK = 256  # weights that are summed before one of them is looked for
_LOWEST = float(np.finfo(np.float32).min)  # above -inf
_MINIMUM = float(np.finfo(np.float32).smallest_subnormal)  # above 0


def candidates(
    logits: np.ndarray, sampling: Sampling, out: np.ndarray | None = None
) -> tuple[np.ndarray | None, np.ndarray]:
    """The tokens [N] that may be drawn, in order, None for all, and how likely each is [N], fp32,
    with 1 for the best; from fp32 `logits` [V] with a finite maximum and a temperature above 0.
    `out` [V]: fp32 memory that may be written to, also the logits' own.

    Every filter keeps at least the best token.
    """
    peak, size, temperature = logits.max(), len(logits), np.float32(sampling.temperature)
    tokens: np.ndarray | None = None
    with np.errstate(over="ignore"):  # what becomes -inf has no chance
        if 0 < sampling.top_k < size:
            tokens = _top(logits, sampling.top_k)
        elif sampling.top_p == 1 and sampling.min_p > 0:
            # What is far below is not likely enough; how likely the others are is computed exactly.
            slack = 1e-3 * sampling.temperature + 1e-5 * abs(float(peak))
            bound = float(peak) + sampling.temperature * math.log(sampling.min_p) - slack
            tokens = np.flatnonzero(logits >= np.float32(bound))
        saved = logits if tokens is None else logits[tokens]
        # Softmax does not change under a shift; with the best logit at 0 a small temperature cannot
        # overflow.
        weights = np.subtract(saved, peak, out=out if tokens is None else saved)
        if temperature != 1:
            weights /= temperature
    np.exp(weights, out=weights)
    for keep in (_nucleus, _likely):
        index = keep(weights, sampling)
        if index is not None:
            tokens = index if tokens is None else tokens[index]
            weights = weights[index]
    return tokens, weights


def pick(weights: np.ndarray, point: float) -> int:
    """Return which of `weights` [N] the number `point` in [0, 1) stands for: inverse of the
    cumulated sum. One without weight never.
    """
    blocks = len(weights) // BLOCK
    if blocks <= 4:
        edges = np.cumsum(weights, dtype=np.float64)
        return _location(edges, point * edges[-1])
    sums = weights[: blocks * BLOCK].reshape(blocks, BLOCK).sum(1)
    edges = np.cumsum(np.append(sums, weights[blocks * BLOCK :].sum()), dtype=np.float64)
    goal = point * edges[-1]
    block = _location(edges, goal)
    start, before = block * BLOCK, edges[block - 1] if block else 0.0
    inner = np.cumsum(weights[start : start + BLOCK], dtype=np.float64)
    return start + _location(inner, goal - before)


def _location(edges: np.ndarray, goal: float) -> int:
    """The first above `goal`, or, where rounding has left none, the first of the highest."""
    return int(np.searchsorted(edges, min(goal, np.nextafter(edges[-1], 0)), "right"))


def _top(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest, in order, without -inf; those equal to the last of them stay,
    as in transformers.
    """
    locations = np.flatnonzero(values >= max(_floor(values, count), _LOWEST))
    if len(locations) <= count:
        return locations
    match = values[locations]
    result: np.ndarray = locations[match >= np.partition(match, len(match) - count)[-count]]
    return result


def _floor(values: np.ndarray, count: int) -> float:
    """Return what at least `count` values reach, and not many more; -inf where to find it would not
    be worth it. Of the largest of each column of some table, the one that so many columns reach.
    """
    columns = len(values) // ROWS
    if columns < 2 * count:
        return -math.inf
    peaks = values[: columns * ROWS].reshape(ROWS, columns).max(0)
    return float(np.partition(peaks, columns - count)[columns - count])


def _nucleus(weights: np.ndarray, sampling: Sampling) -> np.ndarray | None:
    """Places of the fewest that have `top_p` of all, in order; of equals the first. The sum from
    below says how much of the tail may go.
    """
    if sampling.top_p == 1:
        return None
    total, spare = float(weights.sum()), np.float32(1 - sampling.top_p)
    for count in (*HEADS, len(weights)):
        locations = np.flatnonzero(weights >= max(_floor(weights, count), _MINIMUM))
        part = weights[locations]
        rest = max(total - float(part.sum()), 0.0)
        if np.float32(rest / total) <= spare:  # all that are not among them go
            break
    ascending = np.sort(part)
    sums = (rest + np.cumsum(ascending, dtype=np.float64)) / total
    gone = min(int(np.count_nonzero(sums.astype(np.float32) <= spare)), len(part) - 1)
    minimum = ascending[gone]
    keep = part > minimum
    equals = np.flatnonzero(part == minimum)
    keep[equals[: len(part) - gone - np.count_nonzero(keep)]] = True
    result: np.ndarray = locations[keep]
    return result


def _likely(weights: np.ndarray, sampling: Sampling) -> np.ndarray | None:
    """Places of those that have at least `min_p` of the best one's share."""
    if sampling.min_p == 0:
        return None
    return np.flatnonzero(weights >= np.float32(sampling.min_p) * weights.max())
