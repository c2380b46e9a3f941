"""Cuts of dims: each rank's share, on boundaries that heads, groups and blocks allow."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from mtmd.base.text import plural
from mtmd.kernels.parallel.dims import Conflict, Dim, Dims, Segments

EVEN = (256, 64, 32, 16, 8, 4, 2)  # neurons to a part where that leaves enough of them
ALIGNED = 16  # neurons to a part, at least, that exact shares are looked for with
NEAR = 0.02  # the fullest rank's excess over its share, for which smaller parts are not tried
MAX_UNITS = 1024  # heads, of which every way to cut them is looked at


class Cuts:
    """Cuts of every dim of a graph, by its root: the fractions at which ranks' parts end."""

    def __init__(self, dims: Dims, shares: Sequence[float]):
        """`shares` are the ranks', of any sum. `conflicts` are the dims that cannot be cut so."""
        self.conflicts: list[Conflict] = []
        self._ranks = len(shares)
        self._ends = [
            Fraction(x / sum(shares)).limit_denominator(10**6) for x in accumulate(shares)
        ]
        self._edges: dict[Dim, tuple[Fraction, ...]] = {}
        self._covered: dict[Dim, int] = {}
        roots = dict.fromkeys(d.root for d in dims.made)
        roots = dict.fromkeys(d for d in roots if not d.whole and not d.parts)
        readers: dict[Dim, list[Dim]] = {}
        for dim in roots:
            if dim.groups is not None and not dim.groups.root.whole:
                readers.setdefault(dim.groups.root, []).append(dim)
        for groups, heads in readers.items():
            try:
                edges = self._heads(min(h.units for h in heads), groups, heads)
            except Conflict as conflict:
                self.conflicts.append(conflict)
                edges = ()
            self._edges.update(dict.fromkeys([*heads, groups], edges))
            self._covered[groups] = groups.units
        for dim in roots:
            if dim not in self._edges:
                try:
                    self._edges[dim] = self._even(dim)
                except Conflict as conflict:
                    self.conflicts.append(conflict)

    def _few(self, dims: Sequence[Dim], units: int, what: str) -> Conflict:
        return Conflict(
            dims,
            f"{units} {what} for {self._ranks} ranks: up to {plural(units, 'rank')} could share it",
            refused=True,
        )

    def _even(self, dim: Dim) -> tuple[Fraction, ...]:
        units = dim.units
        if units < self._ranks:
            raise self._few([dim], units, "part" + "s" * (units > 1))
        steps = [n for n in EVEN if units % n == 0 and units // n >= 4 * self._ranks]
        ways = {n: self._edges_by(units // n) for n in (*steps, 1)}
        for maximum, minimum in ((0.0, ALIGNED), (NEAR, 1)):
            for step, way in ways.items():
                if step >= minimum and self._excess(way) <= maximum:
                    return way
        return min(ways.values(), key=self._excess)

    def _edges_by(self, units: int) -> tuple[Fraction, ...]:
        edges = [0]
        for rank, end in enumerate(self._ends, 1):
            left = self._ranks - rank  # each of those behind gets a unit at least
            edges.append(min(max(round(end * units), edges[-1] + 1), units - left))
        edges[-1] = units
        return tuple(Fraction(e, units) for e in edges)

    def _excess(self, edges: Sequence[Fraction]) -> float:
        """Return how much more than its share the fullest rank has, as a part of that."""
        requested = [end - start for start, end in pairwise((Fraction(0), *self._ends))]
        parts = [stop - start for start, stop in pairwise(edges)]
        # a share so small that it is 0 here gets the least there is
        each = zip(parts, requested, strict=True)
        return float(max(part / share for part, share in each if share) - 1)

    def _heads(self, units: int, groups: Dim, heads: Sequence[Dim]) -> tuple[Fraction, ...]:
        """A rank's heads are whole groups or lie in one: then its heads and groups fit together as
        all of them do. The way that comes nearest to the shares, by squares.
        """
        several = [groups, *heads]
        if groups.parts or groups in heads:
            raise Conflict(several, "heads that read parts of groups")
        if any(h.units % units for h in heads) or units % groups.units or units > MAX_UNITS:
            raise Conflict(
                several, f"{units} parts of heads for {groups.units} groups", refused=True
            )
        each = units // groups.units
        overlap = not groups.exact
        best: dict[int, tuple[Fraction, tuple[int, ...]]] = {0: (Fraction(0), (0,))}
        for rank, end in enumerate(self._ends):
            requested = (end - (self._ends[rank - 1] if rank else 0)) * units
            after: dict[int, tuple[Fraction, tuple[int, ...]]] = {}
            for start, (cost, way) in best.items():
                for stop in range(start + 1, units + 1):
                    aligned = start % each == 0 and stop % each == 0
                    inside = overlap and start // each == (stop - 1) // each
                    if not aligned and not inside:
                        continue
                    total = cost + (stop - start - requested) ** 2
                    if stop not in after or total < after[stop][0]:
                        after[stop] = (total, (*way, stop))
            best = after
        if units not in best:
            raise self._few(several, units if overlap else groups.units, "heads or groups")
        return tuple(Fraction(e, units) for e in best[units][1])

    def ranges(self, segments: Segments, dims: Dims, rank: int) -> tuple[tuple[int, int], ...]:
        """Return what a rank has of an axis: from, to, in order."""
        result: list[tuple[int, int]] = []
        at = Fraction(0)
        for size, dim in dims.flat(segments):
            start, stop = Fraction(0), size
            if dim is not None:
                start, stop = (size * self._edges[dim][rank + i] for i in (0, 1))
                if dim in self._covered:
                    step = size / self._covered[dim]
                    start, stop = start // step * step, -(-stop // step) * step
            first, last = int(at + start), int(at + stop)
            if result and result[-1][1] == first:
                result[-1] = result[-1][0], last
            else:
                result.append((first, last))
            at += size
        return tuple(result)


def length(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)
