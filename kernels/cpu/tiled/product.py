"""Products of many rows with a weight in bfloat16 or in blocks.

    out[m, n] = sum_k x[m, k] w[n, k] + bias[n]

A unit is a panel of the weight's rows and a run of x's. The panel is laid out once (`panel`), in
memory of the thread that stays in its second cache; then 32 rows of x at a time are multiplied with
32 of the panel's at a time, over some numbers each, so that what is read of x stays in the first
cache while the panel passes. Nothing is kept from one product to the next: the weight stays as it
is, and laying a panel out costs about as much as 30 to 60 rows of x. Sums are float32; bias is
added before they are rounded.

Products come in the forms of `cpu.form_of`: tiles of AMX, dot products of two numbers in bfloat16,
or float32 (for x in float32, too); in 16-bit integers in place of float32 (`words`); and with x in
8-bit integers, where that was asked for (`octets`).
"""

from __future__ import annotations

from functools import partial

from mtmd.kernels.cpu.native.emit import F32, I16, I32, Emitter, Value, vec
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.activation import activated
from mtmd.kernels.cpu.tiled.panel import PLAIN, lay_panel
from mtmd.kernels.cpu.tiled.words import Words, step_bytes

STEP = 32  # rows, columns and numbers at a time
HALF = 16  # rows at a time where no more are left, and the fewest
BLOCK = {1: 8, 2: 8, 4: 4}  # steps of numbers, about, by bytes of a number
MAX_COLUMNS = 256
X, X_ROW, ROWS, WIDTH, W, W_BYTES, COLUMNS, BIAS, OUT, OUT_ROW = range(10)
PANEL, RUN, RUNS, RESULTS, REST, STEPS, MORE = range(10, 17)
Form = tuple[str, int, int, int]  # as `cpu.form_of` has it


def item_of(form: Form) -> int:
    """Bytes of a number of a panel."""
    return {"single": 4, "octets": 1}.get(form[0], 2)


def step_of(kind: str, form: Form) -> int:
    """Bytes of 32 numbers of 16 columns of a panel."""
    if form[0] == "octets":
        return octets.step_bytes(kind)
    return step_bytes(kind) if form[0] == "words" else STEP * HALF * item_of(form)


def panel_of(columns: int, width: int, threads: int, step: int, cache: int) -> int:
    """Columns of a panel: as many as so many bytes of cache take, and panels that threads can share
    evenly. `step`: `step_of` the panel.
    """
    maximum = fitting(width, step, cache)
    rounds = -(-columns // (maximum * threads))
    even = -(-columns // (rounds * threads))
    return min(maximum, max(64, -(-even // STEP) * STEP))


def fitting(width: int, step: int, cache: int) -> int:
    """Return the columns of a panel that so many bytes of cache take."""
    return max(64, min(MAX_COLUMNS, cache * STEP * HALF // (step * width) // STEP * STEP))


def block_of(width: int, item: int) -> int:
    """Steps of a block, so that all of a row's are about equal."""
    steps = -(-width // STEP)
    return -(-steps // max(1, round(steps / BLOCK[item])))


def locations(kind: str, form: Form, width: int, panel: int) -> tuple[int, int, int]:
    """Return where in a thread's memory, in bytes: sums of 32 rows; of 32 rows of x what is left
    after the last whole 32 numbers, or a block in float32; and its size. The panel lies before
    them.
    """
    results = panel // HALF * -(-width // STEP) * step_of(kind, form)
    rest, item = results + STEP * panel * 4, item_of(form)
    block = block_of(width, item)
    if form[0] in ("words", "octets"):
        return results, rest, rest
    return results, rest, rest + STEP * STEP * item * (block if item == 4 else 1)


def emit_product(
    e: Emitter,
    kind: str,
    form: Form,
    x: str,
    bias: str,
    add: bool = False,
    gated: str | None = None,
) -> None:
    """args: x, its row stride in elements (of integers, x as prepared and no stride), rows (at
    least 16), width, w, bytes of its rows, columns of the result, bias or 0, out, its row stride,
    columns of a panel (a multiple of 32), rows of a run (a multiple of 32), number of runs,
    `locations` of sums and of the rest, `block_of` the width, MORE. Units: panels * runs. `x` is
    the type of x and of the result, `bias` that of the bias.

    `add`: MORE is added to the rounded result, and lies as `out` does. `gated`: MORE is a weight
    like w, columns of a panel and of the result are those of both, and out = f(x w) (x MORE), f
    an activation, without a bias.
    """
    Product(e, kind, form, x, bias, add, gated).write()


class Product:
    def __init__(
        self, e: Emitter, kind: str, form: Form, x: str, bias: str, add: bool, gated: str | None
    ):
        self.e, self.kind, self.form, self.dtype, self.bias = e, kind, form, x, bias
        self.add, self.gated, self.each = add, gated, 1 if gated is None else 2
        self.tiles, self.item, self.step = form[0] == "tiles", item_of(form), step_of(kind, form)
        self.x, self.x_row = e.arg_ptr(X), e.arg(X_ROW)
        self.rows, self.width = e.arg(ROWS), e.arg(WIDTH)
        self.results, self.rest = e.scratch.at(e.arg(RESULTS)), e.scratch.at(e.arg(REST))
        self.steps = (self.width + (STEP - 1)) // STEP
        self.element = F32 if x == "f32" else I16
        self.words: Words | octets.Octets | None = None
        if form[0] == "words":
            self.words = Words(e, kind, self.x, self.rows, self.steps)
        if form[0] == "octets":
            self.words = octets.Octets(e, kind, self.x, self.rows, self.steps)

    def write(self) -> None:
        e = self.e
        if self.tiles:
            e.tiles_begin()
        panel, run, runs = e.arg(PANEL), e.arg(RUN), e.arg(RUNS)
        with e.loop(e.first, e.last) as unit:
            first = unit // runs * panel
            columns = e.minimum(e.arg(COLUMNS) - first, panel)
            weights = [
                e.arg_ptr(which).at(first // self.each * e.arg(W_BYTES))
                for which in (W, MORE)[: self.each]
            ]
            lay_panel(
                e, self.kind, self.form[0], self.step, weights, e.arg(W_BYTES), columns, self.width
            )
            begin = unit % runs * run
            end = e.minimum(begin + run, self.rows)
            left = (end - begin) % STEP
            # Where rows are left over, the last ones overlap those before
            whole = e.select((left > HALF) & (self.rows >= STEP), end, end - left)
            with e.loop(begin, whole, STEP) as at:
                self._rows(e.minimum(at, self.rows - STEP), first, columns, 2)
            with e.loop(whole, end, HALF) as at:
                self._rows(e.minimum(at, self.rows - HALF), first, columns, 1)
        if self.tiles:
            e.tiles_end()

    def _rows(self, row: Value, first: Value, columns: Value, halves: int) -> None:
        """16 or 32 rows of x times a panel."""
        e, steps, block = self.e, self.steps, self.e.arg(STEPS)
        whole = self.width // STEP if self.kind == PLAIN else steps
        # Prefetched with each 32 columns: a share of the next rows
        share = e.i64(STEP * STEP) // e.arg(PANEL)
        lines = self.x.at(row * self.x_row, self.element)
        if self.kind == PLAIN:
            with e.when(whole < steps):
                mask = e.mask(self.width - whole * STEP, STEP)
                with e.loop(0, halves * HALF) as r:
                    at = r * self.x_row + whole * STEP
                    e.store(self.rest, e.masked_load(lines, vec(I16, STEP), at, mask), r * STEP)
        with e.loop(0, steps, block) as start:
            stop = e.minimum(start + block, whole)
            final = start + block >= steps
            xs, stride = self._wide(lines, start, stop, halves)
            with e.loop(0, columns, STEP) as column:
                b = e.scratch.at(column // HALF * steps * self.step)
                own = self.results.at(column * (STEP * 4))
                if self.tiles:
                    ahead = lines.at((STEP + column // STEP * share) * self.x_row, I16)
                    self._tiles(own, lines, b, start, stop, whole, final, ahead, halves)
                elif self.words is not None:
                    self._words(self.words, column, row, b, start, stop, halves)
                else:
                    self._vectors(own, xs, stride, b, start, stop, halves)
                with e.when(final):
                    if self.gated is None:
                        self._write(own, row, first + column, columns - column, halves)
                    else:
                        self._write_gated(own, row, first + column, columns - column, halves)

    # Tiles -----------------------------------------------------------------------------------

    def _tiles(
        self,
        own: Value,
        lines: Value,
        b: Value,
        start: Value,
        stop: Value,
        whole: Value,
        final: Value,
        ahead: Value,
        halves: int,
    ) -> None:
        e = self.e
        with e.either(start.eq(0)) as (yes, no):
            with yes:
                for tile in range(2 * halves):
                    e.tile_zero(tile)
            with no:
                for tile in range(2 * halves):
                    e.tile_load(tile, own.at(tile * 1024))
        with e.loop(start, stop) as step:
            self._multiply(lines.at(step * STEP, I16), self.x_row * 2, b, step, halves)
            for i in range(4):
                e.prefetch(ahead.at(i * self.x_row + step * STEP, I16), 2)
        if self.kind == PLAIN:
            with e.when(final & (whole < self.steps)):
                self._multiply(self.rest, e.i64(STEP * 2), b, whole, halves)
        for tile in range(2 * halves):
            e.tile_store(tile, own.at(tile * 1024))

    def _multiply(self, a: Value, stride: Value, b: Value, step: Value, halves: int) -> None:
        e = self.e
        for j in range(2):
            e.tile_load(6 + j, b.at((self.steps * j + step) * 1024))
        for i in range(halves):
            e.tile_load(4 + i, a.at(stride * (16 * i)), stride)
            for j in range(2):
                e.tile_dot(2 * i + j, 4 + i, 6 + j)

    # Vectors ---------------------------------------------------------------------------------

    def _wide(self, lines: Value, start: Value, stop: Value, halves: int) -> tuple[Value, Value]:
        """A block of x and the stride of its rows: in float32 where that is multiplied."""
        e = self.e
        if self.item < 4 or self.dtype == "f32":
            return lines.at(start * STEP, self.element), self.x_row
        count = (stop - start) * STEP
        with e.loop(0, halves * HALF) as r, e.loop(0, count, HALF) as at:
            value = e.read(lines, self.dtype, r * self.x_row + start * STEP + at, HALF)
            e.store(self.rest, value, r * count + at)
        return self.rest, count

    def _vectors(
        self, own: Value, xs: Value, stride: Value, b: Value, start: Value, stop: Value, halves: int
    ) -> None:
        """Some rows of x times two vectors of the panel at a time, sums in registers."""
        e, (_, lanes, each, columns) = self.e, self.form
        kind, pairs = vec(F32, lanes), self.item == 2
        count = (stop - start) * (STEP // 2 if pairs else STEP)
        tile_of = self.steps * (STEP * self.item * HALF)  # bytes of 16 columns of the panel
        with e.loop(0, halves * HALF, each) as r:
            for first in range(0, STEP, columns * lanes):
                offsets = [first + c * lanes for c in range(columns)]
                panels = [
                    b.at(tile_of * (at // HALF) + start * (STEP * self.item * HALF)).at(
                        at % HALF, F32
                    )
                    for at in offsets
                ]
                sums = [
                    own.at((r // HALF * 2 + at // HALF) * 1024 + r % HALF * 64 + at % HALF * 4)
                    for at in offsets
                ]
                totals = [
                    [
                        e.var(
                            kind,
                            e.select(start.eq(0), e.f32(0.0, lanes), e.load(s, kind, i * HALF)),
                        )
                        for s in sums
                    ]
                    for i in range(each)
                ]
                with e.loop(0, count) as k:
                    ws = [
                        e.load(
                            p,
                            vec(I16, 2 * lanes) if pairs else kind,
                            k * (HALF * 2 if pairs else HALF),
                            align=4 * lanes,
                        )
                        for p in panels
                    ]
                    for i in range(each):
                        at = (r + i) * stride
                        if pairs:
                            x = e.load(xs.at(at + k * 2, I16), I32, align=2).splat(lanes)
                            x = x.bits(vec(I16, 2 * lanes))
                        else:
                            x = e.load(xs, F32, at + k).splat(lanes)
                        for total, w in zip(totals[i], ws, strict=True):
                            last = total.get()
                            total.set(e.dot_bf16(x, w, last) if pairs else e.fma(x, w, last))
                for i in range(each):
                    for s, total in zip(sums, totals[i], strict=True):
                        e.store(s, total.get(), i * HALF)

    def _words(
        self,
        words: Words | octets.Octets,
        column: Value,
        row: Value,
        b: Value,
        start: Value,
        stop: Value,
        halves: int,
    ) -> None:
        """Some rows of x times two vectors of the panel at a time, as integers."""
        e, (_, lanes, each, columns) = self.e, self.form

        def sums(r: Value, offsets: list[int]) -> list[Value]:
            # With 16 registers, read again for each step: sums that LLVM knows to be the last
            # step's wait in other memory, and are stored twice
            results = e.scratch.at(e.arg(RESULTS)) if lanes == HALF // 2 else self.results
            own = results.at(column * (STEP * 4))
            return [
                own.at((r // HALF * 2 + at // HALF) * 1024 + r % HALF * 64 + at % HALF * 4)
                for at in offsets
            ]

        with e.when(start.eq(0)), e.loop(0, halves * 2 * HALF) as line:
            e.store(sums(e.i64(0), [0])[0], e.f32(0.0, HALF), line * HALF, align=64)
        for first in range(0, STEP, columns * lanes):
            offsets = [first + c * lanes for c in range(columns)]
            panels = [
                b.at(self.steps * (at // HALF) * self.step).at(at % HALF, F32) for at in offsets
            ]
            with e.loop(0, halves * HALF, each) as r:
                own = partial(sums, r, offsets)
                words.multiply(panels, own, row + r, start, stop, self.form)

    # Results ---------------------------------------------------------------------------------

    def _write(self, own: Value, row: Value, column: Value, left: Value, halves: int) -> None:
        """16 or 32 rows of 32 results, of which there are `left` columns."""
        e, out, stride = self.e, self.e.arg_ptr(OUT), self.e.arg(OUT_ROW)

        def read(mask: Value | None) -> list[Value]:
            element = F32 if self.bias == "f32" else I16
            kind, zero = vec(element, STEP), e.const(vec(element, STEP), 0)
            both, pointer = e.var(kind, zero), e.arg_ptr(BIAS).at(column, element)
            with e.when(e.arg(BIAS).ne(0)):
                both.set(
                    e.load(pointer, kind)
                    if mask is None
                    else e.masked_load(pointer, kind, e.i64(0), mask)
                )
            parts = [both.get().shuffle(range(i, i + HALF)) for i in (0, HALF)]
            return parts if self.bias == "f32" else [part.bf16_to_f32() for part in parts]

        def lines(mask: Value | None) -> None:
            added = read(mask)
            with e.loop(0, halves) as half, e.loop(0, HALF) as r:
                values = [
                    e.load(own, vec(F32, HALF), half * 512 + r * HALF + i) + more
                    for i, more in zip((0, 256), added, strict=True)
                ]
                stored = (
                    values[0].concat(values[1]) if self.dtype == "f32" else e.pairs_of_bf16(*values)
                )
                at = (row + half * HALF + r) * stride + column
                if self.add:
                    stored = self._added(stored, at, mask)
                if mask is None:
                    e.store(out, stored, at)
                else:
                    e.masked_store(out, stored, at, mask)

        with e.either(left >= STEP) as (yes, no):
            with yes:
                lines(None)
            with no:
                lines(e.mask(left, STEP))

    def _added(self, stored: Value, at: Value, mask: Value | None) -> Value:
        """32 results as they are stored, with what lies at the same place of the addend."""
        e, more = self.e, self.e.arg_ptr(MORE)
        kind = stored.type
        other = e.load(more, kind, at) if mask is None else e.masked_load(more, kind, at, mask)
        if self.dtype == "f32":
            return stored + other
        halves = [range(first, first + HALF) for first in (0, HALF)]
        return e.pairs_of_bf16(
            *(stored.shuffle(h).bf16_to_f32() + other.shuffle(h).bf16_to_f32() for h in halves)
        )

    def _write_gated(self, own: Value, row: Value, column: Value, left: Value, halves: int) -> None:
        """16 or 32 rows of 16 results: an activation of the first 16 sums times the second."""
        e, out, stride = self.e, self.e.arg_ptr(OUT), self.e.arg(OUT_ROW)
        assert self.gated is not None
        activation = self.gated

        def lines(mask: Value | None) -> None:
            with e.loop(0, halves) as half, e.loop(0, HALF, 2) as r:
                offsets = [[half * 512 + (r + i) * HALF + j for j in (0, 256)] for i in range(2)]
                sums = [[e.load(own, vec(F32, HALF), at) for at in line] for line in offsets]
                (first, up), (second, other) = (self._rounded(*line) for line in sums)
                acts = self._rounded(
                    *(activated(e, gate, activation, self.dtype) for gate in (first, second))
                )
                results = [acts[0] * up, acts[1] * other]
                if self.dtype == "bf16":
                    both = e.pairs_of_bf16(*results)
                    results = [both.shuffle(range(i, i + HALF)) for i in (0, HALF)]
                for i, result in enumerate(results):
                    at = (row + half * HALF + r + i) * stride + column // 2
                    if mask is None:
                        e.store(out, result, at)
                    else:
                        e.masked_store(out, result, at, mask)

        with e.either(left >= STEP) as (yes, no):
            with yes:
                lines(None)
            with no:
                lines(e.mask(left // 2, HALF))

    def _rounded(self, a: Value, b: Value) -> tuple[Value, Value]:
        """Both as they would be stored."""
        if self.dtype == "f32":
            return a, b
        both = self.e.pairs_of_bf16(a, b)
        first, second = (both.shuffle(range(i, i + HALF)).bf16_to_f32() for i in (0, HALF))
        return first, second
