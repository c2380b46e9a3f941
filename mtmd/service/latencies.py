"""Describes how long those who ask wait, as histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PAUSES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


class Histogram:
    """`bounds`: upper ones, in seconds. One thread adds, any may read."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.total_s = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    @classmethod
    def of(cls, bounds: tuple[float, ...], counts: Sequence[int], total_s: float) -> Histogram:
        """Return the histogram of another, whose `counts` these are."""
        made = cls(bounds)
        made._counts = [after - before for before, after in pairwise((0, *counts))]
        made.total_s = total_s
        return made

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += times
        self.total_s += seconds * times

    def __add__(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Histogram.of(self.bounds, counts, self.total_s + other.total_s)

    @property
    def counts(self) -> list[int]:
        """Return the counts of values up to each bound, and of all."""
        return list(accumulate(self._counts))


@dataclass(frozen=True)
class Latencies:
    """Histograms of times: from a request to the first token of its answer; from one token to the
    next; until there was a place in the batch; and from a request to the end of its answer.
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(WAITS_S))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(PAUSES_S))
    queue: Histogram = field(default_factory=lambda: Histogram(WAITS_S))
    whole: Histogram = field(default_factory=lambda: Histogram(WAITS_S))

    def __add__(self, other: Latencies) -> Latencies:
        names = (field.name for field in fields(self))
        return Latencies(**{name: getattr(self, name) + getattr(other, name) for name in names})
