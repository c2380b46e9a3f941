"""Panels of a weight, laid out for products of many rows in memory of the thread.

A panel is some rows of the weight, in 16s, its columns in what is multiplied: vectors of one number
of each of 16 rows in float32, or of two neighbours in bfloat16: [row / 16, number, 16 rows], which
is the second operand of a tile, too. Numbers of blocks are multiplied by their scales here, once
for all rows of x, and rounded once; or they stay integers, with scales of their own (`words`,
`octets`). Behind the last row that one comes again; behind the last number, zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtmd.kernels.cpu.native.emit import F32, I16, I32, Emitter, Value, vec
from mtmd.kernels.cpu.tiled import octets
from mtmd.kernels.cpu.tiled.codes import FORMS, ROWS, RUN, TURN, Form, read_scales
from mtmd.kernels.cpu.tiled.words import lay_step
from mtmd.kernels.quantization.blocks import BLOCKS

PLAIN = "BF16"


def lay_panel(
    e: Emitter,
    kind: str,
    form: str,
    step: int,
    weights: Sequence[Value],
    w_bytes: Value,
    columns: Value,
    width: Value,
) -> None:
    """Lay `columns` rows of the weight, `w_bytes` apart, at the beginning of the scratch memory, as
    products of a `form` (`cpu.form_of`) read them, `step` bytes for 32 numbers of 16 of them. Of
    two weights, half as many rows of each: 16 of the first, then 16 of the second.
    """
    each, own = len(weights), columns // len(weights)
    padded = (own + (2 * ROWS // each - 1)) // (2 * ROWS // each) * (2 * ROWS)
    steps = (width + (RUN - 1)) // RUN
    with e.loop(0, padded, ROWS) as first:
        w, start = weights[0], first
        if each == 2:
            group = first // ROWS
            w = e.select((group % 2).eq(0), weights[0], weights[1])
            start = group // 2 * ROWS
        rows = [w.at(e.minimum(start + n, own - 1) * w_bytes) for n in range(ROWS)]
        to = e.scratch.at(first // ROWS * steps * step)
        if kind == PLAIN:
            _lay_plain(e, rows, width, to)
        else:
            _lay_blocks(e, kind, form, step, rows, w_bytes, width, to)


def _lay_plain(e: Emitter, rows: list[Value], width: Value, to: Value) -> None:
    for at, mask in e.spans(0, width, RUN):
        vectors = []
        for row in rows:
            line = row.at(at, I16)
            value = (
                e.load(line, vec(I16, RUN))
                if mask is None
                else e.masked_load(line, vec(I16, RUN), e.i64(0), mask)
            )
            vectors.append(value.bits(vec(I32, ROWS)))
        for i, vector in enumerate(e.transposed(vectors)):
            e.store(to, vector, (at // 2 + i) * ROWS, align=64)


def _lay_blocks(
    e: Emitter,
    kind: str,
    form: str,
    step: int,
    rows: list[Value],
    w_bytes: Value,
    width: Value,
    to: Value,
) -> None:
    codes, block = FORMS[kind], BLOCKS[kind]
    groups, runs, count = codes.groups, block.values // RUN, width // RUN
    tables = [e.local(F32, ROWS * TURN * groups) for _ in range(1 + codes.minimum)]
    heads = e.local(I32, ROWS * TURN * groups)
    with e.loop(0, count, TURN) as turn:
        stop = e.minimum(turn + TURN, count)
        read_scales(e, codes, rows, turn, stop, block, tables, heads)
        if codes.scales is not None:
            for table in tables:
                _turn_scales(e, table, groups)
        with e.loop(turn, stop) as run:
            here = run // runs * block.bytes
            # The same run of the rows that come next
            ahead = rows[0].at(w_bytes * ROWS + run * (ROWS * block.bytes) // runs)
            for line in range(-(-ROWS * block.bytes // runs // 64)):
                e.prefetch(ahead.at(64 * line), near=2)
            blocks, at = [row.at(here) for row in rows], (run - turn) * groups
            here = to.at(run * step)
            if form == "octets":
                octets.lay_step(e, kind, blocks, run % runs, tables, at, here)
            elif form == "words":
                lay_step(e, codes, blocks, run % runs, tables, at, here)
            else:
                numbers = _numbers(e, codes, blocks, run % runs)
                _lay_scaled(e, form, _scaled(e, codes, numbers, tables, at), here)


def _lay_scaled(e: Emitter, form: str, scaled: list[Value], to: Value) -> None:
    for i in range(0, RUN, 2):
        if form == "single":
            for each in range(2):
                e.store(to, scaled[i + each], (i + each) * ROWS, align=64)
        else:
            both = e.pairs_of_bf16(*scaled[i : i + 2])
            e.store(to, both.shuffle([n + s for n in range(ROWS) for s in (0, ROWS)]), i * ROWS)


def _turn_scales(e: Emitter, table: Value, groups: int) -> None:
    """[row, run, group] -> [run, group, row]"""
    each = TURN * groups
    lines = [e.load(table, vec(F32, each), n * each, align=4 * each) for n in range(ROWS)]
    if each < ROWS:
        lines = [line.concat(line) for line in lines]
    for i, line in enumerate(e.transposed(lines)[:each]):
        e.store(table, line, i * ROWS, align=64)


def _numbers(e: Emitter, form: Form, blocks: list[Value], run: Value) -> list[Value]:
    """A run of each row as float32 [16 rows], number by number, not yet scaled."""
    if form.floats is not None:
        halves = list(zip(*(form.floats(e, block, run) for block in blocks), strict=True))
        return [value for half in halves for value in e.transposed(half)]
    words = [form.codes(e, block, run).bits(vec(I32, ROWS)) for block in blocks]
    result = []
    for both in e.transposed(words):
        result += [(both << 16).bits(vec(F32, ROWS)), (both & -65536).bits(vec(F32, ROWS))]
    return result


def _scaled(
    e: Emitter, form: Form, numbers: list[Value], tables: list[Value], at: Value
) -> list[Value]:
    """scale (number - zero) + minimum"""
    result, each, kind = [], RUN // form.groups, vec(F32, ROWS)
    for group in range(form.groups):
        scale, *minimum = (e.load(t, kind, (at + group) * ROWS, align=64) for t in tables)
        more = minimum[0] if minimum else None
        if form.zero:
            more = scale * -form.zero if more is None else e.fma(scale, -form.zero, more)
        for value in numbers[group * each : (group + 1) * each]:
            result.append(value * scale if more is None else e.fma(value, scale, more))
    return result
