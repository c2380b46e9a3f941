"""Attention of few rows to many keys, read where they lie: in the pages of a cache.

    out[t, h] = sum_s p_s v_s,  p = softmax over first_t <= s <= last_t of scale q[t, h] . k_s

Row s of the past is row s % 32 of page pages[s / 32]. A unit is one token, one group of heads that
share keys and values, and one of `splits` runs of pages; a page is read once for all heads of its
group. Page by page: scores of its keys, the softmax as it goes along (arXiv:1805.02867), values
added up. With several splits each leaves its sum, its largest score and its total, and
`emit_combine` puts them together (arXiv:2307.08691, section 3.2).
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I32, I64, SIZES, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.kv_rows import read_half, rotated
from mtmd.kernels.quantization.kv_rows import BLOCK, CACHE_TYPES, ROW_TYPES, part_types

PAGE = 32
LANES = 16
LINE = 64  # bytes that memory is asked for at once
MAX_HEAD = 640  # values: q and sums of a unit's heads stay in the second cache
FEW = 2  # pages of a split, at least: fewer are not worth the putting together
ROOM = 16  # float32 before a split's sum, that hold its largest score and its total
NOTHING, LOWEST = float("-inf"), -3.4028234663852886e38


def padded(size: int, span: int = LANES) -> int:
    return -(-size // span) * span


def emit_attention(
    e: Emitter,
    dtypes: tuple[str, str, str],
    size: int,
    value: int,
    heads: int,
    capped: bool,
    tile: int,
    masked: bool = False,
) -> None:
    """`dtypes` of q, of keys and values (also one of `CACHE_TYPES`, then strides of keys and
    values are in bytes), and of the result; K = `size`, V = `value`, `heads` of a
    group; `tile`: float32 vectors that the CPU holds besides what it reads.

    args: q, q token, q head; keys, values, their token (one stride), keys' group, values' group;
    pages (int64), bounds (int32 [T, 2]); G, splits; out, out token, out head; parts (float32);
    scale, softcap; the most splits that a longer past is cut into, from which the length of one
    follows; if `masked`, what is added to the capped scores of all heads (float32 [T, rows of all
    pages]), and its token. Units: T * G * splits.
    """
    Attention(e, dtypes, size, value, heads, capped, tile, masked).write()


class Attention:
    """The kernel's parts. Memory of a call, float32: q [heads, K], scores [heads, 32], sums [heads,
    V], each row padded to whole vectors.
    """

    def __init__(
        self,
        e: Emitter,
        dtypes: tuple[str, str, str],
        size: int,
        value: int,
        heads: int,
        capped: bool,
        tile: int,
        masked: bool,
    ):
        self.masked = masked
        self.e, self.size, self.value, self.heads, self.capped = e, size, value, heads, capped
        self.q_type, stored, self.out_type = dtypes
        self.quant = stored in CACHE_TYPES
        self.key_type, self.value_type = part_types(stored)
        self.span = BLOCK if self.quant else LANES  # values of a key that are read in one turn
        # of a tile of scores: heads by keys; of a tile of sums: heads by vectors of V
        self.score_heads = min(heads, 4 if tile >= 16 else 1)
        self.score_keys = {1: 16, 2: 8}.get(self.score_heads, 4) if tile >= 16 else 4
        self.sum_heads = min(heads, 4, tile // 2)
        self.sum_columns = max(min(tile // self.sum_heads, padded(value, self.span) // LANES), 1)
        self.q_width, self.width = padded(size, self.span), padded(value, self.span)
        self.q = e.local(F32, heads * self.q_width)
        self.scores = e.local(F32, heads * PAGE)
        self.sums = e.local(F32, heads * self.width)
        self.best = [e.var(F32) for _ in range(heads)]
        self.total = [e.var(F32) for _ in range(heads)]
        self.shrink = [e.var(F32) for _ in range(heads)]

    def write(self) -> None:
        e = self.e
        self.keys, self.values, self.step = e.arg_ptr(3), e.arg_ptr(4), e.arg(5)
        pages, bounds, groups, splits = e.arg_ptr(8), e.arg_ptr(9), e.arg(10), e.arg(11)
        maximum = e.arg(18)
        with e.loop(e.first, e.last) as unit:
            row, split = unit // splits, unit % splits
            t, g = row // groups, row % groups
            low = e.load(bounds, I32, t * 2).sext(I64)
            high = e.load(bounds, I32, t * 2 + 1).sext(I64)
            first, count = low // PAGE, high // PAGE - low // PAGE + 1
            each = (count + maximum - 1) // maximum
            each = e.select(each < FEW, e.i64(FEW), each)
            begin = split * each
            end = e.select(begin + each < count, begin + each, count)
            self._begin(t, g)
            with e.when(low <= high), e.loop(first + begin, first + end) as page:
                # Keys and values of the page after this one are asked for meanwhile
                after = e.minimum(page + 1, first + end - 1)
                at, then = (e.load(pages, I64, i) * PAGE * self.step for i in (page, after))
                keys, values = g * e.arg(6), g * e.arg(7)
                self._scores(at + keys, then + keys)
                self._softmax(page * PAGE, low, high, t)
                here = e.maximum(low - page * PAGE, 0), e.minimum(high - page * PAGE + 1, PAGE)
                self._add_values(at + values, then + values, *here)
            self._end(t, g, split, splits, groups)

    def _begin(self, t: Value, g: Value) -> None:
        e = self.e
        q, token, head, scale = e.arg_ptr(0), e.arg(1), e.arg(2), e.arg_f32(16)
        zero = e.f32(0.0, LANES)
        for h in range(self.heads):
            at = t * token + (g * self.heads + h) * head
            vectors = [
                (c, e.read(q, self.q_type, at + c, LANES, mask) * scale)
                for c, mask in self._columns(self.size)
            ]
            for c, result in self._rotated(vectors, self.key_type):
                e.store(self.q, result, h * self.q_width + c)
            for c, _ in self._columns(self.value):
                e.store(self.sums, zero, h * self.width + c)
            self.best[h].set(NOTHING)
            self.total[h].set(0.0)

    def _columns(self, size: int) -> list[tuple[int, Value | None]]:
        """Do what the function does; of a quantized cache, for whole blocks."""
        e, columns = self.e, _columns(self.e, size)
        if len(columns) * LANES < padded(size, self.span):
            columns.append((len(columns) * LANES, e.mask(e.i64(0), LANES)))
        return columns

    def _rotated(self, vectors: list[tuple[int, Value]], stored: str) -> list[tuple[int, Value]]:
        """Queries or results, by column, as keys or values are coded that are `stored` so."""
        turned = self.quant and ROW_TYPES[stored].rotated
        return _rotated(self.e, vectors) if turned else vectors

    def _ask(self, ptr: Value, stored: str, row: Value, count: int) -> None:
        """Prefetch the lines of `count` numbers of a cache, which are `stored` in this type."""
        size = 1 if self.quant else SIZES[stored]
        whole = ROW_TYPES[stored].row_bytes(count) if self.quant else count * size
        for byte in range(0, whole, LINE):
            self.e.prefetch(ptr.at(row * size + byte), near=2)

    def _read(
        self,
        ptr: Value,
        stored: str,
        row: Value,
        count: int,
        c: Value | int,
        half: int,
        mask: Value | None,
    ) -> Value:
        """The vector `half` of the span at column c of a row of `count` numbers of a cache, which
        are `stored` in this type.
        """
        if self.quant:
            block = self.e.i64(c) // BLOCK
            return read_half(self.e, stored, count, ptr.at(row), block, half == 1)
        return self.e.read(ptr, stored, row + c, LANES, mask)

    def _scores(self, at: Value, then: Value) -> None:
        """scores[h, s] = q[h] . k[s] for the page whose first key is `at`; of the one at `then`,
        keys are asked for.
        """
        e, many = self.e, self.score_keys
        with e.loop(0, PAGE, many) as s:
            for i in range(many):
                self._ask(self.keys, self.key_type, then + (s + i) * self.step, self.size)
            for h in range(0, self.heads, self.score_heads):
                heads = range(h, min(h + self.score_heads, self.heads))
                sums = [[e.var(vec(F32, LANES), 0.0) for _ in range(many)] for _ in heads]

                def add(
                    c: Value | int,
                    mask: Value | None,
                    count: int,
                    heads: range = heads,
                    sums: list[list[Var]] = sums,
                    s: Value = s,
                ) -> None:
                    for half in range(-(-count // LANES)):
                        rows = [
                            e.load(
                                self.q, vec(F32, LANES), e.i64(c) + i * self.q_width + half * LANES
                            )
                            for i in heads
                        ]
                        for i in range(many):
                            row_at = at + (s + i) * self.step
                            key = self._read(
                                self.keys, self.key_type, row_at, self.size, c, half, mask
                            )
                            for row, sum_ in zip(rows, sums, strict=True):
                                sum_[i].set(e.fma(row, key, sum_[i].get()))

                whole = self.size // self.span * self.span
                if whole > 4 * LANES:
                    with e.loop(0, whole, self.span) as c:
                        add(c, None, self.span)
                for column in range(0 if whole <= 4 * LANES else whole, self.size, self.span):
                    rest = self.span if self.quant else min(self.size - column, self.span)
                    mask = e.mask(e.i64(rest), LANES) if rest < LANES else None
                    add(column, mask, rest)
                for i, sum_ in zip(heads, sums, strict=True):
                    e.store(self.scores, e.sums([v.get() for v in sum_]), s + i * PAGE)

    def _softmax(self, first: Value, low: Value, high: Value, t: Value) -> None:
        """Scores become weights, relative to the largest score so far. A mask may hide all keys of
        a page, and of a split.
        """
        e = self.e
        steps = e.const(vec(I32, PAGE), list(range(PAGE)))
        begin, end = ((x - first).trunc(I32).splat(PAGE) for x in (low, high))
        seen = (steps >= begin) & (steps <= end)
        for h in range(self.heads):
            result = e.load(self.scores, vec(F32, PAGE), h * PAGE)
            if self.capped:
                cap = e.arg_f32(17)
                result = e.tanh(result / cap) * cap
            if self.masked:
                result = result + e.load(e.arg_ptr(19), vec(F32, PAGE), t * e.arg(20) + first)
            result = e.select(seen, result, e.f32(NOTHING, PAGE))
            last = self.best[h].get()
            best = e.maximum(e.largest(result), last)
            top = e.maximum(best, LOWEST) if self.masked else best
            weights = e.exp(result - top)
            shrink = e.exp(last - top)
            e.store(self.scores, weights, h * PAGE)
            self.total[h].set(e.fma(self.total[h].get(), shrink, e.sum(weights)))
            self.best[h].set(best)
            self.shrink[h].set(shrink)

    def _add_values(self, at: Value, then: Value, begin: Value, end: Value) -> None:
        """sums[h] = sums[h] * shrink[h] + weights[h] @ v; of the page at `then`, values are asked
        for. Only those of the keys that are seen are read: a weight of 0 times what is no number,
        as another sequence may have left it there, is none either.
        """
        e, width = self.e, self.width
        columns = self._columns(self.value)
        for h in range(0, self.heads, self.sum_heads):
            heads = range(h, min(h + self.sum_heads, self.heads))
            for first in range(0, len(columns), self.sum_columns):
                part = columns[first : first + self.sum_columns]
                sums = []
                for i in heads:
                    shrink = self.shrink[i].get()
                    sums.append(
                        [
                            e.var(
                                vec(F32, LANES),
                                e.load(self.sums, vec(F32, LANES), i * width + c) * shrink,
                            )
                            for c, _ in part
                        ]
                    )
                with e.loop(begin, end) as s:
                    if h == first == 0:
                        self._ask(self.values, self.value_type, then + s * self.step, self.value)
                    row_at = at + s * self.step
                    of = self.values, self.value_type, row_at, self.value
                    rows = [self._read(*of, c, c % self.span > 0, mask) for c, mask in part]
                    for i, sum_ in zip(heads, sums, strict=True):
                        weight = e.load(self.scores, F32, s + i * PAGE).splat(LANES)
                        for row, var in zip(rows, sum_, strict=True):
                            var.set(e.fma(weight, row, var.get()))
                for i, sum_ in zip(heads, sums, strict=True):
                    for (c, _), var in zip(part, sum_, strict=True):
                        e.store(self.sums, var.get(), i * width + c)

    def _end(self, t: Value, g: Value, split: Value, splits: Value, groups: Value) -> None:
        e, width = self.e, self.width
        out, token, head, parts = e.arg_ptr(12), e.arg(13), e.arg(14), e.arg_ptr(15)
        with e.either(splits.eq(1)) as (whole, shared):
            with whole:
                for h in range(self.heads):
                    factor = _share(e, self.total[h].get())
                    to = t * token + (g * self.heads + h) * head
                    columns = self._columns(self.value)
                    vectors = [
                        (c, e.load(self.sums, vec(F32, LANES), h * width + c) * factor)
                        for c, _ in columns
                    ]
                    results = self._rotated(vectors, self.value_type)
                    for (c, result), (_, mask) in zip(results, columns, strict=True):
                        e.write(out, self.out_type, to + c, result, mask)
            with shared:
                for h in range(self.heads):
                    number = (t * groups + g) * self.heads + h
                    to = (number * splits + split) * (ROOM + padded(self.value))
                    e.store(parts, self.best[h].get(), to)
                    e.store(parts, self.total[h].get(), to + 1)
                    vectors = [
                        (c, e.load(self.sums, vec(F32, LANES), h * width + c))
                        for c, _ in self._columns(self.value)
                    ]
                    for c, result in self._rotated(vectors, self.value_type):
                        if c < self.value:
                            e.store(parts, result, to + ROOM + c)


def _columns(e: Emitter, size: int) -> list[tuple[int, Value | None]]:
    """Return where vectors begin in a row of a size that is known, with the last one's mask."""
    rest = size % LANES
    result: list[tuple[int, Value | None]] = [(c, None) for c in range(0, size - rest, LANES)]
    return [*result, (size - rest, e.mask(e.i64(rest), LANES))] if rest else result


def _rotated(e: Emitter, vectors: list[tuple[int, Value]]) -> list[tuple[int, Value]]:
    """Blocks of two vectors each."""
    result = []
    for (c, low), (d, high) in zip(vectors[::2], vectors[1::2], strict=True):
        low, high = rotated(e, low, high)
        result += [(c, low), (d, high)]
    return result


def _share(e: Emitter, total: Value) -> Value:
    """1 / total, 0 for a row that saw nothing."""
    return e.select(total > 0.0, 1.0 / total, e.select(total.eq(0.0), e.f32(0.0), total))


def emit_combine(e: Emitter, out: str, value: int) -> None:
    """Emit the sum of what splits left

    args: parts, splits, out, out token, out head, H. Units: T * H.
    """
    parts, splits, to_ptr = e.arg_ptr(0), e.arg(1), e.arg_ptr(2)
    token, head, heads = e.arg(3), e.arg(4), e.arg(5)
    width = ROOM + padded(value)
    best, total = e.var(F32), e.var(F32)
    sums = e.local(F32, padded(value))
    with e.loop(e.first, e.last) as unit:
        best.set(NOTHING)
        total.set(0.0)
        start = unit * splits
        with e.loop(start, start + splits) as part:
            best.set(e.maximum(e.load(parts, F32, part * width), best.get()))
        for c, _ in _columns(e, value):
            e.store(sums, e.f32(0.0, LANES), c)
        with e.loop(start, start + splits) as part:
            at = part * width
            result = e.load(parts, F32, at + 1)
            with e.when(result.ne(0.0)):
                weight = e.exp(e.load(parts, F32, at) - best.get())
                total.set(e.fma(result, weight, total.get()))
                for c, _ in _columns(e, value):
                    more = e.load(parts, vec(F32, LANES), at + ROOM + c)
                    e.store(sums, e.fma(more, weight, e.load(sums, vec(F32, LANES), c)), c)
        t = unit // heads
        to = t * token + (unit - t * heads) * head
        factor = _share(e, total.get())
        for c, mask in _columns(e, value):
            e.write(to_ptr, out, to + c, e.load(sums, vec(F32, LANES), c) * factor, mask)
