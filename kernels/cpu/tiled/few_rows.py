"""Products of 9 rows of x and more in bfloat16 with a weight, by AMX: several sequences that
decode, prompts with weights in blocks.

    out[m, n] = sum over k of x[m, k] w[n, k]

The first operand of a tile product is 16 rows of the weight, 32 numbers of each; the second 16 rows
of x, which `emit_prepare` lays out. Each number of the weight is read and unpacked once.

Weights in bfloat16 are loaded as they lie. Of blocks of integers, what is multiplied are the
integers, which bfloat16 holds exactly (`codes`). With z what these are more than the integers stand
for,

    w . x = sum over groups of  scale (sum of (z + q) x - z sum of x) + minimum (sum of x)

in float32, so that nothing is rounded but what float32 rounds. A group is 32 numbers, or 16: then a
tile has zeros in the other half. The numbers of NF4_64 and FP4_64 are rounded to bfloat16.

A kernel's units are the weight's rows, at least 16; its args are those of `native.products`, x
prepared and of no stride.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.products import Args, row_bytes
from mtmd.kernels.cpu.native.program import CHUNKS
from mtmd.kernels.cpu.tiled.codes import FORMS, ROWS, RUN, TURN, Form, read_scales
from mtmd.kernels.cpu.tiled.cpu import tiles_allowed
from mtmd.kernels.quantization.blocks import BLOCKS

FEWEST = 9  # rows of x
MAXIMUM = 16  # in a tile; of a plain weight, others multiply more
# Up to which panels (`product`) are slower, by the groups of 32 numbers, each of which is a tile
LIMIT = {1: 48, 2: 31}
TILE = 1024  # bytes
CHUNK_BYTES = 48 << 10  # of weight that a thread takes at a time
SUMS, CODES, NUMBERS = 0, 4, 6  # tile registers: of results, of the weight, of x
PLAIN = "BF16"


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


def pays(kind: str, rows: int, outer: int, width: int, x: str) -> bool:
    """Return whether it is the fastest product of a weight that is not plain."""
    few = kind in FORMS and rows <= limit(kind)
    return few and takes(kind, rows, outer, width, x)


def limit(kind: str) -> int:
    """Return up to how many rows panels are slower."""
    return MAXIMUM if kind == PLAIN else LIMIT[FORMS[kind].groups]


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
            read_scales(e, form, rows, turn, stop, block, tables, heads)
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
