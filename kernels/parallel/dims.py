"""Dims: axes of values that may be split over ranks, before it is known by how much.

A `Dim` is an axis, or a part of one, that is cut alike wherever it appears: the outputs of a
projection, the heads made of them, and the inputs of the next projection are one. What must be cut
alike is unified; what an op looks at apart (queries, keys and values of one projection) is refined
into parts. Sizes count what the axis has there: the same dim is 4096 columns in one value and 32
heads in another, so its boundaries are fractions, and they fall on multiples of 1 / units, where
units divides every size seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd

Key = tuple[str, Fraction, Fraction]
"""The projection that a dim comes from, and which part of its outputs it is."""


@dataclass(eq=False)
class Dim:
    """One dim; after `merge`, its `root` stands for it. `exact`: ranks may not overlap. `groups`:
    the dim of the keys that these heads of queries read, several heads one group.
    """

    keys: set[Key]
    units: int = 0
    exact: bool = False
    whole: bool = False
    groups: Dim | None = None
    parts: list[tuple[Fraction, Dim]] = field(default_factory=list)
    _parent: Dim | None = None

    @property
    def root(self) -> Dim:
        dim = self
        while dim._parent is not None:
            dim = dim._parent
        return dim


Segment = tuple[Fraction, "Dim | None"]
"""How much of an axis, and which dim it belongs to: None for what every rank has whole."""
Segments = tuple[Segment, ...]


class Conflict(Exception):
    """Dims that cannot be cut as asked: they stay whole. `refused`: a user would want to know."""

    def __init__(self, dims: Iterable[Dim | None], reason: str, *, refused: bool = False):
        super().__init__(reason)
        self.dims = [d.root for d in dims if d is not None]
        self.reason, self.refused = reason, refused


class Dims:
    """All dims of a graph. `kept_whole` says by key why a part of a projection is not cut."""

    def __init__(self, kept_whole: Iterable[Key]):
        self._saved_whole = set(kept_whole)
        self.made: list[Dim] = []

    def fresh(self, origin: str, size: int) -> Dim:
        return self._new({(origin, Fraction(0), Fraction(1))}, size)

    def _new(self, keys: set[Key], units: int) -> Dim:
        dim = Dim(keys, units, whole=bool(keys & self._saved_whole))
        self.made.append(dim)
        return dim

    def flat(self, segments: Iterable[Segment]) -> Segments:
        """The same axis by the finest parts known; neighbours that are whole are one."""
        result: list[Segment] = []
        for size, dim in segments:
            dim = dim and dim.root
            if dim is None or dim.whole:
                if result and result[-1][1] is None:
                    result[-1] = (result[-1][0] + size, None)
                else:
                    result.append((size, None))
            elif dim.parts:
                inner = self.flat((size * share, part) for share, part in dim.parts)
                if result and inner[0][1] is None and result[-1][1] is None:
                    result[-1] = (result[-1][0] + inner[0][0], None)
                    inner = inner[1:]
                result.extend(inner)
            else:
                result.append((size, dim))
        return tuple(result)

    def see(self, segments: Iterable[Segment]) -> Segments:
        """The axis as it appears in a value: sizes count, so boundaries have to fall on them."""
        result = self.flat(segments)
        for size, dim in result:
            if size.denominator != 1:
                raise Conflict([d for _, d in result], "a part of it is no whole number of columns")
            if dim is not None:
                dim.units = gcd(dim.units, int(size))
        return result

    def cut_at(self, segments: Iterable[Segment], points: Iterable[Fraction | int]) -> Segments:
        """The axis with boundaries at these places, refining what lies across them."""
        requested = sorted({Fraction(p) for p in points})
        result: list[Segment] = []
        start = Fraction(0)
        for size, dim in self.flat(segments):
            inside = [p - start for p in requested if start < p < start + size]
            if inside and dim is not None:
                self._refine(dim, [p / size for p in inside])
                result.extend(self.flat([(size, dim)]))
            else:
                edges = [Fraction(0), *inside, size]
                result.extend((b - a, dim) for a, b in pairwise(edges))
            start += size
        return tuple(result)

    def between(self, segments: Iterable[Segment], start: int, stop: int) -> Segments:
        at = Fraction(0)
        result: list[Segment] = []
        for size, dim in self.cut_at(segments, (start, stop)):
            if start <= at < stop:
                result.append((size, dim))
            at += size
        return self.flat(result)

    def _refine(self, dim: Dim, locations: Sequence[Fraction]) -> None:
        if dim.groups is not None or any(d.root.groups is dim for d in self.made if d.groups):
            raise Conflict([dim], "heads that share keys are looked at in parts")
        edges = [Fraction(0), *locations, Fraction(1)]
        for a, b in pairwise(edges):
            units = dim.units * (b - a)
            if units.denominator != 1:
                raise Conflict([dim], f"a part of {float(b - a):.3g} of {dim.units} heads")
            keys = {(o, lo + (hi - lo) * a, lo + (hi - lo) * b) for o, lo, hi in dim.keys}
            part = self._new(keys, int(units))
            part.exact = dim.exact
            dim.parts.append((b - a, part))

    def unify(self, a: Iterable[Segment], b: Iterable[Segment]) -> Segments:
        """Two axes of one size that have to be cut alike."""
        a, b = tuple(a), tuple(b)
        for _ in range(2):  # refining one may refine the other
            a = self.cut_at(a, accumulate(size for size, _ in self.flat(b)))
            b = self.cut_at(b, accumulate(size for size, _ in self.flat(a)))
        for (_, one), (_, other) in zip(a, b, strict=True):
            self.merge(one, other)
        return self.flat(a)

    def merge(self, one: Dim | None, other: Dim | None) -> None:
        one, other = one and one.root, other and other.root
        if one is other:
            return
        if one is None or other is None or one.whole or other.whole:
            raise Conflict([one, other], "it meets a value that every rank has whole")
        if one.groups is not None and other.groups is not None:
            groups = one.groups, other.groups
            other.groups = None
            self.merge(*groups)
        other._parent = one
        one.keys |= other.keys
        one.units, one.exact = gcd(one.units, other.units), one.exact or other.exact
        one.groups = one.groups or other.groups

    def link(self, heads: Dim, groups: Dim) -> None:
        """Several heads read one group: a rank's heads have to be whole groups, or lie in one."""
        heads, groups = heads.root, groups.root
        if heads.groups is not None:
            self.merge(heads.groups, groups)
        else:
            heads.groups = groups
