"""The next token of a row of logits: the most probable one, or one drawn at random from those that
`top_k`, `top_p` and `min_p` leave, in one call and without a sort.

The filters and their order are those of transformers' logits processors: temperature, top-k, top-p
(Holtzman et al. 2019, "The curious case of neural text degeneration"), min-p (Nguyen et al. 2024,
arXiv 2407.01082). A row is gone over twice: for its largest logit, and for how likely each token is
beside that one. What the filters keep is among the most probable tokens: those above a bound that
is lowered until they are enough, most blocks passed over by their largest. Of these, each is
compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import reduce

from mtmd.kernels.cpu.native.emit import F32, F64, I32, I64, Emitter, Value, Var, vec

LANES = 16
UNROLLED = 4  # vectors of a pass for the largest
BLOCK = 256  # tokens, of which the sum and the largest are known
MAXIMUM = 1024  # tokens that are compared with each other, which takes some ten microseconds
LOWER = 0.25  # from one bound to the next
MINIMUM = 1e-30  # the last of them
LARGE = 1e38
ONE = 0x3F800000  # bits of 1.0, the largest weight
NOT_DRAWN = -1
"""In place of a token: the row is not an ordinary one, and has to be looked at some other way."""

# Words of a row's arguments
LOGITS, SIZE, TEMPERATURE, TOP_K, SPARE, MIN_P, POINT, TOKEN, PEAK = range(9)
WORDS = 9


def scratch_bytes(size: int) -> int:
    """Return the scratch bytes of a call, for rows of up to `size` logits."""
    blocks = -(-size // BLOCK)
    return 4 * _padded(size) + 12 * _padded(blocks) + 24 * MAXIMUM


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def emit_draw(e: Emitter, dtype: str) -> None:
    """args: of each row `WORDS` words. LOGITS: address; SIZE: V; TEMPERATURE: float32, 0 for the
    most probable token; TOP_K: 0 for any number; SPARE: float32, 1 - top_p, below 0 for all; MIN_P:
    float32; POINT: float64 in [0, 1), which token of those that may be drawn.

    Written are TOKEN, and PEAK, float32, the largest logit; NaN counts as larger than all. TOKEN is
    `NOT_DRAWN` where PEAK is not finite, or too many tokens are alike for this. Units: rows.
    scratch: `scratch_bytes`, aligned to 64.
    """
    with e.loop(e.first, e.last) as row:
        args = e.args.at(row * WORDS, I64)
        drawing = _Drawing(e, args, dtype)
        peak, best = drawing.peak()
        token = e.var(I64, NOT_DRAWN)
        with e.when(e.abs(peak) < float("inf")):
            token.set(best)
            with e.when(drawing.temperature > 0.0):
                drawing.draw(peak, token)
        e.store(args, token.get(), TOKEN)
        e.store(args, peak.bits(I32).zext(I64), PEAK)


class _Largest:
    """State of each lane: the first of the largest, and whether any was NaN."""

    def __init__(self, e: Emitter):
        whole = vec(I32, LANES)
        self.e, self.value = e, e.var(vec(F32, LANES), float("-inf"))
        self.at, self.nan = e.var(whole, 0), e.var(whole, 0)

    def add(self, value: Value, at: Value) -> None:
        self.nan.set(self.nan.get() | value.ne(value).zext(I32))
        larger = value > self.value.get()
        self.at.set(self.e.select(larger, at, self.at.get()))
        self.value.set(self.e.select(larger, value, self.value.get()))


class _Drawing:
    """Draw from one row: its options, and where its scratch memory lies."""

    def __init__(self, e: Emitter, args: Value, dtype: str):
        def real(word: int) -> Value:
            return e.load(args, I64, word).trunc(I32).bits(F32)

        self.e, self.dtype = e, dtype
        self.logits, self.size = e.load(args, I64, LOGITS).to_ptr(), e.load(args, I64, SIZE)
        self.temperature, self.spare, self.min_p = real(TEMPERATURE), real(SPARE), real(MIN_P)
        self.top_k, self.point = e.load(args, I64, TOP_K), e.load(args, I64, POINT).bits(F64)
        self.blocks = (self.size + (BLOCK - 1)) // BLOCK
        padded = [(count + (LANES - 1)) // LANES * LANES for count in (self.size, self.blocks)]
        self.weights = e.scratch
        self.sums = self.weights.at(padded[0] * 4)
        self.maxima = self.sums.at(padded[1] * 8)
        # Of the most probable tokens, in their order; and their places by rank, lowest first
        self.result = self.maxima.at(padded[1] * 4)
        self.result_logits, self.result_weights, self.ranks, self.order = (
            self.result.at(bytes_ * MAXIMUM) for bytes_ in (8, 12, 16, 20)
        )

    def peak(self) -> tuple[Value, Value]:
        """The largest logit, and the first token that has it."""
        e, lane = self.e, self.e.const(vec(I32, LANES), list(range(LANES)))
        result = [_Largest(e) for _ in range(UNROLLED)]
        whole = self.size // (UNROLLED * LANES) * (UNROLLED * LANES)
        with e.loop(0, whole, UNROLLED * LANES) as start:
            for number, one in enumerate(result):
                c = start + number * LANES
                one.add(e.read(self.logits, self.dtype, c, LANES), lane + c.trunc(I32))
        for c, mask in e.spans(whole, self.size, LANES):
            value = e.read(self.logits, self.dtype, c, LANES, mask)
            if mask is not None:
                value = e.select(mask, value, e.f32(float("-inf"), LANES))
            result[0].add(value, lane + c.trunc(I32))
        largest = [one.value.get() for one in result]
        peak = e.largest(reduce(e.maximum, largest))
        last = e.const(vec(I32, LANES), -(1 << 31) + 1)
        locations = [
            e.select(value.eq(peak), -one.at.get(), last)
            for value, one in zip(largest, result, strict=True)
        ]
        nan = reduce(lambda a, b: a | b, [one.nan.get() for one in result])
        peak = e.select(e.largest(nan) > 0, e.f32(float("nan")), peak)
        return peak, (-e.largest(reduce(e.maximum, locations))).sext(I64)

    def draw(self, peak: Value, token: Var) -> None:
        e = self.e
        total = self._weigh(peak)
        few = (self.top_k > 0) & (self.top_k < self.size)
        nucleus = self.spare >= 0.0
        token.set(NOT_DRAWN)
        with e.either(few | nucleus | (self.min_p > 0.0)) as (some, all_):
            with all_:
                self._pick_of_all(total, token)
            with some:
                count, rest = e.var(I64, 0), e.var(F64, 0.0)
                bound = self._bound(total, few, nucleus, rest)
                with e.when(bound.eq(0.0) & few.eq(0)):
                    self._pick_of_many(total, nucleus, token)
                with e.when(bound > 0.0):
                    self._gather(bound, count)
                    whole = e.var(F64)
                    whole.set(total)
                    with e.when(few):
                        self._keep_top(count)
                        rest.set(0.0)
                        whole.set(self._sum(count))
                    with e.when(nucleus):
                        self._keep_nucleus(count, whole.get(), rest.get())
                    self._pick(count, token)

    def _weigh(self, peak: Value) -> Value:
        """Weights of all tokens, 1 of the best; their sums and largest by block. -> the sum"""
        e, total = self.e, self.e.var(F64, 0.0)
        colder = e.minimum(1.0 / self.temperature, LARGE)  # which 0 may be multiplied by
        with e.loop(0, self.blocks) as block:
            start = block * BLOCK
            stop = start + BLOCK
            stop = e.select(stop < self.size, stop, self.size)
            sum_, maximum = e.var(vec(F32, LANES), 0.0), e.var(vec(F32, LANES), 0.0)
            for c, mask in e.spans(start, stop, LANES):
                value = e.read(self.logits, self.dtype, c, LANES, mask)
                weight = e.exp((value - peak) * colder)
                if mask is not None:
                    weight = e.select(mask, weight, e.f32(0.0, LANES))
                e.store(self.weights, weight, c)  # whole vectors: there is room
                sum_.add(weight)
                maximum.set(e.maximum(weight, maximum.get()))
            sum_of_block = e.sum(sum_.get()).widen()
            e.store(self.sums, sum_of_block, block)
            e.store(self.maxima, e.largest(maximum.get()), block)
            total.add(sum_of_block)
        return total.get()

    def _pick_of_all(self, total: Value, token: Var) -> None:
        """The first token up to which more than the point's share of all lies."""
        e, goal = self.e, self.point * total
        inside, before, sum_ = e.var(I64, -1), e.var(F64, 0.0), e.var(F64, 0.0)
        with e.loop(0, self.blocks) as block:
            grown = sum_.get() + e.load(self.sums, F64, block)
            with e.when((inside.get() < 0) & (grown > goal)):
                inside.set(block)
                before.set(sum_.get())
            sum_.set(grown)
        with e.when(inside.get() >= 0):
            start = inside.get() * BLOCK
            stop = start + BLOCK
            stop = e.select(stop < self.size, stop, self.size)
            sum_.set(before.get())
            over = e.var(I64, 0)
            with e.loop(start, stop) as i:
                self._pass(i, e.load(self.weights, F32, i), goal, sum_, over, token)

    def _pick_of_many(self, total: Value, nucleus: Value, token: Var) -> None:
        """Pick where too many are likely enough to compare each with each other. The least weight
        of a nucleus is looked for by halving, among all float32 numbers from 0 to 1: the first up
        to which there is more than may go.
        """
        e = self.e
        low, high = e.var(I32, 0), e.var(I32)
        high.set(e.select(nucleus, e.const(I32, ONE), e.const(I32, 0)))
        with e.loop(0, e.select(nucleus, e.i64(ONE.bit_length()), e.i64(0))):
            middle = (low.get() + high.get()) >> 1
            below, equals = self._up_to(middle.bits(F32))
            stays = ((below + equals) / total).narrow() > self.spare
            low.set(e.select(stays, low.get(), middle + 1))
            high.set(e.select(stays, middle, high.get()))
        minimum, gone = e.var(F32), e.var(F64)
        minimum.set(high.get().bits(F32))
        below, equals = self._up_to(minimum.get())
        each = minimum.get().widen()
        gone.set(below)
        with e.forever() as leave:  # of those of the least weight, too
            leave(((gone.get() + each) / total).narrow() > self.spare)
            gone.add(each)
        saved = e.var(F64)
        saved.set(below + equals - gone.get())  # of the least weight, the first ones
        with e.when(self.min_p > minimum.get()):
            minimum.set(self.min_p)
            below, equals = self._up_to(self.min_p)
            gone.set(below)
            saved.set(equals)
        each = minimum.get().widen()
        goal = self.point * (total - gone.get())
        sum_, over, spent = e.var(F64, 0.0), e.var(I64, 0), e.var(F64, 0.0)
        with e.loop(0, self.blocks) as block, self._if_above(block, minimum.get()):
            start = block * BLOCK
            stop = start + BLOCK
            with e.loop(start, e.select(stop < self.size, stop, self.size)) as i:
                weight = e.load(self.weights, F32, i)
                is_min = weight.eq(minimum.get())
                stays = is_min & (spent.get() + each * 0.5 < saved.get())
                spent.set(e.select(is_min, spent.get() + each, spent.get()))
                with e.when(stays | (weight > minimum.get())):
                    self._pass(i, weight, goal, sum_, over, token)

    def _up_to(self, bound: Value) -> tuple[Value, Value]:
        """The sum of all weights below a bound, and of those that are equal to it."""
        e, below, equals = self.e, self.e.var(F64, 0.0), self.e.var(F64, 0.0)
        with e.loop(0, self.blocks) as block:
            low, same = (e.var(vec(F32, LANES), 0.0) for _ in range(2))
            nothing = e.f32(0.0, LANES)
            with self._block(block) as c:
                weight = e.load(self.weights, vec(F32, LANES), c)
                low.add(e.select(weight < bound, weight, nothing))
                same.add(e.select(weight.eq(bound), weight, nothing))
            below.add(e.sum(low.get()).widen())
            equals.add(e.sum(same.get()).widen())
        return below.get(), equals.get()

    def _pass(self, i: Value, weight: Value, goal: Value, sum_: Var, over: Var, token: Var) -> None:
        """`token` becomes i, unless it is the one already. Where rounding has left none above the
        goal, it is the last that has any chance.
        """
        e = self.e
        with e.when(over.get().eq(0) & (weight > 0.0)):
            token.set(i)
            sum_.add(weight.widen())
            over.set((sum_.get() > goal).zext(I64))

    def _bound(self, total: Value, few: Value, nucleus: Value, rest: Var) -> Value:
        """Above which all lie that the filters keep; 0 where there is none. `rest`: what lies
        below it.
        """
        e = self.e
        by_count, result = few | nucleus, e.var(F32, 0.0)
        bound = e.var(F32)
        bound.set(e.select(by_count, e.f32(LOWER), self.min_p * (1 - 1e-6)))
        with e.forever() as leave:
            count, above = e.var(I64, 0), e.var(F64, 0.0)
            with e.loop(0, self.blocks) as block, self._if_above(block, bound.get()):
                numbers, sum_ = e.var(vec(I32, LANES), 0), e.var(vec(F32, LANES), 0.0)
                with self._block(block) as c:
                    weight = e.load(self.weights, vec(F32, LANES), c)
                    saved = weight >= bound.get()
                    numbers.add(saved.zext(I32))
                    sum_.add(e.select(saved, weight, e.f32(0.0, LANES)))
                count.add(e.sum(numbers.get()).sext(I64))
                above.add(e.sum(sum_.get()).widen())
            below = total - above.get()
            below = e.select(below > 0.0, below, e.const(F64, 0.0))
            enough = e.select(
                few, count.get() >= self.top_k, (below / total).narrow() <= self.spare
            )
            enough = e.select(by_count, enough, e.const(enough.type, 1))
            rest.set(below)
            result.set(e.select(enough & (count.get() <= MAXIMUM), bound.get(), e.f32(0.0)))
            leave(enough | (count.get() > MAXIMUM) | (bound.get() < MINIMUM))
            bound.set(bound.get() * LOWER)
        return result.get()

    def _if_above(self, block: Value, bound: Value) -> AbstractContextManager[None]:
        return self.e.when(self.e.load(self.maxima, F32, block) >= bound)

    def _block(self, block: Value) -> AbstractContextManager[Value]:
        """Return the vectors of a block, the last of a row's filled up with zeros."""
        e = self.e
        start = block * BLOCK
        stop = start + BLOCK
        return e.loop(start, e.select(stop < self.size, stop, self.size), LANES)

    def _gather(self, bound: Value, count: Var) -> None:
        """Gather those above the bound, in order."""
        e = self.e
        with e.loop(0, self.blocks) as block, self._if_above(block, bound), self._block(block) as c:
            saved = e.load(self.weights, vec(F32, LANES), c) >= bound
            with e.when(e.largest(saved.zext(I32)) > 0), e.loop(c, c + LANES) as i:
                weight = e.load(self.weights, F32, i)
                with e.when(weight >= bound):
                    self._put(count, i, e.read(self.logits, self.dtype, i), weight)

    def _put(self, count: Var, token: Value, logit: Value, weight: Value) -> None:
        e, location = self.e, count.get()
        e.store(self.result, token, location)
        e.store(self.result_logits, logit, location)
        e.store(self.result_weights, weight, location)
        count.add(1)

    def _sum(self, count: Var) -> Value:
        e, sum_ = self.e, self.e.var(F64, 0.0)
        with e.loop(0, count.get()) as i:
            sum_.add(e.load(self.result_weights, F32, i).widen())
        return sum_.get()

    def _keep_top(self, count: Var) -> None:
        """Keep those with fewer than `top_k` above them: of equals all, as in transformers."""
        e = self.e
        with e.loop(0, count.get()) as i:
            own = e.load(self.result_logits, F32, i)
            above = self._number(count, lambda _, logit, __: logit > own)
            e.store(self.ranks, (above < self.top_k).zext(I32), i)
        self._keep(count, e.const(I32, 1))

    def _keep_nucleus(self, count: Var, total: Value, rest: Value) -> None:
        """The fewest that have the rest of `total`; of equals the first. The sum from below says
        how much of the tail may go.
        """
        e = self.e
        number = e.const(vec(I32, LANES), list(range(LANES)))
        with e.loop(0, count.get()) as i:
            own, location = e.load(self.result_weights, F32, i), i.trunc(I32)
            below = self._number(
                count,
                lambda j, _, weight: (
                    (weight < own) | (weight.eq(own) & (number + j.trunc(I32) > location))
                ),
            )
            e.store(self.ranks, below.trunc(I32), i)
            e.store(self.order, location, below)
        sum_, gone = e.var(F64), e.var(I32, 0)
        sum_.set(rest)
        with e.loop(0, count.get() - 1) as rank:  # the best one stays
            weight = e.load(self.result_weights, F32, e.load(self.order, I32, rank).sext(I64))
            sum_.add(weight.widen())
            gone.add(((sum_.get() / total).narrow() <= self.spare).zext(I32))
        self._keep(count, gone.get())

    def _number(self, count: Var, counts: Callable[[Value, Value, Value], Value]) -> Value:
        """Count of how many of those found it is true, by the number of the first of a vector,
        logits, weights.
        """
        e, lanes = self.e, vec(F32, LANES)
        result = e.var(vec(I32, LANES), 0)
        for j, mask in e.spans(0, count.get(), LANES):
            logits, weights = (
                e.load(a, lanes, j) for a in (self.result_logits, self.result_weights)
            )
            true = counts(j, logits, weights)
            result.add((true if mask is None else true & mask).zext(I32))
        return e.sum(result.get()).sext(I64)

    def _keep(self, count: Var, minimum: Value) -> None:
        """Keep those of at least this rank, in order."""
        e, before = self.e, count.get()
        count.set(0)
        with e.loop(0, before) as i, e.when(e.load(self.ranks, I32, i) >= minimum):
            logit, weight = (e.load(a, F32, i) for a in (self.result_logits, self.result_weights))
            self._put(count, e.load(self.result, I64, i), logit, weight)

    def _pick(self, count: Var, token: Var) -> None:
        """One of those kept that are likely enough beside the best."""
        e, total, location = self.e, self.e.var(F64, 0.0), self.e.var(I64, 0)
        for is_last in (False, True):
            goal = self.point * total.get()
            sum_, over = e.var(F64, 0.0), e.var(I64, 0)
            with e.loop(0, count.get()) as i:
                weight = e.load(self.result_weights, F32, i)
                with e.when(weight >= self.min_p):
                    if is_last:
                        self._pass(i, weight, goal, sum_, over, location)
                    else:
                        total.add(weight.widen())
        token.set(e.load(self.result, I64, location.get()))
