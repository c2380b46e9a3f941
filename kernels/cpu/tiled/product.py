"""Products of many rows with a weight in bfloat16, by AMX.

    out[m, n] = sum_k x[m, k] w[n, k] + bias[n]

A unit is a panel of the weight's rows and a run of x's. The panel is laid out for the tiles once,
in memory of the thread that stays in its second cache; then 32 rows of x at a time are multiplied
with 32 of the panel's at a time, over 256 numbers each, so that what is read of x stays in the
first cache while the panel passes. Nothing is kept from one product to the next: the weight stays
as it is, and laying a panel out costs about as much as 30 rows of x. Sums are float32; bias is
added before they are rounded.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I16, I32, Emitter, Value, vec

STEP = 32  # rows, columns and numbers at a time
BLOCK = 8  # steps of numbers, about
PANEL_BYTES = 3 << 18  # of a panel, at most where it has more than 64 columns
MAX_COLUMNS = 256
X, X_ROW, ROWS, WIDTH, W, W_ROW, COLUMNS, BIAS, OUT, OUT_ROW = range(10)
PANEL, RUN, RUNS = range(10, 13)


def panel_of(columns: int, width: int, threads: int) -> int:
    """Columns of a panel: as many as the cache takes, and panels that threads can share evenly."""
    fitting = max(64, min(MAX_COLUMNS, PANEL_BYTES // (2 * width) // STEP * STEP))
    rounds = -(-columns // (fitting * threads))
    even = -(-columns // (rounds * threads))
    return min(fitting, max(64, -(-even // STEP) * STEP))


def block_of(width: int) -> int:
    """Steps of a block, so that all of a row's are about equal."""
    steps = -(-width // STEP)
    return -(-steps // max(1, round(steps / BLOCK)))


def locations(width: int, panel: int) -> tuple[int, int, int]:
    """Return where in a thread's memory, in bytes: sums of 32 rows, what is left of 32 rows of x
    after the last whole 32 numbers; and its size. The panel lies before them.
    """
    wide = -(-width // STEP) * STEP
    results = panel * wide * 2
    rest = results + STEP * panel * 4
    return results, rest, rest + STEP * 64


def emit_product(e: Emitter, bias: bool) -> None:
    """args: x, its row stride in elements, rows (at least 32), width, w, its row stride, columns,
    bias (bf16), out, its row stride, columns of a panel (a multiple of 32), rows of a run (a
    multiple of 32), number of runs, `locations` of sums and of the rest, `block_of` the width.
    Units: panels * runs.
    """
    x, x_row, rows, width = e.arg_ptr(X), e.arg(X_ROW), e.arg(ROWS), e.arg(WIDTH)
    panel, run, runs = e.arg(PANEL), e.arg(RUN), e.arg(RUNS)
    results, rest, block = e.scratch.at(e.arg(13)), e.scratch.at(e.arg(14)), e.arg(15)
    whole = width // STEP  # steps
    steps = (width + (STEP - 1)) // STEP
    e.tiles_begin()
    with e.loop(e.first, e.last) as unit:
        first = unit // runs * panel
        columns = e.minimum(e.arg(COLUMNS) - first, panel)
        lay_panel(e, e.arg_ptr(W).at(first * e.arg(W_ROW), I16), columns, width, steps)
        begin = unit % runs * run
        end = e.minimum(begin + run, rows)
        # Prefetched with each 32 columns: a share of the next 32 rows
        share = e.i64(STEP * STEP) // panel
        with e.loop(begin, end, STEP) as at:
            row = e.minimum(at, rows - STEP)  # the last ones overlap those before
            lines = x.at(row * x_row, I16)
            with e.when(whole < steps):
                mask = e.mask(width - whole * STEP, STEP)
                with e.loop(0, STEP) as r:
                    left = e.masked_load(lines, vec(I16, STEP), r * x_row + whole * STEP, mask)
                    e.store(rest, left, r * STEP)
            with e.loop(0, steps, block) as start:
                stop = e.minimum(start + block, whole)
                final = start + block >= steps
                with e.loop(0, columns, STEP) as column:
                    b = e.scratch.at(column * (steps * 64))
                    own = results.at(column * (STEP * 4))
                    with e.either(start.eq(0)) as (yes, no):
                        with yes:
                            for tile in range(4):
                                e.tile_zero(tile)
                        with no:
                            for tile in range(4):
                                e.tile_load(tile, own.at(tile * 1024))
                    ahead = lines.at((STEP + column // STEP * share) * x_row, I16)
                    with e.loop(start, stop) as step:
                        _multiply(e, lines.at(step * STEP, I16), x_row * 2, b, step, steps)
                        for i in range(4):
                            e.prefetch(ahead.at(i * x_row + step * STEP, I16), 2)
                    with e.when(final & (whole < steps)):
                        _multiply(e, rest, e.i64(STEP * 2), b, whole, steps)
                    for tile in range(4):
                        e.tile_store(tile, own.at(tile * 1024))
                    with e.when(final):
                        _write(e, own, row, first + column, columns - column, bias)
    e.tiles_end()


def _multiply(e: Emitter, a: Value, stride: Value, b: Value, step: Value, steps: Value) -> None:
    for j in range(2):
        e.tile_load(6 + j, b.at((steps * j + step) * 1024))
    for i in range(2):
        e.tile_load(4 + i, a.at(stride * (16 * i)), stride)
        for j in range(2):
            e.tile_dot(2 * i + j, 4 + i, 6 + j)


def _write(e: Emitter, results: Value, row: Value, column: Value, left: Value, bias: bool) -> None:
    """32 x 32 results, of which there are `left` columns."""
    out, stride = e.arg_ptr(OUT), e.arg(OUT_ROW)

    def lines(mask: Value | None) -> None:
        added = []
        if bias:
            pointer = e.arg_ptr(BIAS).at(column, I16)
            kind = vec(I16, STEP)
            both = (
                e.load(pointer, kind)
                if mask is None
                else e.masked_load(pointer, kind, e.i64(0), mask)
            )
            added = [both.shuffle(range(i, i + 16)).bf16_to_f32() for i in (0, 16)]
        with e.loop(0, 2) as half, e.loop(0, 16) as r:
            values = [e.load(results, vec(F32, 16), half * 512 + r * 16 + i) for i in (0, 256)]
            if bias:
                values = [v + more for v, more in zip(values, added, strict=True)]
            stored = e.pairs_of_bf16(*values)
            if mask is None:
                e.store(out, stored, (row + half * 16 + r) * stride + column)
            else:
                e.masked_store(out, stored, (row + half * 16 + r) * stride + column, mask)

    with e.either(left >= STEP) as (yes, no):
        with yes:
            lines(None)
        with no:
            lines(e.mask(left, STEP))


def lay_panel(e: Emitter, w: Value, columns: Value, width: Value, steps: Value) -> None:
    """Rows of the weight as the second operand of tiles: [row / 16, pair of numbers, 16 rows],
    zeros behind the last row and the last number.
    """
    w_row = e.arg(W_ROW)
    padded = (columns + (STEP - 1)) // STEP * STEP
    with e.loop(0, padded, 16) as tile:
        rows = [w.at(e.minimum(tile + i, columns - 1) * w_row, I16) for i in range(16)]
        to = e.scratch.at(tile * (steps * 64))
        for at, mask in e.spans(0, width, STEP):
            vectors = []
            for row in rows:
                line = row.at(at, I16)
                value = (
                    e.load(line, vec(I16, STEP))
                    if mask is None
                    else e.masked_load(line, vec(I16, STEP), e.i64(0), mask)
                )
                vectors.append(value.bits(vec(I32, 16)))
            for i, vector in enumerate(e.transposed(vectors)):
                e.store(to, vector, (at // 2 + i) * 16)
