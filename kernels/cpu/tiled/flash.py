"""Flash attention of many rows.

    out[t, h] = sum_s p_s v_s,  p = softmax over the keys s that row t sees of scale q[t, h] . k_s

A unit is a block of tokens with all heads that share keys and values: `rows` of queries. Keys come
in blocks; of each block, keys and values are laid out once for the whole unit, and then 32 rows at
a time: their scores, the softmax as it goes along (arXiv:1805.02867, arXiv:2205.14135), the values
added up. So no more than 32 x KEYS scores exist, a thread's memory stays in its second cache, and
nothing is packed for longer than a unit.

Products come in three forms with the same layout of what is multiplied by (`Form.kind`):
- tiles: AMX, 32 x 32 results at a time
- pairs: AVX512-BF16's dot products of two
- single: float32, for operands of float32 too
In the first two, weights are rounded to bfloat16 for the product with the values, as the op says;
sums and totals are float32.

Exponents count in powers of two: scores times scale / ln 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e as euler
from math import log2
from typing import Any

from mtmd.kernels.cpu.native.attention import PAGE
from mtmd.kernels.cpu.native.emit import F32, I16, I32, I64, Emitter, Value, Var, vec

KEYS = 128  # of a block
STEP = 32  # rows, and keys, at a time
SEPARATE = 16  # float32 between two rows of scores, so that rows do not share places in a cache
MAX_ROWS = 512
LOG2_E = log2(euler)
NOTHING, LOWEST = float("-inf"), -3.4028234663852886e38
# Arguments by place
Q, Q_BATCH, Q_TOKEN, Q_HEAD, K, K_BATCH, K_TOKEN, K_HEAD = range(8)
V, V_BATCH, V_TOKEN, V_HEAD, OUT, OUT_BATCH, OUT_TOKEN, OUT_HEAD = range(8, 16)
MASK, MASK_BATCH, MASK_HEAD, MASK_TOKEN, BOUNDS, BOUNDS_BATCH, PAGES = range(16, 23)
TOKENS, ALL_KEYS, GROUPS, SHARED, EACH, BLOCKS, SCALE, CAP, WINDOW, CAUSAL, LOCATIONS = range(
    23, 34
)


@dataclass(frozen=True)
class Form:
    """Describes what is compiled in: K = `size`, V = `value`; `mask` is its type, which
    is added before the cap with `mask_capped`; `scaled`: scores
    are used as they are, times a scale above 0, without a mask or a cap. `paged`: key s lies in row
    s % PAGE of page pages[s / PAGE] (int64), which is read where it is. `lanes` of a float32
    vector, `rows` x `columns` results at a time (not for tiles).
    """

    kind: str
    dtype: str
    size: int
    value: int
    mask: str | None
    mask_capped: bool
    capped: bool
    scaled: bool
    lanes: int
    rows: int
    columns: int
    paged: bool = False

    @property
    def pairs(self) -> bool:
        return self.kind != "single"

    @property
    def item(self) -> int:
        """Bytes of an operand of a product."""
        return 2 if self.pairs else 4

    @property
    def wide(self) -> int:
        """Numbers of a row of q, whole vectors of operands."""
        each = self.lanes * (2 if self.pairs else 1)
        return -(-self.size // each) * each

    @property
    def row_groups(self) -> tuple[tuple[int, int, int], ...]:
        """Return where groups of rows whose scores are computed at once begin and end, and their
        size. With the 16 registers of AVX2, 12 sums hide what a product takes, where 8 just would.
        """
        if self.kind == "single" and self.lanes == 8:
            return (0, 24, 6), (24, STEP, 4)
        return ((0, STEP, self.rows),)

    @property
    def value_columns(self) -> int:
        """Return the vectors of values that are added up at once: with AVX2, 12 sums, too."""
        return 3 if self.kind == "single" and self.lanes == 8 else self.columns

    @property
    def tiles(self) -> int:
        """Vectors of a row of values."""
        return -(-self.value // self.lanes)

    def locations(self, rows: int) -> tuple[dict[str, int], int]:
        """Return where a thread's memory for units of so many rows lies, in bytes, and its size."""
        rows = -(-rows // STEP) * STEP
        values = self.tiles * self.lanes
        sizes = {
            "keys": KEYS * self.wide * self.item,
            "values": KEYS * values * self.item,
            "scores": STEP * (KEYS + SEPARATE) * 4,
            "shift": STEP * 4,
            "shrink": STEP * 4,
            "q": rows * self.wide * self.item,
            "sums": rows * values * 4,
            "best": rows * 4,
            "total": rows * self.lanes * 4,
            "low": rows * 4,
            "high": rows * 4,
        }
        result, at = {}, 0
        for name, size in sizes.items():
            result[name] = at
            at += -(-size // 64) * 64
        return result, at


def emit_flash(e: Emitter, form: Form) -> None:
    """The arguments are above; strides count elements; from LOCATIONS on, those of a thread's
    memory. Units: B * G * BLOCKS, of EACH tokens.
    """
    Flash(e, form).write()


class Flash:
    def __init__(self, e: Emitter, form: Form):
        self.e, self.form = e, form
        names = form.locations(STEP)[0]
        self.at = {name: e.scratch.at(e.arg(LOCATIONS + i)) for i, name in enumerate(names)}
        self.lanes = form.lanes
        self.row = KEYS + SEPARATE  # float32 from one row of scores to the next

    def write(self) -> None:
        e, tiles = self.e, self.form.kind == "tiles"
        if tiles:
            e.tiles_begin()
        with e.loop(e.first, e.last) as unit:
            self._unit(unit)
        if tiles:
            e.tiles_end()

    def _unit(self, unit: Value) -> None:
        e = self.e
        blocks, groups, each = e.arg(BLOCKS), e.arg(GROUPS), e.arg(EACH)
        pair = unit // blocks
        batch, group = pair // groups, pair % groups
        # The last tokens see the most keys where the past is all they see: they come first
        start = (blocks - 1 - unit % blocks) * each
        left = e.arg(TOKENS) - start
        rows = e.select(left < each, left, each) * e.arg(SHARED)
        padded = (rows + STEP - 1) // STEP * STEP
        first, last = self._begin(batch, group, start, rows, padded)
        keys = e.arg_ptr(K).at(batch * e.arg(K_BATCH) + group * e.arg(K_HEAD), self._scalar)
        values = e.arg_ptr(V).at(batch * e.arg(V_BATCH) + group * e.arg(V_HEAD), self._scalar)
        with e.loop(first, last + 1, KEYS) as key:
            end = e.minimum(key + (KEYS - 1), last)
            count = (end - key) // STEP * STEP + STEP
            self._lay_keys(keys, key, end, count)
            self._lay_values(values, key, end, count)
            with e.loop(0, padded, STEP) as row:
                self._step(batch, group, start, rows, row, key, count)
        self._end(batch, group, start, rows)

    @property
    def _scalar(self) -> Any:
        return F32 if self.form.dtype == "f32" else I16

    # A unit's rows ---------------------------------------------------------------------------

    def _begin(
        self, batch: Value, group: Value, start: Value, rows: Value, padded: Value
    ) -> tuple[Value, Value]:
        """Queries, sums of 0, and which keys each row sees: rows beyond the last are like it. The
        first and the last key that any of them sees.
        """
        e, form = self.e, self.form
        shared, tokens, keys = e.arg(SHARED), e.arg(TOKENS), e.arg(ALL_KEYS)
        first, last = e.var(I64, 1 << 62), e.var(I64, -1)
        behind = keys - tokens
        with e.loop(0, padded) as row:
            real = e.minimum(row, rows - 1)
            token = start + real // shared
            head = group * shared + real % shared
            q = batch * e.arg(Q_BATCH) + token * e.arg(Q_TOKEN) + head * e.arg(Q_HEAD)
            self._copy_query(e.arg_ptr(Q).at(q, self._scalar), row * form.wide)
            for column in range(form.tiles):
                e.store(
                    self.at["sums"],
                    e.f32(0.0, self.lanes),
                    (row * form.tiles + column) * self.lanes,
                )
            e.store(self.at["total"], e.f32(0.0, self.lanes), row * self.lanes)
            e.store(self.at["best"], e.f32(NOTHING), row)
            here = token + behind
            low = e.maximum(here - e.arg(WINDOW) + 1, 0)
            high = e.minimum(e.select(e.arg(CAUSAL).ne(0), here, keys - 1), keys - 1)
            lows, highs = e.var(I64, low), e.var(I64, high)
            with e.when(e.arg(BOUNDS).ne(0)):
                bounds = batch * e.arg(BOUNDS_BATCH) + token * 2
                lows.set(e.maximum(e.load(e.arg_ptr(BOUNDS), I32, bounds).sext(I64), low))
                highs.set(e.minimum(e.load(e.arg_ptr(BOUNDS), I32, bounds + 1).sext(I64), high))
            low, high = lows.get(), highs.get()
            e.store(self.at["low"], e.minimum(low, keys).trunc(I32), row)
            e.store(self.at["high"], e.maximum(high, -1).trunc(I32), row)
            with e.when(low <= high):
                first.set(e.minimum(low, first.get()))
                last.set(e.maximum(high, last.get()))
        return first.get(), last.get()

    def _copy_query(self, q: Value, to: Value) -> None:
        e, form = self.e, self.form
        if form.pairs:
            kind = vec(I16, 2 * self.lanes)
            for column, mask in self._columns(form.size, 2 * self.lanes):
                value = (
                    e.load(q, kind, column)
                    if mask is None
                    else e.masked_load(q, kind, e.i64(column), mask)
                )
                e.store(self.at["q"], value, to + column)
        else:
            for column, mask in self._columns(form.size, self.lanes):
                e.store(self.at["q"], e.read(q, form.dtype, column, self.lanes, mask), to + column)

    def _columns(self, size: int, lanes: int) -> list[tuple[int, Value | None]]:
        """Return where vectors begin in a row of a size that is known, with the last one's mask."""
        e, rest = self.e, size % lanes
        result: list[tuple[int, Value | None]] = [(c, None) for c in range(0, size - rest, lanes)]
        return [*result, (size - rest, e.mask(e.i64(rest), lanes))] if rest else result

    def _end(self, batch: Value, group: Value, start: Value, rows: Value) -> None:
        e, form, shared = self.e, self.form, self.e.arg(SHARED)
        with e.loop(0, rows) as row:
            total = e.sum(e.load(self.at["total"], vec(F32, self.lanes), row * self.lanes))
            share = e.select(total.eq(0.0), e.f32(0.0), 1.0 / total)
            head = group * shared + row % shared
            to = batch * e.arg(OUT_BATCH) + (start + row // shared) * e.arg(OUT_TOKEN)
            to = to + head * e.arg(OUT_HEAD)
            for column, mask in self._columns(form.value, self.lanes):
                location = row * (form.tiles * self.lanes) + column
                value = e.load(self.at["sums"], vec(F32, self.lanes), location) * share
                e.write(e.arg_ptr(OUT), form.dtype, to + column, value, mask)

    # A block of keys -------------------------------------------------------------------------

    def _lay_keys(self, keys: Value, key: Value, end: Value, count: Value) -> None:
        """Vectors of one number, or two neighbours, of as many keys as lanes: [key / lanes, number,
        lanes]. In place of keys after `end`, that one again: none of them is seen.
        """
        e, form, lanes, token = self.e, self.form, self.lanes, self.e.arg(K_TOKEN)
        numbers = form.size // 2 if form.pairs else form.size
        span = form.wide // 2 if form.pairs else form.wide
        kind = vec(I32 if form.pairs else F32, lanes)

        def part(rows: list[Value], to: Value, column: Value | int, mask: Value | None) -> None:
            vectors = []
            for row in rows:
                if not form.pairs:
                    vectors.append(e.read(row, form.dtype, column, lanes, mask))
                    continue
                location = row.at(e.i64(column) * 2, I16)
                vectors.append(
                    e.load(location, kind, 0, align=2)
                    if mask is None
                    else e.masked_load(location, kind, 0, mask)
                )
            for i, vector in enumerate(e.transposed(vectors)):
                e.store(to, vector, (e.i64(column) + i) * lanes)

        with e.loop(0, count, lanes) as group:
            rows = [
                keys.at(self._line(e.minimum(key + group + i, end)) * token, self._scalar)
                for i in range(lanes)
            ]
            to = self.at["keys"].at(group * span, I32)
            whole = numbers // lanes
            if whole > 2:
                with e.loop(0, whole * lanes, lanes) as at:
                    part(rows, to, at, None)
            for column, mask in self._columns(numbers, lanes):
                if whole <= 2 or mask is not None:
                    part(rows, to, column, mask)

    def _lay_values(self, values: Value, key: Value, end: Value, count: Value) -> None:
        """Vectors of numbers of one key, or of two neighbours: [number / lanes, key, lanes]. Blocks
        may have keys that only some rows see: a weight of 0 times what is no number, as another
        sequence may have left it, is none either. That becomes 0, and its key no number, so that
        the rows that see it say so.
        """
        e, form, lanes, token = self.e, self.form, self.lanes, self.e.arg(V_TOKEN)
        each = 2 if form.pairs else 1
        with e.loop(0, count, each) as at:
            rows = [
                values.at(self._line(e.minimum(key + at + i, end)) * token, self._scalar)
                for i in range(each)
            ]
            lost = [e.const(vec(I32, lanes), 0) for _ in rows]
            for column, mask in self._columns(form.value, lanes):
                to = (at // each + column // lanes * (KEYS // each)) * lanes
                numbers = []
                for i, row in enumerate(rows):
                    number, exponent = self._number(row, column, mask)
                    gone = (number & exponent).eq(exponent)
                    numbers.append(e.select(gone, e.const(number.type, 0), number))
                    lost[i] = lost[i] | gone.sext(I32)
                both = numbers[0] | (numbers[1] << 16) if form.pairs else numbers[0]
                e.store(self.at["values"], both, to)
            either = lost[0] | lost[1] if form.pairs else lost[0]
            with e.when(e._reduce(either, lambda a, b: a | b).ne(0)):
                for i, part in enumerate(lost):
                    with e.when(e._reduce(part, lambda a, b: a | b).ne(0)):
                        self._lose_key(at + i)

    def _number(self, row: Value, column: int, mask: Value | None) -> tuple[Value, int]:
        """Values of a key as whole numbers, and the bits that all are set of what is none."""
        e, lanes = self.e, self.lanes
        if not self.form.pairs:
            value = e.read(row, self.form.dtype, column, lanes, mask)
            return value.bits(vec(I32, lanes)), 0x7F800000
        value = (
            e.load(row, vec(I16, lanes), column)
            if mask is None
            else e.masked_load(row, vec(I16, lanes), e.i64(column), mask)
        )
        return value.zext(I32), 0x7F80

    def _lose_key(self, at: Value) -> None:
        """Make the first number of a key that is laid out none, of a pair both."""
        lanes, form = self.lanes, self.form
        span = form.wide // 2 if form.pairs else form.wide
        to = self.at["keys"].at(at // lanes * lanes * span, I32)
        self.e.store(to, self.e.const(I32, 0x7FC07FC0 if form.pairs else 0x7FC00000), at % lanes)

    def _line(self, key: Value) -> Value:
        """Return the row of memory that a key and its value lie in."""
        if not self.form.paged:
            return key
        return self.e.load(self.e.arg_ptr(PAGES), I64, key // PAGE) * PAGE + key % PAGE

    # 32 rows and a block of keys -------------------------------------------------------------

    def _step(
        self,
        batch: Value,
        group: Value,
        start: Value,
        rows: Value,
        row: Value,
        key: Value,
        count: Value,
    ) -> None:
        """Take one step. Where all of the rows see all of the keys, none is asked about; keys that
        none of them sees are left out.
        """
        e = self.e
        low, high = (e.load(self.at[name], vec(I32, STEP), row) for name in ("low", "high"))
        minimum, maximum = e._reduce(low, e.minimum).sext(I64), e._reduce(high, e.maximum).sext(I64)
        begin = e.maximum(minimum - key, 0) // STEP * STEP
        end = e.minimum((maximum - key) // STEP * STEP + STEP, count)
        with e.when((maximum >= key) & (begin < end)):
            self._scores(row, begin, end)
            inner = e.largest(low).sext(I64), e._reduce(high, e.minimum).sext(I64)
            all_seen = (inner[0] <= key + begin) & (inner[1] >= key + end - 1)
            with e.either(all_seen) as (yes, no):
                with yes:
                    self._best(batch, group, start, rows, row, key, begin, end, False)
                with no:
                    self._best(batch, group, start, rows, row, key, begin, end, True)
            self._shrink(row)
            self._weights(row, begin, end)
            self._mix(row, begin, end)

    def _scores(self, row: Value, begin: Value, end: Value) -> None:
        e, form, lanes = self.e, self.form, self.lanes
        q = self.at["q"].at(row * (form.wide * form.item))
        span = form.wide // 2 if form.pairs else form.wide
        if form.kind == "tiles":
            with e.loop(begin, end, 32) as key:
                for tile in range(4):
                    e.tile_zero(tile)
                b = self.at["keys"].at(key * span, I32)
                for k in range(span // 16):
                    self._dot_tiles(
                        (q.at(k * 64), q.at(k * 64 + 16 * form.wide * 2)),
                        form.wide * 2,
                        (b.at(k * 1024), b.at(k * 1024 + span * 64)),
                    )
                self._tiles_out(self.at["scores"].at(key, F32), self.row * 4, 2)
            return
        numbers = -(-form.size // 2) if form.pairs else form.size
        with e.loop(begin, end, lanes * form.columns) as key:
            columns = [
                self.at["keys"].at((key + i * lanes) * span, I32) for i in range(form.columns)
            ]
            for start, stop, rows in form.row_groups:
                with e.loop(start, stop, rows) as r:
                    lines = [q.at((r + i) * span, I32) for i in range(rows)]
                    sums = [[e.var(vec(F32, lanes), 0.0) for _ in columns] for _ in lines]
                    self._dot(lines, columns, sums, e.i64(0), e.i64(numbers))
                    for i, line in enumerate(sums):
                        for j, var in enumerate(line):
                            to = (r + i) * self.row + key + j * lanes
                            e.store(self.at["scores"], var.get(), to)

    def _mix(self, row: Value, begin: Value, end: Value) -> None:
        """Weights times values, added to the sums."""
        e, form, lanes = self.e, self.form, self.lanes
        width, item = form.tiles * lanes, form.item
        each = 2 if form.pairs else 1
        sums, scores = self.at["sums"].at(row * width, F32), self.at["scores"]
        spans = KEYS // each * lanes * 4  # bytes of a column of vectors of values
        if form.kind == "tiles":
            for tile in range(0, form.tiles, 2):
                columns = min(2, form.tiles - tile)
                for i in range(2):
                    for j in range(columns):
                        to = sums.at(i * 16 * width + (tile + j) * 16, F32)
                        e.tile_load(i * 2 + j, to, width * 4)
                with e.loop(begin, end, 32) as key:
                    a, b = scores.at(key * item), self.at["values"].at(key * (lanes * 2))
                    self._dot_tiles(
                        (a, a.at(16 * self.row * 4)),
                        self.row * 4,
                        tuple(b.at((tile + j) * spans) for j in range(columns)),
                    )
                self._tiles_out(sums.at(tile * 16, F32), width * 4, columns)
            return
        for tile in range(0, form.tiles, form.value_columns):
            columns = min(form.value_columns, form.tiles - tile)
            vectors = [self.at["values"].at((tile + j) * spans) for j in range(columns)]
            with e.loop(0, STEP, form.rows) as r:
                lines = [scores.at((r + i) * self.row, F32) for i in range(form.rows)]
                locations = [
                    [(r + i) * width + (tile + j) * lanes for j in range(columns)]
                    for i in range(form.rows)
                ]
                results = [
                    [e.var(vec(F32, lanes), e.load(sums, vec(F32, lanes), at)) for at in line]
                    for line in locations
                ]
                self._dot(lines, vectors, results, begin // each, end // each)
                for line, vars_ in zip(locations, results, strict=True):
                    for at, var in zip(line, vars_, strict=True):
                        e.store(sums, var.get(), at)

    def _dot_tiles(self, a: tuple[Value, Value], stride: int, b: tuple[Value, ...]) -> None:
        e = self.e
        for j, part in enumerate(b):
            e.tile_load(6 + j, part)
        for i, part in enumerate(a):
            e.tile_load(4 + i, part, stride)
            for j in range(len(b)):
                e.tile_dot(i * 2 + j, 4 + i, 6 + j)

    def _tiles_out(self, to: Value, stride: int, columns: int) -> None:
        for i in range(2):
            for j in range(columns):
                self.e.tile_store(i * 2 + j, to.at(i * 16 * stride + j * 64), stride)

    def _dot(
        self, a: list[Value], b: list[Value], sums: list[list[Var]], begin: Value, end: Value
    ) -> None:
        """sums[i][j] += sum_k a[i][k] b[j][k], k from begin to end"""
        e, lanes = self.e, self.lanes
        with e.loop(begin, end) as k:
            columns = [e.load(part, vec(I32, lanes), k * lanes) for part in b]
            for row, line in zip(a, sums, strict=True):
                number = e.load(row, I32, k).splat(lanes)
                for column, var in zip(columns, line, strict=True):
                    if self.form.pairs:
                        wide = vec(I16, 2 * lanes)
                        var.set(e.dot_bf16(number.bits(wide), column.bits(wide), var.get()))
                    else:
                        real = vec(F32, lanes)
                        var.set(e.fma(number.bits(real), column.bits(real), var.get()))

    # Softmax ---------------------------------------------------------------------------------

    def _each(
        self, begin: Value, end: Value, work: Callable[[int, int, Value], None], row: Value
    ) -> None:
        """`work(i, lane, location)`: of four rows from `row` on, vector by vector."""
        e = self.e
        with e.loop(begin, end, STEP) as key:
            for i in range(4):
                for lane in range(0, STEP, self.lanes):
                    work(i, lane, (row + i) * self.row + key + lane)

    def _best(
        self,
        batch: Value,
        group: Value,
        start: Value,
        rows: Value,
        row: Value,
        key: Value,
        begin: Value,
        end: Value,
        limited: bool,
    ) -> None:
        """The largest score of each row to `shift`; what is not seen becomes -inf."""
        e, form, lanes, scores = self.e, self.form, self.lanes, self.at["scores"]
        steps = e.const(vec(I32, lanes), list(range(lanes)))
        with e.loop(0, STEP, 4) as r:
            best = [e.var(vec(F32, lanes), NOTHING) for _ in range(4)]
            low = [e.load(self.at["low"], I32, row + r + i).splat(lanes) for i in range(4)]
            high = [e.load(self.at["high"], I32, row + r + i).splat(lanes) for i in range(4)]
            masks = []
            if form.mask is not None:
                for i in range(4):
                    real = e.minimum(row + r + i, rows - 1)
                    token, shared = start + real // e.arg(SHARED), e.arg(SHARED)
                    at = batch * e.arg(MASK_BATCH) + token * e.arg(MASK_TOKEN)
                    at = at + (group * shared + real % shared) * e.arg(MASK_HEAD)
                    scalar = F32 if form.mask == "f32" else I16
                    masks.append(e.arg_ptr(MASK).at(at, scalar))
            with e.loop(begin, end, STEP) as at:
                for i in range(4):
                    for lane in range(0, STEP, lanes):
                        location = (r + i) * self.row + at + lane
                        score = e.load(scores, vec(F32, lanes), location)
                        here = key + at + lane
                        if not form.scaled:
                            score = self._changed(score, masks[i] if masks else None, here)
                        if limited:
                            number = here.trunc(I32).splat(lanes) + steps
                            seen = (number >= low[i]) & (number <= high[i])
                            score = e.select(seen, score, e.f32(NOTHING, lanes))
                        if limited or not form.scaled:
                            e.store(scores, score, location)
                        best[i].set(e.maximum(score, best[i].get()))
            folded = e.folded([var.get() for var in best], e.maximum)
            e.store(self.at["shift"], folded, r)

    def _changed(self, score: Value, mask: Value | None, key: Value) -> Value:
        """Scaled, capped and with the mask, in powers of two. Masks may be the lowest number there
        is, which has to stay one.
        """
        e, form, lanes = self.e, self.form, self.lanes
        score = score * e.arg_f32(SCALE)
        if form.mask_capped:
            score = self._masked(score, mask, key)
        if form.capped:
            cap = e.arg_f32(CAP)
            score = e.tanh(score / cap) * cap
        if not form.mask_capped:
            score = self._masked(score, mask, key)
        result = score * LOG2_E
        low = e.maximum(e.f32(LOWEST, lanes), result)
        return e.select(score >= LOWEST, low, result)

    def _masked(self, score: Value, mask: Value | None, key: Value) -> Value:
        if mask is None:
            return score
        assert self.form.mask is not None
        there = self.e.mask(self.e.maximum(self.e.arg(ALL_KEYS) - key, 0), self.lanes)
        return score + self.e.read(mask, self.form.mask, key, self.lanes, there)

    def _shrink(self, row: Value) -> None:
        """Return, from the largest scores of the block, what is to be taken off its scores
        (`shift`), and what sums and totals so far are to be multiplied by.
        """
        e, form, lanes = self.e, self.form, self.lanes
        factor = e.arg_f32(SCALE) * LOG2_E if form.scaled else e.f32(1.0)
        grown = e.var(F32, 0.0)
        for r in range(0, STEP, lanes):
            last = e.load(self.at["best"], vec(F32, lanes), row + r)
            best = e.load(self.at["shift"], vec(F32, lanes), r) * factor
            best = e.maximum(best, last)
            shift = e.maximum(best, LOWEST)
            shrink = e.exp2(last - shift, self._degree)
            # exactly 1 where nothing changes
            same = last.eq(shift)
            shrink = e.select(same, e.f32(1.0, lanes), shrink)
            e.store(self.at["best"], best, row + r)
            e.store(self.at["shift"], shift, r)
            e.store(self.at["shrink"], shrink, r)
            changed = e.select(same, e.f32(0.0, lanes), e.f32(1.0, lanes))
            grown.set(e.maximum(e.largest(changed), grown.get()))
        with e.when(grown.get() > 0.0), e.loop(0, STEP) as line:
            shrink = e.load(self.at["shrink"], F32, line).splat(lanes)
            for column in range(form.tiles):
                location = ((row + line) * form.tiles + column) * lanes
                value = e.load(self.at["sums"], vec(F32, lanes), location)
                e.store(self.at["sums"], value * shrink, location)

    @property
    def _degree(self) -> int:
        return 3 if self.form.pairs else 5

    def _weights(self, row: Value, begin: Value, end: Value) -> None:
        """Scores become weights where they are, and each row's total grows."""
        e, form, lanes, scores = self.e, self.form, self.lanes, self.at["scores"]
        factor = (e.arg_f32(SCALE) * LOG2_E).splat(lanes) if form.scaled else None
        with e.loop(0, STEP, 4) as r:
            sums = [e.var(vec(F32, lanes), 0.0) for _ in range(4)]
            shifts = [e.load(self.at["shift"], F32, r + i).splat(lanes) for i in range(4)]
            with e.loop(begin, end, STEP) as at:
                for i in range(4):
                    location = (r + i) * self.row + at
                    vectors = []
                    for lane in range(0, STEP, lanes):
                        x = e.load(scores, vec(F32, lanes), location + lane)
                        x = x - shifts[i] if factor is None else e.fma(x, factor, -shifts[i])
                        x = e.exp2(x, self._degree)
                        vectors.append(x)
                        sums[i].add(x)
                        if not form.pairs:
                            e.store(scores, x, location + lane)
                    if form.pairs:  # over the row's own scores, which have been read
                        to = scores.at((r + i) * (self.row * 2) + at, I16)
                        for lane in range(0, len(vectors), 2):
                            both = e.pairs_of_bf16(*vectors[lane : lane + 2])
                            e.store(to, both, lane * lanes)
            for i, sum_ in enumerate(sums):
                location = (row + r + i) * lanes
                total = e.load(self.at["total"], vec(F32, lanes), location)
                shrink = e.load(self.at["shrink"], F32, r + i).splat(lanes)
                e.store(self.at["total"], e.fma(total, shrink, sum_.get()), location)
