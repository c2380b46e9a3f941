"""Resampling: the one way in which samples come to a model's rate.

Band-limited interpolation (Julius O. Smith, "Digital Audio Resampling", ccrma.stanford.edu/~jos/
resample): each new sample is a sum over `ZEROS` zero crossings on either side of a sinc under a
Kaiser window, whose pass band ends at `ROLLOFF` of the lower of both Nyquist frequencies. The
constants are those of resampy's filter `kaiser_best`. Beyond both ends there is silence. A rate
that is a multiple is reached exactly; where the ratio is no small fraction, it is the nearest of
about `TAPS_MAX` taps: those of rates near 44,101 are off by less than a millionth, of rates that
nearly are the other one, such as 16,001 for 16,000, by less than four parts in ten thousand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import ceil, isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtmd.clip.audio.audio import Samples

ZEROS, ROLLOFF, BETA = 64, 0.9475937167399596, 14.769656459379492
TAPS_MAX = 1 << 22  # numbers of one filter
GROUPS = 256  # of new samples that are computed together
COLUMNS = (
    16  # new samples of a group at least: a product with fewer columns takes ten times as long
)
ROWS_OF = 1 << 16  # numbers of a filter that are computed together


def resampled(blocks: Iterable[Samples], rate: int, target: int) -> Iterator[Samples]:
    """Samples [N] at `rate` a second as ceil(N target / rate) samples at `target`, block by block:
    never more than a few blocks are in memory.
    """
    if rate == target:
        yield from blocks
        return
    step = _ratio(rate, target)
    several = ceil(COLUMNS / step.denominator)
    old, new = several * step.numerator, several * step.denominator
    taps, width = _filter(old, new)
    rest = np.zeros(width, np.float32)  # what comes before the first
    count = 0
    for block in blocks:
        count += len(block)
        rest = np.concatenate((rest, block))
        groups = (len(rest) - 2 * width - old) // old + 1
        if groups > 0:
            yield from _groups(rest, taps, old, groups)
            rest = rest[groups * old :]
    made = (count + width - len(rest)) // old  # groups
    left = resampled_count(count, rate, target) - made * new
    if left > 0:
        groups = -(-left // new)
        end = np.zeros(max(0, (groups - 1) * old + len(taps) - len(rest)), np.float32)
        whole = np.concatenate([*_groups(np.concatenate((rest, end)), taps, old, groups)])
        yield whole[:left]


def resampled_count(count: int, rate: int, target: int) -> int:
    """Return how many samples `count` of them become."""
    return count if rate == target else ceil(Fraction(count) / _ratio(rate, target))


def _groups(samples: Samples, taps: Samples, old: int, groups: int) -> Iterator[Samples]:
    """New samples of so many groups: `taps` [K, new] at every `old` samples.

    By torch where it is loaded, whose threads are those that the process was given: numpy's wait
    for each other in a loop, and take ten times as long on a busy machine. Workers that decode
    files have no torch, which takes seconds to load, and one thread of numpy's.
    """
    windows: Any = np.lib.stride_tricks.sliding_window_view(samples, len(taps))[::old]
    weights: Any = taps
    if (torch := sys.modules.get("torch")) is not None:
        windows = torch.from_numpy(samples).unfold(0, len(taps), old)
        weights = torch.from_numpy(taps)
    for start in range(0, groups, GROUPS):
        made: Samples = np.asarray(windows[start : min(start + GROUPS, groups)] @ weights)
        yield made.flatten()


def _ratio(rate: int, target: int) -> Fraction:
    """Old samples for new ones."""
    exact = Fraction(rate, target)
    maximum = max(1, isqrt(TAPS_MAX * target // (rate + target)))
    return exact.limit_denominator(maximum)


@lru_cache(maxsize=8)
def _filter(old: int, new: int) -> tuple[Samples, int]:
    """Taps [K, new] over `old` samples and `width` on either side: column i makes new sample i."""
    cutoff = ROLLOFF * min(old, new) / old  # of the old Nyquist frequency
    width = ceil(ZEROS / cutoff)
    at = np.arange(-width, old + width, dtype=np.float64)[:, None]
    result = np.empty((len(at), new), np.float32)
    rows = max(1, ROWS_OF // new)
    for start in range(0, len(at), rows):
        distance: NDArray[np.float64] = (
            at[start : start + rows] - np.arange(new) * (old / new)
        ) * cutoff
        window = np.where(np.abs(distance) < ZEROS, np.i0(BETA * _arc(distance)) / np.i0(BETA), 0.0)
        result[start : start + rows] = np.sinc(distance) * window * cutoff
    return result, width


def _arc(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    root: NDArray[np.float64] = np.sqrt(np.maximum(0.0, 1 - (distance / ZEROS) ** 2))
    return root
