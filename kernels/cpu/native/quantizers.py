"""Quantization: scales, and offsets, searched for by weighted least squares, and the codes by them.

A lane is a block of 16 that lie side by side, so that each step is one of whole vectors, and a sum
over the values of a group runs in order. A unit is such 16 blocks; behind the last block it is
repeated. Each group's scale (and offset) is searched for as if it were stored in fp32. Then, in
blocks of 256 values, the block's fp16 numbers and the groups' small integers are fitted in turn:
the integers to either side of each are tried, and the block's numbers are the smallest-squares ones
for codes and integers.

Products and sums are rounded one by one, and sums of more than 16 numbers are sums of sums of 16:
results are the same on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mtmd.kernels.cpu.native.emit import F32, I8, I32, Emitter, Value, vec

LANES = 16
RUN = 16  # numbers that are summed one after another
HALF_MAX = 65504.0
TOGETHER = 3  # suggestions that are tried in one pass over a group
VECTOR = vec(F32, LANES)


@dataclass(frozen=True)
class Form:
    """Describes blocks: how many values share a scale, and how many such groups a block has. Codes
    are whole numbers from `low` to `high`, stored from 0, or where `nearest` is given, indices in a
    table: its cells of half a unit, from -128 on, have the nearest entry and its index. `limit`:
    integers of the groups are below it, and from -limit on where they have signs.
    """

    size: int
    groups: int
    low: int
    high: int
    limit: int = 0
    nearest: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def values(self) -> int:
        return self.size * self.groups


def emit_scale(
    e: Emitter, form: Form, weighted: bool, divisors: tuple[float, ...], refined: int
) -> None:
    """Blocks of one group with one scale

    args: x (float32 [n, values]), weights, n, codes (uint8 [n, values]), scales (float32 [n up to
    whole units])
    """
    blocks = _Blocks(e, form, weighted)
    with blocks.units() as unit:
        scale = _half(e, blocks.best_scale(e.i64(0), divisors, refined))
        e.store(e.arg_ptr(4), scale, unit * LANES)
        factor = _inverse(e, scale)
        blocks.write(lambda _, x: blocks.code(x * factor))


def emit_line(
    e: Emitter, form: Form, weighted: bool, shares: tuple[tuple[float, float], ...], refined: int
) -> None:
    """Blocks of one group with a scale and an offset

    args: as those of `emit_scale`, then offsets
    """
    blocks = _Blocks(e, form, weighted)
    with blocks.units() as unit:
        scale, offset = blocks.best_line(e.i64(0), shares, refined, below_zero=False)
        scale, offset = _half(e, scale), _half(e, offset)
        e.store(e.arg_ptr(4), scale, unit * LANES)
        e.store(e.arg_ptr(5), offset, unit * LANES)
        factor = _inverse(e, scale)
        blocks.write(lambda _, x: blocks.code((x - offset) * factor))


def emit_scales(
    e: Emitter, form: Form, weighted: bool, divisors: tuple[float, ...], refined: int
) -> None:
    """Blocks of several groups, with a scale and an integer for each group

    args: as those of `emit_scale`, then the integers (float32 [groups, n up to whole units]), and n
    up to whole units
    """
    blocks = _Blocks(e, form, weighted)
    ints, factors = (e.local(F32, form.groups * LANES) for _ in range(2))
    with blocks.units() as unit:
        lowest, highest = e.var(VECTOR, float("inf")), e.var(VECTOR, float("-inf"))
        with e.loop(0, form.groups) as group:
            best = blocks.best_scale(group, divisors, refined)
            e.store(ints, best, group * LANES)
            lowest.set(e.minimum(lowest.get(), best))
            highest.set(e.maximum(highest.get(), best))
        low, high = lowest.get(), highest.get()
        d = _half(e, e.select(high > -low, high, low) / float(-form.limit))
        by = _inverse(e, d)
        with e.loop(0, form.groups) as group:
            first = _round(e, e.load(ints, VECTOR, group * LANES) * by)
            first = _clip(e, first, -form.limit, form.limit - 1)
            e.store(ints, blocks.tried(group, d, first), group * LANES)
        blocks.by_group(lambda g: e.store(factors, _inverse(e, d * g.load(ints)), g.at))
        product, square = _Sum(e), _Sum(e)

        def add(v: Value, group: _Group) -> None:
            x, w = blocks.load(v)
            q = blocks.grid(x * group.load(factors)) * group.load(ints)
            qw = q if w is None else q * w
            product.add(qw * x)
            square.add(qw * q)

        blocks.across(add, (product, square))
        d = _half(e, product.value() * _inverse(e, square.value()))
        blocks.by_group(lambda g: e.store(factors, _inverse(e, d * g.load(ints)), g.at))
        e.store(e.arg_ptr(4), d, unit * LANES)
        blocks.by_group(
            lambda g: e.store(e.arg_ptr(5), g.load(ints), g.number * e.arg(6) + unit * LANES)
        )
        blocks.write(lambda v, x: blocks.code(x * e.load(factors, VECTOR, v // form.size * LANES)))


def emit_lines(
    e: Emitter, form: Form, weighted: bool, shares: tuple[tuple[float, float], ...], refined: int
) -> None:
    """Blocks of several groups, with a scale and an offset, and an integer of each for each group

    args: as those of `emit_scale`, then offsets, the scales' integers and the offsets' (float32
    [groups, n up to whole units] each), and n up to whole units
    """
    blocks = _Blocks(e, form, weighted)
    ups, downs, factors, starts = (e.local(F32, form.groups * LANES) for _ in range(4))
    limit = float(form.limit)
    with blocks.units() as unit:
        widest, lowest = e.var(VECTOR, float("-inf")), e.var(VECTOR, float("inf"))
        with e.loop(0, form.groups) as group:
            scale, offset = blocks.best_line(group, shares, refined, below_zero=True)
            e.store(ups, scale, group * LANES)
            e.store(downs, offset, group * LANES)
            widest.set(e.maximum(widest.get(), scale))
            lowest.set(e.minimum(lowest.get(), offset))
        d, dmin = _half(e, widest.get() / limit), _half(e, lowest.get() / -limit)
        up, down = _inverse(e, d), -_inverse(e, dmin)
        with e.loop(0, form.groups) as group:
            at = group * LANES
            first = _between(e, _round(e, e.load(ups, VECTOR, at) * up), 0.0, limit)
            second = _between(e, _round(e, e.load(downs, VECTOR, at) * down), 0.0, limit)
            first, second = blocks.tried_line(group, d, dmin, first, second)
            e.store(ups, first, at)
            e.store(downs, second, at)

        def scaled(g: _Group) -> None:
            e.store(factors, _inverse(e, d * g.load(ups)), g.at)
            e.store(starts, dmin * g.load(downs), g.at)

        blocks.by_group(scaled)
        # The smallest-squares d and dmin of x = d (up q) - dmin down.
        aa, ax = _Sum(e), _Sum(e)

        def multiple(v: Value, group: _Group) -> tuple[Value, Value, Value | None]:
            """x, the part that d multiplies, and that times its weight."""
            x, w = blocks.load(v)
            q = blocks.grid((x + group.load(starts)) * group.load(factors))
            a = q * group.load(ups)
            return x, a, a if w is None else a * w

        def add(v: Value, group: _Group) -> None:
            x, a, aw = multiple(v, group)
            assert aw is not None
            aa.add(aw * a)
            ax.add(aw * x)

        blocks.across(add, (aa, ax))
        ab, bb, bx = (e.var(VECTOR, 0.0) for _ in range(3))

        def add_group(g: _Group) -> None:
            sums = [_Sum(e) for _ in range(3)]

            def add_value(v: Value) -> None:
                x, _, aw = multiple(v, g)
                w = blocks.load(v)[1]
                assert aw is not None
                sums[0].add(aw)
                sums[1].add(x if w is None else x * w)
                if w is not None:
                    sums[2].add(w)

            blocks.along(g.number, add_value, sums)
            minimum = g.load(downs)
            ones = sums[2].value() if blocks.weighted else e.f32(float(form.size), LANES)
            ab.set(ab.get() + sums[0].value() * minimum)
            bx.set(bx.get() + sums[1].value() * minimum)
            bb.set(bb.get() + ones * (minimum * minimum))

        blocks.by_group(add_group)
        aa_, ax_, ab_, bb_, bx_ = aa.value(), ax.value(), ab.get(), bb.get(), bx.get()
        by = _inverse(e, aa_ * bb_ - ab_ * ab_)
        fitted, other = (ax_ * bb_ - bx_ * ab_) * by, (ax_ * ab_ - bx_ * aa_) * by
        usable = by.ne(0.0) & (fitted > 0.0) & (other >= 0.0)
        d = _half(e, e.select(usable, fitted, d))
        dmin = _half(e, e.select(usable, other, dmin))
        blocks.by_group(scaled)
        e.store(e.arg_ptr(4), d, unit * LANES)
        e.store(e.arg_ptr(5), dmin, unit * LANES)

        def write_ints(g: _Group) -> None:
            at = g.number * e.arg(8) + unit * LANES
            e.store(e.arg_ptr(6), g.load(ups), at)
            e.store(e.arg_ptr(7), g.load(downs), at)

        blocks.by_group(write_ints)

        def code(v: Value, x: Value) -> Value:
            at = v // form.size * LANES
            moved = x + e.load(starts, VECTOR, at)
            return blocks.code(moved * e.load(factors, VECTOR, at))

        blocks.write(code)


class _Sum:
    """A sum of vectors, by runs of `RUN`."""

    def __init__(self, e: Emitter):
        self.part, self.total = e.var(VECTOR, 0.0), e.var(VECTOR, 0.0)

    def begin(self) -> None:
        self.part.set(0.0)
        self.total.set(0.0)

    def add(self, x: Value) -> None:
        self.part.add(x)

    def fold(self) -> None:
        self.total.add(self.part.get())
        self.part.set(0.0)

    def value(self) -> Value:
        return self.total.get()


@dataclass(frozen=True)
class _Group:
    """A group of every block: its number, and where its vector lies among those of all groups."""

    e: Emitter
    number: Value

    @property
    def at(self) -> Value:
        return self.number * LANES

    def load(self, vectors: Value) -> Value:
        return self.e.load(vectors, VECTOR, self.at)


class _Blocks:
    """Sixteen blocks in memory, value by value, and what is done with a group of each."""

    def __init__(self, e: Emitter, form: Form, weighted: bool):
        e.contract = False
        self.e, self.form, self.weighted = e, form, weighted
        self.x = e.local(F32, form.values * LANES)
        self.w = e.local(F32, form.values * LANES) if weighted else None
        self.codes = e.local(F32, form.values * LANES)
        if form.nearest is not None:
            entries, indices = form.nearest
            self.entries, self.indices = e.table(I32, entries), e.table(I32, indices)

    @contextmanager
    def units(self) -> Iterator[Value]:
        """Each unit, after its blocks were read."""
        e = self.e
        with e.loop(e.first, e.last) as unit:
            last = e.arg(2) - 1
            self.rows = [e.minimum(unit * LANES + lane, last) for lane in range(LANES)]
            for source, to in ((e.arg_ptr(0), self.x), (e.arg_ptr(1), self.w)):
                if to is not None:
                    with e.loop(0, self.form.values, LANES) as c:
                        rows = [
                            e.load(source, VECTOR, row * self.form.values + c) for row in self.rows
                        ]
                        for i, column in enumerate(e.transposed(rows)):
                            e.store(to, column, (c + i) * LANES)
            yield unit

    def load(self, v: Value) -> tuple[Value, Value | None]:
        """Value v of each block, and its weight."""
        at = v * LANES
        w = None if self.w is None else self.e.load(self.w, VECTOR, at)
        return self.e.load(self.x, VECTOR, at), w

    def along(self, group: Value, body: Callable[[Value], None], sums: Sequence[_Sum]) -> None:
        """The body for each value of a group."""
        e, first = self.e, group * self.form.size
        for one in sums:
            one.begin()
        with e.loop(first, first + self.form.size, RUN) as run:
            with e.loop(run, run + RUN) as v:
                body(v)
            for one in sums:
                one.fold()

    def across(self, body: Callable[[Value, _Group], None], sums: Sequence[_Sum]) -> None:
        """The body for each value: the first ones of all groups, then the second ones."""
        e, groups = self.e, self.form.groups
        for one in sums:
            one.begin()
        with e.loop(0, self.form.values, RUN) as run:
            with e.loop(run, run + RUN) as i:
                group = _Group(e, i % groups)
                body(group.number * self.form.size + i // groups, group)
            for one in sums:
                one.fold()

    def by_group(self, body: Callable[[_Group], object]) -> None:
        with self.e.loop(0, self.form.groups) as group:
            body(_Group(self.e, group))

    def _cells(self, x: Value) -> Value:
        e = self.e
        return (_between(e, e.floor(x * 2.0), -256.0, 255.0) + 256.0).fptosi()

    def grid(self, x: Value) -> Value:
        """Numbers in units of the scale to the nearest that a code stands for."""
        if self.form.nearest is None:
            return _clip(self.e, _round(self.e, x), self.form.low, self.form.high)
        return self.e.gather(self.entries, self._cells(x)).sitofp()

    def code(self, x: Value) -> Value:
        """The code of the nearest."""
        if self.form.nearest is None:
            return self.grid(x) - float(self.form.low)
        return self.e.gather(self.indices, self._cells(x)).sitofp()

    def write(self, code: Callable[[Value, Value], Value]) -> None:
        """`code(v, x)` of each value v, x, as a byte."""
        e, out = self.e, self.e.arg_ptr(3)
        with e.loop(0, self.form.values) as v:
            e.store(self.codes, code(v, self.load(v)[0]), v * LANES)
        with e.loop(0, self.form.values, LANES) as c:
            columns = [e.load(self.codes, VECTOR, (c + i) * LANES) for i in range(LANES)]
            for row, codes in zip(self.rows, e.transposed(columns), strict=True):
                e.store(out, codes.fptosi().trunc(I8), row * self.form.values + c, align=1)

    def _range(self, group: Value) -> tuple[Value, Value]:
        e = self.e
        low, high = e.var(VECTOR, float("inf")), e.var(VECTOR, float("-inf"))

        def add(v: Value) -> None:
            x, _ = self.load(v)
            low.set(e.minimum(low.get(), x))
            high.set(e.maximum(high.get(), x))

        self.along(group, add, ())
        return low.get(), high.get()

    def best_scale(self, group: Value, divisors: Sequence[float], refined: int) -> Value:
        """The scale with which the grid is closest to a group's values.

        Each divisor suggests the number of largest magnitude divided by it. Of the numbers on the
        grid that a suggestion gives, the least-squares scale is taken, and is `refined` so many
        times more.
        """
        e = self.e
        low, high = self._range(group)
        extreme = e.select(high > -low, high, low)
        best, gain = e.var(VECTOR, 0.0), e.var(VECTOR, 0.0)

        def consider(scales: Sequence[Value]) -> None:
            factors = [_inverse(e, scale) for scale in scales]
            sums = [(_Sum(e), _Sum(e)) for _ in scales]

            def add(v: Value) -> None:
                x, w = self.load(v)
                xw = x if w is None else x * w
                for factor, (product, square) in zip(factors, sums, strict=True):
                    q = self.grid(x * factor)
                    product.add(xw * q)
                    square.add((q if w is None else q * w) * q)

            self.along(group, add, [one for both in sums for one in both])
            for product_, square_ in sums:
                product, by = product_.value(), _inverse(e, square_.value())
                result = product * product * by
                better = result > gain.get()
                best.set(e.select(better, product * by, best.get()))
                gain.set(e.select(better, result, gain.get()))

        for first in range(0, len(divisors), TOGETHER):
            consider([extreme / divisor for divisor in divisors[first : first + TOGETHER]])
        for _ in range(refined):
            consider([best.get()])
        return best.get()

    def best_line(
        self, group: Value, shares: Sequence[tuple[float, float]], refined: int, *, below_zero: bool
    ) -> tuple[Value, Value]:
        """Scale and offset with which scale q + offset is closest to a group's values.

        Each pair of shares suggests a range that begins and ends so far into that of the values.
        `below_zero`: the offset is no more than 0.
        """
        e, zero = self.e, self.e.f32(0.0, LANES)
        low, high = self._range(group)
        if below_zero:
            low = e.minimum(low, 0.0)
        sum_, weights = _Sum(e), _Sum(e)

        def add_value(v: Value) -> None:
            x, w = self.load(v)
            sum_.add(x if w is None else x * w)
            if w is not None:
                weights.add(w)

        self.along(group, add_value, (sum_, weights))
        total = sum_.value()
        weight = weights.value() if self.weighted else e.f32(float(self.form.size), LANES)
        scale, offset = e.var(VECTOR, 0.0), e.var(VECTOR, zero if below_zero else low)
        gain = e.var(VECTOR, float("-inf"))

        def consider(lines: Sequence[tuple[Value, Value]]) -> None:
            factors = [_inverse(e, step) for step, _ in lines]
            sums = [[_Sum(e) for _ in range(3)] for _ in lines]

            def add(v: Value) -> None:
                x, w = self.load(v)
                xw = x if w is None else x * w
                for factor, (_, start), (product, square, codes) in zip(
                    factors, lines, sums, strict=True
                ):
                    q = self.grid((x - start) * factor)
                    qw = q if w is None else q * w
                    product.add(xw * q)
                    square.add(qw * q)
                    codes.add(qw)

            self.along(group, add, [one for three in sums for one in three])
            for three in sums:
                product, square, codes = (one.value() for one in three)
                by = _inverse(e, weight * square - codes * codes)
                slope = (weight * product - total * codes) * by
                at = (square * total - codes * product) * by
                if below_zero:
                    through_zero = (at > 0.0) | by.eq(0.0)
                    slope = e.select(through_zero, product * _inverse(e, square), slope)
                    at = e.select(through_zero, zero, at)
                else:
                    at = e.select(by.eq(0.0), total * _inverse(e, weight), at)
                # How much of the weighted sum of squares the line explains.
                result = slope * product + at * total
                better = (result > gain.get()) & (slope >= 0.0)
                scale.set(e.select(better, slope, scale.get()))
                offset.set(e.select(better, at, offset.get()))
                gain.set(e.select(better, result, gain.get()))

        def line(first: float, last: float) -> tuple[Value, Value]:
            start = _between_two(e, low, high, first)
            if below_zero:
                start = e.minimum(start, 0.0)
            return (_between_two(e, low, high, last) - start) / float(self.form.high), start

        for first in range(0, len(shares), TOGETHER):
            consider([line(*pair) for pair in shares[first : first + TOGETHER]])
        for _ in range(refined):
            consider([(scale.get(), offset.get())])
        return scale.get(), offset.get()

    def tried(self, group: Value, d: Value, first: Value) -> Value:
        """A group's integer, or one beside it, with the smallest error."""
        e, limit = self.e, self.form.limit
        best, smallest = e.var(VECTOR, first), e.var(VECTOR, float("inf"))
        tried = [_clip(e, first + float(step), -limit, limit - 1) for step in (0, -1, 1)]
        scales = [d * one for one in tried]
        factors = [_inverse(e, scale) for scale in scales]
        sums = [_Sum(e) for _ in tried]

        def add(v: Value) -> None:
            x, w = self.load(v)
            for scale, factor, sum_ in zip(scales, factors, sums, strict=True):
                error = self.grid(x * factor) * scale - x
                error = error * error
                sum_.add(error if w is None else error * w)

        self.along(group, add, sums)
        for one, sum_ in zip(tried, sums, strict=True):
            better = sum_.value() < smallest.get()
            best.set(e.select(better, one, best.get()))
            smallest.set(e.select(better, sum_.value(), smallest.get()))
        return best.get()

    def tried_line(
        self, group: Value, d: Value, dmin: Value, up: Value, down: Value
    ) -> tuple[Value, Value]:
        """A group's two integers, or those beside them, with the smallest error."""
        e, limit = self.e, float(self.form.limit)
        best, other = e.var(VECTOR, up), e.var(VECTOR, down)
        smallest = e.var(VECTOR, float("inf"))
        downs = [_between(e, down + float(step), 0.0, limit) for step in (0, -1, 1)]
        for step in (0, -1, 1):
            one = _between(e, up + float(step), 0.0, limit)
            scale = d * one
            factor, starts = _inverse(e, scale), [dmin * two for two in downs]
            sums = [_Sum(e) for _ in downs]

            def add(
                v: Value,
                scale: Value = scale,
                factor: Value = factor,
                starts: list[Value] = starts,
                sums: list[_Sum] = sums,
            ) -> None:
                x, w = self.load(v)
                for start, sum_ in zip(starts, sums, strict=True):
                    moved = x + start
                    error = self.grid(moved * factor) * scale - moved
                    error = error * error
                    sum_.add(error if w is None else error * w)

            self.along(group, add, sums)
            for two, sum_ in zip(downs, sums, strict=True):
                better = sum_.value() < smallest.get()
                best.set(e.select(better, one, best.get()))
                other.set(e.select(better, two, other.get()))
                smallest.set(e.select(better, sum_.value(), smallest.get()))
        return best.get(), other.get()


def _round(e: Emitter, x: Value) -> Value:
    return e.call(f"llvm.rint.v{LANES}f32", x.type, x)


def _between(e: Emitter, x: Value, low: float, high: float) -> Value:
    return e.minimum(e.maximum(x, low), high)


def _clip(e: Emitter, x: Value, low: int, high: int) -> Value:
    return _between(e, x, float(low), float(high))


def _inverse(e: Emitter, x: Value) -> Value:
    """1 / x, and 0 for 0."""
    return e.select(x.eq(0.0), e.f32(0.0, LANES), 1.0 / x)


def _half(e: Emitter, x: Value) -> Value:
    """The fp16 numbers that will be stored, as fp32."""
    return _between(e, x, -HALF_MAX, HALF_MAX).f32_to_half().half_to_f32()


def _between_two(e: Emitter, low: Value, high: Value, share: float) -> Value:
    """low + share (high - low), from the nearer end."""
    if abs(share) < 0.5:
        return e.fma(high - low, share, low)
    return e.fma(high - low, share - 1, high)
