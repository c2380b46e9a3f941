"""Products of 9 rows of x and more in bfloat16 with a weight, by AMX: several sequences that
decode, prompts with weights in blocks.

    out[m, n] = sum over k of x[m, k] w[n, k]

The first operand of a tile product is 16 rows of the weight, 32 numbers of each; the second 16 rows
of x, which `emit_prepare` lays out. Each number of the weight is read and unpacked once.

Weights in bfloat16 are loaded as they lie. Of blocks of integers, what is multiplied are the
integers, which bfloat16 holds exactly: 0x4300 | q is 128 + q for q below 128. With z what these are
more than the integers stand for,

    w . x = sum over groups of  scale (sum of (z + q) x - z sum of x) + minimum (sum of x)

in float32, so that nothing is rounded but what float32 rounds. A group is 32 numbers, or 16: then a
tile has zeros in the other half. 8-bit floats are exact in bfloat16, too; the numbers of NF4_64 and
FP4_64 are rounded to it.

A kernel's units are the weight's rows, at least 16; its args are those of `native.products`, x
prepared and of no stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I1, I8, I16, I32, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.grids import GRIDS, MORE
from mtmd.kernels.cpu.native.products import Args, row_bytes
from mtmd.kernels.cpu.native.program import CHUNKS
from mtmd.kernels.cpu.native.unpack import (
    HALVES_LESS,
    carried,
    e4m3,
    factors3,
    factors4,
    factors_x4,
    fp4_scale,
    half_of_power,
    header,
    signed16,
    two_halves,
)
from mtmd.kernels.cpu.tiled.cpu import tiles_allowed
from mtmd.kernels.quantization.blocks import BLOCKS, Block
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import BNB_FP4_VALUES, NF4_VALUES

FEWEST = 9  # rows of x
MAXIMUM = 16  # in a tile; of a plain weight, torch multiplies more
ROWS = 16  # of the weight, in a tile
RUN = 32  # numbers of a row of a tile
TILE = 1024  # bytes
TURN = 8  # runs whose scales are read at once: those of a block of 256 numbers
CHUNK_BYTES = 48 << 10  # of weight that a thread takes at a time
SUMS, CODES, NUMBERS = 0, 4, 6  # tile registers: of results, of the weight, of x
PLAIN = "BF16"


@dataclass(frozen=True)
class Form:
    """Describes how a type is read. `codes(e, block, run)`: the bits of 32 numbers in bfloat16
    [32], which are more by `zero` than what they stand for; `run` of the block at a pointer.
    Blocks of 256 have `scales(e, block)`: float32 [8 * groups], and minima. Small ones have
    `head(e, block, run, group)`, an int32, and `numbers`, which makes float32 of many of them: a
    scale, and a minimum.
    """

    codes: Callable[[Emitter, Value, Value], Value]
    zero: float
    scales: Callable[[Emitter, Value], Sequence[Value]] | None = None
    head: Callable[[Emitter, Value, Value, int], Value] | None = None
    numbers: Callable[[Value], Sequence[Value]] = lambda heads: [heads.bits(vec(F32, heads.lanes))]
    minimum: bool = False
    groups: int = 1  # of a run


def takes(kind: str, rows: int, outer: int, width: int, x: str) -> bool:
    """Return whether there is a kernel for a weight [outer, width] and so many rows of x, and the
    CPU at hand has the registers.
    """
    return (
        x == "bf16"
        and rows >= FEWEST
        and (kind in FORMS or (kind == PLAIN and rows <= MAXIMUM))
        and outer >= ROWS
        and width % RUN == 0
        and tiles_allowed()
    )


@dataclass(frozen=True)
class Kernel:
    """`prepare`: a kernel that lays x out, of as many units as `units`."""

    address: int
    prepare: int
    groups: int

    @property
    def name(self) -> str:
        """Return the name of the layout."""
        return f"tiles {self.groups}"

    def units(self, rows: int, width: int) -> int:
        return -(-rows // MAXIMUM) * (width // RUN)

    def bytes(self, rows: int, width: int) -> int:
        """Return the bytes of x prepared."""
        return self.units(rows, width) * _bytes_of_run(self.groups)


def scratch_bytes(rows: int) -> int:
    """Return the bytes of scratch memory that a call needs."""
    return -(-rows // MAXIMUM) * TILE


def prepared_bytes(kind: str, rows: int, width: int) -> int:
    """Return the prepared bytes of x, for a weight in blocks."""
    return -(-rows // MAXIMUM) * (width // RUN) * _bytes_of_run(FORMS[kind].groups)


def grain(kind: str, width: int, outer: int) -> int:
    """Rows of a weight that a thread should take at a time: whole tiles, and few enough chunks."""
    each = 2 * ROWS if kind == PLAIN else ROWS
    fitting = max(1, CHUNK_BYTES // row_bytes(kind, width) // each)
    return max(fitting, -(-outer // (CHUNKS * each))) * each


def product(kind: str, out: str, bias: str | None = None, add: bool = False) -> Kernel:
    """The kernel for a type of weight and types of storage."""
    groups = 1 if kind == PLAIN else FORMS[kind].groups
    prepare = compile_kernel(emit_prepare, groups)
    if kind == PLAIN:
        return Kernel(compile_kernel(emit_plain, out, bias, add), prepare, groups)
    address = compile_kernel(emit_blocks, kind, out, bias, add)
    return Kernel(address, prepare, groups)


def _bytes_of_run(groups: int) -> int:
    return TILE + 64 * groups


def emit_prepare(e: Emitter, groups: int) -> None:
    """x as tiles, each followed by the sums of each row's groups, float32 [groups, 16].

    args: x (bfloat16), its row stride in elements, what is prepared (aligned to 64), width, rows.
    Units: runs of 32 numbers, of 16 rows after the other. Beyond the last row that one comes again.
    """
    x, stride, target, rows = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), e.arg(4)
    pairs, runs = vec(I32, 16), e.arg(3) // RUN
    with e.loop(e.first, e.last) as unit:
        to = target.at(unit * _bytes_of_run(groups))
        first, run = unit // runs * MAXIMUM, unit % runs
        lines = [
            e.load(x, vec(I16, RUN), at * stride + run * RUN).bits(pairs)
            for at in (e.minimum(first + m, rows - 1) for m in range(MAXIMUM))
        ]
        each = 16 // groups
        for group in range(groups):
            here = [int(i // each == group) for i in range(16)]
            mask = e.const(pairs, here).ne(0)
            totals = []
            for line in lines:
                both = (line << 16).bits(vec(F32, 16)) + (line & -65536).bits(vec(F32, 16))
                totals.append(both if groups == 1 else e.select(mask, both, e.f32(0.0, 16)))
            e.store(to.at(TILE + 64 * group), e.sums(totals), align=64)
        for pair, line in enumerate(e.transposed(lines)):
            e.store(to.at(64 * pair), line, align=64)


def emit_plain(e: Emitter, out: str, bias: str | None, add: bool) -> None:
    """A weight in bfloat16, 32 rows at a time."""
    args = Args(e)
    count, each = args.width // RUN, _bytes_of_run(1)
    results = e.local(F32, 2 * ROWS * MAXIMUM)
    e.tiles_begin()
    _ask(e, args.w.at(e.first * args.w_bytes), e.minimum(e.last - e.first, e.i64(2 * ROWS)), args)
    with e.loop(e.first, e.last, 2 * ROWS) as first:
        bases = [e.minimum(first + ROWS * i, args.w_rows - ROWS) for i in range(2)]
        weights = [args.w.at(base * args.w_bytes) for base in bases]
        for i in range(2):
            e.tile_zero(SUMS + i)
        with e.loop(0, count) as run:
            for line in range(2 * TILE // 64):  # those of the next turn
                ahead = (args.w_bytes + run * 64) * (2 * ROWS) + 64 * line
                e.prefetch(args.w.at(first * args.w_bytes + ahead), near=2)
            e.tile_load(NUMBERS, args.x.at(run * each))
            for i, weight in enumerate(weights):
                e.tile_load(CODES + i, weight.at(run * 64), args.w_bytes)
                e.tile_dot(SUMS + i, CODES + i, NUMBERS)
        for i, base in enumerate(bases):
            e.tile_store(SUMS + i, results.at(i * TILE))
            lines = [
                e.load(results, vec(F32, MAXIMUM), (i * ROWS + n) * MAXIMUM) for n in range(ROWS)
            ]
            begin = first + ROWS * i
            last = e.maximum(e.minimum(begin + ROWS, e.last), begin)
            _finish(args, lines, base, begin, last, out, bias, add)
    e.tiles_end()


def emit_blocks(e: Emitter, kind: str, out: str, bias: str | None, add: bool) -> None:
    """A weight in blocks of integers, 16 rows at a time, with all rows of x. Scratch memory: sums,
    float32 [passes, 16 rows of the weight, 16 rows of x].
    """
    args, form, block = Args(e), FORMS[kind], BLOCKS[kind]
    groups, runs = form.groups, block.values // RUN  # of a run; of a block
    count, each, step = args.width // RUN, _bytes_of_run(groups), groups * TILE
    passes, kind_of_line = (args.rows + (MAXIMUM - 1)) // MAXIMUM, vec(F32, MAXIMUM)
    codes, results = e.local(I8, TURN * step), e.local(I8, TURN * step)
    tables = [e.local(F32, ROWS * TURN * groups) for _ in range(1 + form.minimum)]
    heads, sums = e.local(I32, ROWS * TURN * groups), e.scratch
    e.tiles_begin()
    _ask(e, args.w.at(e.first * args.w_bytes), e.minimum(e.last - e.first, e.i64(ROWS)), args)
    with e.loop(e.first, e.last, ROWS) as first:
        base = e.minimum(first, args.w_rows - ROWS)
        rows = [args.w.at((base + n) * args.w_bytes) for n in range(ROWS)]
        with e.loop(0, passes * ROWS) as location:
            e.store(sums.at(location * 64), e.f32(0.0, MAXIMUM))
        with e.loop(0, count, TURN) as turn:
            stop = e.minimum(turn + TURN, count)
            _read_scales(e, form, rows, turn, stop, block, tables, heads)
            with e.loop(turn, stop) as run:
                ahead = (args.w_bytes + run * block.bytes // runs) * ROWS
                for line in range(-(-ROWS * block.bytes // runs // 64)):
                    e.prefetch(args.w.at(first * args.w_bytes + ahead + 64 * line), near=2)
                to = codes.at((run - turn) * step)
                for n, row in enumerate(rows):
                    numbers = form.codes(e, row.at(run // runs * block.bytes), run % runs)
                    for group in range(groups):
                        e.store(to, _part(numbers, group, groups), (group * ROWS + n) * RUN)
            with e.loop(0, passes) as part:
                xs, stored = args.x.at(part * count * each), sums.at(part * TILE)
                # A tile is long in coming: all of them are begun before the first is scaled
                with e.loop(turn, stop) as run:
                    e.tile_load(NUMBERS, xs.at(run * each))
                    for group in range(groups):
                        location = (run - turn) * step + group * TILE
                        e.tile_zero(SUMS)
                        e.tile_load(CODES, codes.at(location))
                        e.tile_dot(SUMS, CODES, NUMBERS)
                        e.tile_store(SUMS, results.at(location))
                totals = [
                    e.var(kind_of_line, e.load(stored, kind_of_line, n * MAXIMUM))
                    for n in range(ROWS)
                ]
                with e.loop(turn, stop) as run:
                    result = results.at((run - turn) * step)
                    _add(e, form, totals, result, xs.at(run * each), tables, run - turn)
                for n, total in enumerate(totals):
                    e.store(stored, total.get(), n * MAXIMUM)
        with e.loop(0, passes) as part:
            stored = sums.at(part * TILE)
            lines = [e.load(stored, kind_of_line, n * MAXIMUM) for n in range(ROWS)]
            last = e.minimum(first + ROWS, e.last)
            _finish(args, lines, base, first, last, out, bias, add, part * MAXIMUM)
    e.tiles_end()


def _part(numbers: Value, group: int, groups: int) -> Value:
    """Zeros where numbers belong to another group."""
    if groups == 1:
        return numbers
    e, each = numbers.e, RUN // groups
    mask = e.const(numbers.type, [int(i // each == group) for i in range(RUN)]).ne(0)
    return e.select(mask, numbers, e.const(numbers.type, 0))


def _read_scales(
    e: Emitter,
    form: Form,
    rows: list[Value],
    turn: Value,
    stop: Value,
    block: Block,
    tables: list[Value],
    heads: Value,
) -> None:
    """Read the scales of some runs: of blocks of 256 [row, run, group], of small ones [run, group,
    row].
    """
    if form.scales is not None:
        for n, row in enumerate(rows):
            result = form.scales(e, row.at(turn // TURN * block.bytes))
            for table, values in zip(tables, result, strict=True):
                e.store(table, values, n * TURN * form.groups)
        return
    assert form.head is not None
    runs = block.values // RUN
    with e.loop(turn, stop) as run:
        for n, row in enumerate(rows):
            here = row.at(run // runs * block.bytes)
            for group in range(form.groups):
                head = form.head(e, here, run % runs, group)
                e.store(heads, head, ((run - turn) * form.groups + group) * ROWS + n)
    for i in range(TURN * form.groups):
        numbers = form.numbers(e.load(heads, vec(I32, ROWS), i * ROWS))
        for table, values in zip(tables, numbers, strict=True):
            e.store(table, values, i * ROWS)


def _add(
    e: Emitter,
    form: Form,
    sums: list[Var],
    results: Value,
    x: Value,
    tables: list[Value],
    run: Value,
) -> None:
    """sums += scale * (results - zero * the sums of x) + minimum * the sums of x"""
    kind = vec(F32, MAXIMUM)
    for group in range(form.groups):
        more = e.load(x.at(TILE + 64 * group), kind, align=64)
        less = more * form.zero
        for n, total in enumerate(sums):
            at = (run * form.groups + group) * ROWS + n
            if form.scales is not None:
                at = run * form.groups + (n * TURN * form.groups + group)
            scale, *minimum = (e.load(table, F32, at).splat(MAXIMUM) for table in tables)
            result = e.load(results, kind, (group * ROWS + n) * MAXIMUM)
            result = e.fma(result - less if form.zero else result, scale, total.get())
            total.set(e.fma(more, minimum[0], result) if minimum else result)


def _ask(e: Emitter, ptr: Value, rows: Value, args: Args) -> None:
    """Prefetch the lines of some rows of the weight."""
    with e.loop(0, rows * args.w_bytes, 64) as byte:
        e.prefetch(ptr.at(byte), near=2)


def _finish(
    args: Args,
    lines: list[Value],
    base: Value,
    first: Value,
    last: Value,
    out: str,
    bias: str | None,
    add: bool,
    row: Value | int = 0,
) -> None:
    """Sums [row of the weight] of [row of x] to results, of the weight's rows from `first` on and
    x's from `row` on.
    """
    e = args.e
    mask = e.mask(last - base, ROWS) ^ e.mask(first - base, ROWS)
    bias_value = None if bias is None else e.read(args.bias, bias, base, ROWS, mask)
    for m, values in enumerate(e.transposed(lines)):
        here = e.i64(row) + m
        with e.when(args.rows > here):
            result = values if bias_value is None else values + bias_value
            if add:
                at = args.addend_stride * here + base
                result = e.rounded(result, out) + e.read(args.addend, out, at, ROWS, mask)
            e.write(args.out, out, args.out_stride * here + base, result, mask)


# How types are read -------------------------------------------------------------------------------


def _exact(words: Value, mask: int) -> Value:
    """128 + q in bfloat16."""
    return (words & mask) | 0x4300


def _nibbles(e: Emitter, source: Value) -> Value:
    """Return the nibbles of 16 bytes the lower halves, then the upper ones: int16 [32], other bits
    above them.
    """
    four = e.load(source, vec(I8, 16), align=1).shuffle([i % 16 for i in range(64)])
    words = e.bytes_of_lanes(four, [at for lane in range(RUN) for at in (lane % 16, -1)])
    words = words.bits(vec(I16, RUN))
    return words >> e.const(words.type, [4 * (lane // 16) for lane in range(RUN)])


def _bytes(e: Emitter, source: Value) -> Value:
    """32 bytes as int16 [32]."""
    return e.load(source, vec(I8, RUN), align=1).zext(I16)


def _shifted(words: Value, count: Value) -> Value:
    return words >> count.trunc(I16).splat(RUN)


def _signed(numbers: Value) -> Value:
    """Signed bytes in bfloat16."""
    e = numbers.e
    halves = [numbers.shuffle(range(i, i + 16)).sext(I32).sitofp() for i in (0, 16)]
    return e.pairs_of_bf16(*halves)


def _q8(e: Emitter, block: Value, codes: int) -> Value:
    return _signed(e.load(block.at(codes), vec(I8, RUN), align=1))


def _u8(e: Emitter, block: Value, codes: int) -> Value:
    """Bytes without a sign, less 128."""
    return _signed(e.load(block.at(codes), vec(I8, RUN), align=1) ^ -128)


def _q4(e: Emitter, block: Value, codes: int) -> Value:
    return _exact(_nibbles(e, block.at(codes)), 15)


def _q5(e: Emitter, block: Value, fifth: int) -> Value:
    low = _q4(e, block, fifth + 4)
    bits = e.load(block.at(fifth), I32, align=1).bits(vec(I1, RUN))
    return e.select(bits, low | 16, low)


def _looked_up(
    e: Emitter, source: Value, values: Sequence[int], order: Sequence[int] = range(RUN)
) -> Value:
    """The numbers that the nibbles of 16 bytes stand for, lower ones before upper ones."""
    packed = e.load(source, vec(I8, 16), align=1)
    codes = (packed & 15).shuffle(order, packed >> 4)
    return _signed(e.lookup16(values, codes))


def _fp4(e: Emitter, source: Value) -> Value:
    """Twice 16 numbers, each in 8 bytes."""
    order = [8 * (i // 16) + i % 8 + 16 * (i // 8 % 2) for i in range(RUN)]
    return _looked_up(e, source, FP4_VALUES, order)


def _f8(e: Emitter, block: Value, run: Value) -> Value:
    codes = e.load(block.at(run * RUN + 4), vec(I8, RUN), align=1).sext(I16)
    numbers = [e4m3(codes.shuffle(range(i, i + 16))).half_to_f32() for i in (0, 16)]
    return e.pairs_of_bf16(*numbers)


def _table4(values: Sequence[float]) -> Callable[[Emitter, Value, Value], Value]:
    def codes(e: Emitter, block: Value, run: Value) -> Value:
        words = e.load(block.at(run * 16 + 4), vec(I8, 16), align=1).zext(I32)
        return e.pairs_of_bf16(*(e.lookup16_f32(values, words >> shift) for shift in (0, 4)))

    return codes


def _q1_0(e: Emitter, block: Value, run: Value) -> Value:
    bits = e.load(block.at(run * 4 + 2), I32, align=1).bits(vec(I1, RUN))
    return e.select(bits, e.const(vec(I16, RUN), 0x3F80), e.const(vec(I16, RUN), -0x4080))


def _two_bits(e: Emitter, block: Value, run: Value) -> Value:
    """32 bytes hold four runs."""
    words = _bytes(e, block.at((run >> 2) * 32))
    return _exact(_shifted(words, (run & 3) * 2), 3)


def _q3_k(e: Emitter, block: Value, run: Value) -> Value:
    third = _shifted(_bytes(e, block), run)
    return _two_bits(e, block.at(32), run) | ((third & 1) << 2)


def _q4_k(e: Emitter, block: Value, run: Value) -> Value:
    words = _bytes(e, block.at((run >> 1) * 32 + 16))
    return _exact(_shifted(words, (run & 1) * 4), 15)


def _q5_k(e: Emitter, block: Value, run: Value) -> Value:
    words = _bytes(e, block.at((run >> 1) * 32 + 48))
    low = _exact(_shifted(words, (run & 1) * 4), 15)
    fifth = _shifted(_bytes(e, block.at(16)), run)
    return low | ((fifth & 1) << 4)


def _q6_k(e: Emitter, block: Value, run: Value) -> Value:
    side, part = run >> 2, run & 3
    words = _bytes(e, block.at(side * 64 + (part & 1) * 32))
    low = _exact(_shifted(words, (part >> 1) * 4), 15)
    high = _shifted(_bytes(e, block.at(side * 32 + 128)), part * 2)
    return low | ((high & 3) << 4)


def _tq1_0(e: Emitter, block: Value, run: Value) -> Value:
    """Five runs of 32 bytes, five halves of 16 more, and the rest of the last run of 4."""
    codes = e.var(vec(I8, RUN), e.load(block, vec(I8, RUN), align=1))
    with e.when(run >= 5):
        middle = e.load(block.at(32), vec(I8, 16), align=1)
        last = e.load(block.at(48), vec(I8, 4), align=1).shuffle([i % 4 for i in range(16)])
        codes.set(middle.concat(e.select(run.eq(7), last, middle)))
    halves = [(power, power) for power in range(5)] + [(0, 1), (2, 3)]
    powers = [256 * 3**half for pair in halves for half in pair for _ in range(16)]
    powers += [256 * 3**4] * 16 + [256 * 3 ** (i // 4) for i in range(16)]
    factors = e.load(e.table(I16, [signed16(power) for power in powers]), vec(I16, RUN), run * RUN)
    return _exact(carried(codes.get().zext(I16) * factors), 3)


def _rows_of_a_grid(kind: str) -> Form:
    own = GRIDS[kind]

    def codes(e: Emitter, block: Value, run: Value) -> Value:
        first, second, third, fourth = own.rows(e, block, run, 1)
        numbers = first.concat(second).concat(third.concat(fourth))
        return numbers.zext(I16) + (0x4300 - MORE // 2)  # from 128 on, exact below 256

    return Form(
        codes, float(MORE // 2 + 128), lambda e, block: [own.scales(e, block)], groups=own.halves
    )


def _d(e: Emitter, block: Value, at: int) -> Value:
    return e.load(block.at(at), I16, align=1).half_to_f32()


def _scales_2k(e: Emitter, block: Value) -> Sequence[Value]:
    factors = e.load(block, vec(I8, 16), align=1)
    scale = (factors & 15).zext(I32).sitofp() * _d(e, block, 80)
    return scale, (factors >> 4).zext(I32).sitofp() * -_d(e, block, 82)


def _scales_4k(e: Emitter, block: Value) -> Sequence[Value]:
    scales, minima = factors4(e, block)
    scale = scales.zext(I32).sitofp() * _d(e, block, 0)
    return scale, minima.zext(I32).sitofp() * -_d(e, block, 2)


def _scales_6k(e: Emitter, block: Value) -> Sequence[Value]:
    factors = e.load(block.at(192), vec(I8, 16), align=1)
    return [factors.sext(I32).sitofp() * _d(e, block, 208)]


def _one_scale(at: int) -> Callable[[Emitter, Value], Sequence[Value]]:
    return lambda e, block: [_d(e, block, at).splat(TURN)]


def _word(e: Emitter, block: Value, run: Value, group: int) -> Value:  # noqa: ARG001
    return e.load(block, I32, align=1)


def _exponent(e: Emitter, block: Value, run: Value, group: int) -> Value:  # noqa: ARG001
    return e.load(block, I8, align=1).zext(I32)


def _small_float(at: int) -> Callable[[Emitter, Value, Value, int], Value]:
    """Two 8-bit floats of a run, as the bits of halves."""
    return lambda e, block, run, group: fp4_scale(
        e.load(block.at(run * 2 + (at + group)), I8, align=1)
    ).bits(I32)


def _nv4_scale(e: Emitter, block: Value, run: Value, group: int) -> Value:
    scale = fp4_scale(e.load(block.at(run * 2 + (4 + group)), I8, align=1))
    return (scale * e.load(block, F32, align=1)).bits(I32)


def _half(heads: Value) -> Sequence[Value]:
    return [two_halves(heads)[0]]


FORMS = MappingProxyType(
    {
        "Q8_0": Form(lambda e, block, _: _q8(e, block, 2), 0.0, head=_word, numbers=_half),
        "Q4_0": Form(lambda e, block, _: _q4(e, block, 2), 136.0, head=_word, numbers=_half),
        "Q4_1": Form(
            lambda e, block, _: _q4(e, block, 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "Q5_0": Form(lambda e, block, _: _q5(e, block, 2), 144.0, head=_word, numbers=_half),
        "Q5_1": Form(
            lambda e, block, _: _q5(e, block, 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "IQ4_NL": Form(
            lambda e, block, _: _looked_up(e, block.at(2), IQ4_VALUES),
            0.0,
            head=_word,
            numbers=_half,
        ),
        "MXFP4": Form(
            lambda e, block, _: _looked_up(e, block.at(1), FP4_VALUES),
            0.0,
            head=_exponent,
            numbers=lambda heads: [half_of_power(heads)],
        ),
        "NVFP4": Form(
            lambda e, block, run: _fp4(e, block.at(run * 16 + 4)),
            0.0,
            head=_small_float(0),
            groups=2,
        ),
        "NV4_128": Form(
            lambda e, block, run: _fp4(e, block.at(run * 16 + 12)), 0.0, head=_nv4_scale, groups=2
        ),
        "Q1_0": Form(_q1_0, 0.0, head=_word, numbers=_half),
        "U4_32": Form(
            lambda e, block, _: _q4(e, block, 4), 128.0, head=_word, numbers=header, minimum=True
        ),
        "U4_64": Form(
            lambda e, block, run: _q4(e, block.at(run * 16), 4),
            128.0,
            head=_word,
            numbers=header,
            minimum=True,
        ),
        "A4_64": Form(
            lambda e, block, run: _q4(e, block.at(run * 16), 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "A8_32": Form(
            lambda e, block, _: _u8(e, block, 4),
            -128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "U8_64": Form(
            lambda e, block, run: _u8(e, block.at(run * RUN), 4),
            -128.0,
            head=_word,
            numbers=header,
            minimum=True,
        ),
        "F8_64": Form(_f8, 0.0, head=_word, numbers=lambda heads: [header(heads)[0] * HALVES_LESS]),
        "NF4_64": Form(
            _table4(NF4_VALUES), 0.0, head=_word, numbers=lambda heads: [header(heads)[0]]
        ),
        "FP4_64": Form(
            _table4(BNB_FP4_VALUES), 0.0, head=_word, numbers=lambda heads: [header(heads)[0]]
        ),
        "Q2_K": Form(
            lambda e, block, run: _two_bits(e, block.at(16), run),
            128.0,
            _scales_2k,
            minimum=True,
            groups=2,
        ),
        "Q3_K": Form(
            _q3_k,
            132.0,
            lambda e, block: [factors3(e, block).sext(I32).sitofp() * _d(e, block, 108)],
            groups=2,
        ),
        "Q4_K": Form(_q4_k, 128.0, _scales_4k, minimum=True),
        "Q5_K": Form(_q5_k, 128.0, _scales_4k, minimum=True),
        "Q6_K": Form(_q6_k, 160.0, _scales_6k, groups=2),
        "IQ4_XS": Form(
            lambda e, block, run: _looked_up(e, block.at(run * 16 + 8), IQ4_VALUES),
            0.0,
            lambda e, block: [factors_x4(e, block).sitofp() * _d(e, block, 0)],
        ),
        "TQ1_0": Form(_tq1_0, 129.0, _one_scale(52)),
        "TQ2_0": Form(_two_bits, 129.0, _one_scale(64)),
        **{kind: _rows_of_a_grid(kind) for kind in GRIDS},
    }
)
