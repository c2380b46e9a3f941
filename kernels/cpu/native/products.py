"""Products of a few rows of x with a weight: out[m, n] = sum over k of x[m, k] w[n, k].

The weight is read once, at the speed of memory if all goes well. A core reads faster from several
places than from one, and faster still where lines are asked for ahead: the rows of a call are cut
into runs, which are read side by side, one row of each at a time. Every row of the weight is
unpacked once for all rows of x.

Floating-point weights are multiplied in fp32 with x as it is stored. Blocks of small integers are
multiplied as integers with x as `layouts.prepare` lays it out: of 16 bits, or of bytes where that
is faster (planes.py).

A kernel's units are the rows of the weight. args:
    0 x, or the prepared rows   1 stride of x's rows: in elements, or in bytes where prepared
    2 w                         3 bytes of a weight row; rows follow each other without gaps
    4 out                       5 stride of out's rows, in elements
    6 width                     7 rows of x; for kernels of less than 8, no more than those
    8 bias or 0                 9 addend or 0, stored as out        10 stride of the addend's rows
    11 rows of the weight
A bias is added in fp32; the addend to the result as `out` stores it, so that all is as if each were
a node of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from mtmd.kernels.cpu.native import planes
from mtmd.kernels.cpu.native.compile import compile_kernel, compiling_for
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, SIZES, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.layouts import LANES, SUMS, Layout, madd, prepare, sums_of
from mtmd.kernels.cpu.native.unpack import UNPACK, Terms, Unpack
from mtmd.kernels.quantization.blocks import BLOCKS

# Of x that kernels are made for. Others take the next larger; more than 8 rows are multiplied 8 at
# a time, while the weight's rows of this call are in the second cache and x's in the first.
ROWS = (1, 2, 4, 8)
PLAIN = {"F32": "f32", "BF16": "bf16"}
KINDS = (*PLAIN, *UNPACK)
CHUNK_BYTES = 32 << 10  # of weight that a thread takes at a time: a few microseconds
AHEAD = 8 << 10  # bytes that are asked for before they are read, of all runs
RUNS = 4  # read side by side by one row of x
STEP = 16  # values of a floating-point weight at a time
HALF = SUMS // 2  # 32-bit numbers of a register of AVX2
FINISHED = 4  # rows of the weight whose sums are added up at once


@dataclass(frozen=True)
class Preparation:
    """A kernel whose units are rows of x. args: x, its row stride in elements, the prepared rows
    (aligned to 64), width. Products whose `name` is the same share prepared rows.
    """

    layout: Layout
    name: str
    address: int

    def bytes(self, width: int) -> int:
        """Return the bytes of a row."""
        return self.layout.row_bytes(width)


@dataclass(frozen=True)
class Kernel:
    kind: str
    address: int
    prepare: Preparation | None

    def scratch(self, width: int) -> int:
        """Bytes of scratch memory that a call needs, aligned to 64."""
        return scratch_bytes(self.kind, width)


def rows_for(rows: int) -> int:
    """Return those of the smallest kernel that takes so many rows of x."""
    return next((count for count in ROWS if rows <= count), ROWS[-1])


def row_bytes(kind: str, width: int) -> int:
    """Return the row bytes of a weight's row."""
    if kind in PLAIN:
        return width * SIZES[PLAIN[kind]]
    block = BLOCKS[kind]
    return width // block.values * block.bytes


def prepared_bytes(kind: str, width: int, rows: int) -> int:
    """Return the prepared bytes of a row of x, of so many; none for floating-point weights, which
    take it as it is.
    """
    return 0 if kind in PLAIN else _unpack(kind, _in_bytes(kind, rows)).layout.row_bytes(width)


def scratch_bytes(kind: str, width: int) -> int:
    """Return the bytes of scratch memory that a call needs: where rows of the weight are no whole
    chunks, the last one filled up.
    """
    if kind in PLAIN or width % UNPACK[kind].layout.values == 0:
        return 0
    unpack = UNPACK[kind]
    return -(-(width // unpack.layout.values + 1) * unpack.chunk_bytes // 64) * 64


def too_narrow(kind: str, width: int) -> bool:
    """Return whether a weight's rows are so short that what a kernel reads beyond one of them lies
    beyond the next one, too: behind the last row but one, that is beyond the weight.
    """
    if kind in PLAIN:
        return False
    size = UNPACK[kind].layout.values
    return -width % size > width


def grain(kind: str, width: int) -> int:
    """Rows of a weight that a thread should take at a time."""
    return max(4, CHUNK_BYTES // max(row_bytes(kind, width), 1) // 4 * 4)


def _in_bytes(kind: str, rows: int) -> bool:
    """Return whether blocks are multiplied as bytes with so many rows of x."""
    return rows == 1 and kind in planes.PLANES and planes.pay(compiling_for())


def _unpack(kind: str, in_bytes: bool) -> Unpack:
    return planes.PLANES[kind] if in_bytes else UNPACK[kind]


def product(
    kind: str,
    rows: int,
    x: str,
    out: str,
    bias: str | None = None,
    add: bool = False,
    alike: bool = False,
) -> Kernel:
    """The kernel for a type of weight, so many rows of x (one of ROWS) and types of storage;
    `alike` where one row is prepared as several are.
    """
    if kind in PLAIN:
        address = compile_kernel(multiply_plain, PLAIN[kind], rows, x, out, bias, add)
        return Kernel(kind, address, None)
    in_bytes = not alike and _in_bytes(kind, rows)
    layout = _unpack(kind, in_bytes).layout
    address = compile_kernel(prepare_rows, kind, x, in_bytes)
    preparation = Preparation(layout, f"{layout.name} {x}", address)
    address = compile_kernel(multiply_blocks, kind, rows, out, bias, add, in_bytes)
    return Kernel(kind, address, preparation)


def prepare_rows(e: Emitter, kind: str, x: str, in_bytes: bool) -> None:
    prepare(e, _unpack(kind, in_bytes).layout, x)


def multiply_plain(
    e: Emitter, w: str, rows: int, x: str, out: str, bias: str | None, add: bool
) -> None:
    """Weights in floating point."""
    args = Args(e)
    element = F32 if x == "f32" else I16
    count = max(1, min(RUNS, 16 // rows))
    with args.passes(rows) as begin, _runs(args, begin, rows, count, out, bias, add) as run:
        xs = [args.x.at(at * args.x_stride, element) for at in args.x_rows(begin, rows)]
        begun = _pairs(e, args, xs, run) if x == w == "bf16" else 0
        for k, mask in e.spans(begun, args.width, STEP):
            ws = [e.read(weight, w, k, STEP, mask) for weight in run.weights]
            if mask is None:
                run.ask(k * SIZES[w], STEP * SIZES[w])
            for m in range(rows):
                values = e.read(xs[m], x, k, STEP, mask)
                for total, numbers in zip(run.sums[m], ws, strict=True):
                    total.set(e.fma(values, numbers, total.get()))


def _pairs(e: Emitter, args: Args, xs: list[Value], run: _Rows) -> Value:
    """bf16 times bf16, 32 values at a time, without widening them; where that ends."""
    end = args.width // LANES * LANES
    kind = vec(I16, LANES)
    with e.loop(0, end, LANES) as k:
        ws = [e.load(weight, kind, k) for weight in run.weights]
        run.ask(k * 2, LANES * 2)
        for m, x in enumerate(xs):
            values = e.load(x, kind, k)
            for total, numbers in zip(run.sums[m], ws, strict=True):
                total.set(e.dot_bf16(values, numbers, total.get()))
    return end


def multiply_blocks(
    e: Emitter, kind: str, rows: int, out: str, bias: str | None, add: bool, in_bytes: bool
) -> None:
    """Weights in blocks, x prepared."""
    args, unpack = Args(e), _unpack(kind, in_bytes)
    layout = unpack.layout
    chunks = (args.width + (layout.values - 1)) // layout.values
    count, padded = _count(unpack, rows), _padded_row(args, unpack)
    with (
        args.passes(rows) as begin,
        _runs(args, begin, rows, count, out, bias, add, padded, layout.sums) as run,
    ):
        xs = [args.x.at(at * args.x_stride) for at in args.x_rows(begin, rows)]
        with e.loop(0, chunks) as chunk:
            at, x_at = chunk * unpack.chunk_bytes, chunk * layout.bytes
            run.ask(at, unpack.chunk_bytes)
            weights, here = [w.at(at) for w in run.weights], [x.at(x_at) for x in xs]
            if rows > 1:
                _chunk(e, unpack, weights, here, run.sums)
            else:  # one after the other, as registers are few
                for weight, total in zip(weights, run.sums[0], strict=True):
                    if in_bytes:
                        planes.multiply(e, unpack, unpack.terms(e, weight), here[0], total)
                    else:
                        _chunk(e, unpack, [weight], here, [[total]])
                    if not e.has("avx512f"):  # else x, read once, would be moved to the stack
                        e.read_anew()


def _count(unpack: Unpack, rows: int) -> int:
    """Rows of the weight to multiply at once. With several rows of x their integers and all sums
    should fit in the 32 registers there are at best.
    """
    if unpack.layout.planes:
        return planes.RUNS
    if rows <= 2:
        return RUNS // rows
    return 2 if len(unpack.layout.vectors) <= 4 else 1


def _chunk(
    e: Emitter, unpack: Unpack, weights: list[Value], xs: list[Value], sums: list[list[Var]]
) -> None:
    """One chunk of some rows of the weight times that of all rows of x."""
    terms = [unpack.terms(e, weight) for weight in weights]
    for part in range(unpack.layout.parts):
        _part(e, unpack.layout, part, terms, xs, sums)


def _part(
    e: Emitter,
    layout: Layout,
    part: int,
    terms: list[Terms],
    xs: list[Value],
    sums: list[list[Var]],
) -> None:
    """One part of a chunk."""
    indices = range(part * layout.each, (part + 1) * layout.each)

    def start(x: Value) -> Value | None:
        if not layout.zero:
            return None
        return e.load(x.at(layout.extra_at(part)), vec(I32, SUMS), align=64)

    def add(total: Value | None, numbers: Value, x: Value) -> Value:
        if layout.real:
            return numbers * x if total is None else e.fma(numbers, x, total)
        product = madd(e, numbers, x)
        return product if total is None else total + product

    def value(x: Value, index: int) -> Value:
        kind = vec(F32, SUMS) if layout.real else vec(I16, LANES)
        return e.load(x, kind, index * kind.count, align=64)

    if len(xs) <= 2:  # integers of all rows vector by vector, each used at once
        totals = [[start(x) for _ in terms] for x in xs]
        for index in indices:
            integers = [next(term.vectors) for term in terms]
            for m, x in enumerate(xs):
                here = value(x, index)
                for r, numbers in enumerate(integers):
                    totals[m][r] = add(totals[m][r], numbers, here)
    else:  # all integers of a few rows first, then one row of x after the other
        unpacked = [[next(term.vectors) for _ in indices] for term in terms]
        if e.has("avx2") and not e.has("avx512f") and not layout.real:
            for first in range(0, SUMS, HALF):
                _half(e, layout, part, first, terms, unpacked, xs, sums)
            return
        totals = []
    for m, x in enumerate(xs):
        if len(xs) <= 2:
            row = totals[m]
        else:
            row = [start(x) for _ in terms]
            for index in indices:
                here = value(x, index)
                for r, vectors in enumerate(unpacked):
                    row[r] = add(row[r], vectors[index - indices.start], here)
        scale = extra = None
        if not layout.real:
            scale = e.load(x.at(layout.scale_at(part)), vec(F32, SUMS), align=64)
        if layout.lane or layout.run:
            extra = e.load(x.at(layout.extra_at(part)), vec(F32, SUMS), align=64)
        for r, term in enumerate(terms):
            total, factor = row[r], term.scales[part]
            assert total is not None
            if scale is not None:
                total, factor = total.sitofp(), factor * scale
            result = e.fma(total, factor, sums[m][r].get())
            if extra is not None and term.minima:
                result = e.fma(term.minima[part], extra, result)
            sums[m][r].set(result)


def _half(
    e: Emitter,
    layout: Layout,
    part: int,
    first: int,
    terms: list[Terms],
    unpacked: list[list[Value]],
    xs: list[Value],
    sums: list[list[Var]],
) -> None:
    """Do what `_part` does for the lanes of one register of AVX2 from `first` on: so the integers
    of the weights stay in its 16 registers while rows of x pass.
    """
    lanes = range(first, first + HALF)
    wide, real = vec(I16, 2 * HALF), vec(F32, HALF)
    weights = [
        [vector.shuffle(range(2 * first, 2 * (first + HALF))) for vector in vectors]
        for vectors in unpacked
    ]
    factors = [term.scales[part].shuffle(lanes) for term in terms]
    minima = [term.minima[part].shuffle(lanes) if term.minima else None for term in terms]
    for x, line in zip(xs, sums, strict=True):

        def load(at: int, kind: ir.Type, x: Value = x) -> Value:
            return e.load(x.at(at), kind, first, align=32)

        begin = load(layout.extra_at(part), vec(I32, HALF)) if layout.zero else None
        totals = [begin for _ in terms]
        for i in range(layout.each):
            here = e.load(x, wide, (part * layout.each + i) * LANES + 2 * first, align=32)
            for r, vectors in enumerate(weights):
                product, total = madd(e, vectors[i], here), totals[r]
                totals[r] = product if total is None else total + product
        scale = load(layout.scale_at(part), real)
        extra = load(layout.extra_at(part), real) if layout.lane or layout.run else None
        for total, factor, minimum, own in zip(totals, factors, minima, line, strict=True):
            assert total is not None
            whole = own.get()
            result = e.fma(total.sitofp(), factor * scale, whole.shuffle(lanes))
            if extra is not None and minimum is not None:
                result = e.fma(minimum, extra, result)
            low, high = (result, whole.shuffle(range(HALF, SUMS)))
            if first:
                low, high = whole.shuffle(range(HALF)), result
            own.set(low.concat(high))


class Args:
    """A kernel's arguments by name."""

    def __init__(self, e: Emitter):
        self.e = e
        self.x, self.x_stride = e.arg_ptr(0), e.arg(1)
        self.w, self.w_bytes = e.arg_ptr(2), e.arg(3)
        self.out, self.out_stride = e.arg_ptr(4), e.arg(5)
        self.width, self.rows = e.arg(6), e.arg(7)
        self.bias = e.arg_ptr(8)
        self.addend, self.addend_stride = e.arg_ptr(9), e.arg(10)
        self.w_rows = e.arg(11)

    @contextmanager
    def passes(self, rows: int) -> Iterator[Value]:
        """A loop over the rows of x, so many at a time: the first of them."""
        if rows < ROWS[-1]:
            yield self.e.i64(0)
            return
        with self.e.loop(0, self.rows, rows) as begin:
            yield begin

    def x_rows(self, begin: Value, rows: int) -> list[Value]:
        """The index of each row of x; beyond those there are, the last once more."""
        last = self.rows - 1
        return [self.e.minimum(begin + m, last) for m in range(rows)]


@dataclass(frozen=True)
class _Rows:
    """One row of each run of the weight: where they begin, fp32 sums of every row of x with each,
    and how many bytes of a run lie before them.
    """

    weights: list[Value]
    sums: list[list[Var]]
    before: Value
    run_bytes: Value

    def ask(self, at: Value, count: int) -> None:
        """Prefetch the lines of so many bytes, some way behind a byte of each row. What would be
        behind a run is the beginning of that of the next call.
        """
        e, runs = at.e, len(self.weights)
        ahead = at + AHEAD // runs
        beyond = self.before + ahead >= self.run_bytes
        ahead = e.select(beyond, ahead + self.run_bytes * (runs - 1), ahead)
        for weight in self.weights:
            for line in range(-(-count // 64)):
                e.prefetch(weight.at(ahead + 64 * line))


@contextmanager
def _runs(
    args: Args,
    begin: Value,
    rows: int,
    count: int,
    out: str,
    bias: str | None,
    add: bool,
    padded: Value | None = None,
    lanes: int = SUMS,
) -> Iterator[_Rows]:
    """A loop over the units in so many runs, one row of each at a time. What is left to do with the
    sums of a few rows, fp32 [lanes], is done at once. Beyond the last unit that one comes again.
    `padded` stands for the weight's last row.
    """
    e, kind = args.e, vec(F32, lanes)
    each = (e.last - e.first + (count - 1)) // count
    results = e.local(F32, rows * count * FINISHED * lanes)
    with e.loop(0, each, FINISHED) as start:
        with e.loop(start, e.minimum(start + FINISHED, each)) as at:
            weights = []
            for r in range(count):
                row = e.minimum(e.first + each * r + at, e.last - 1)
                weight = args.w.at(row * args.w_bytes)
                if padded is not None:
                    weight = e.select(row.eq(args.w_rows - 1), padded, weight)
                weights.append(weight)
            zero = e.f32(0.0, lanes)
            sums = [[e.var(kind, zero) for _ in range(count)] for _ in range(rows)]
            yield _Rows(weights, sums, at * args.w_bytes, each * args.w_bytes)
            for m in range(rows):
                for r in range(count):
                    location = (at - start + (m * count + r) * FINISHED) * lanes
                    e.store(results, sums[m][r].get(), location, align=4 * lanes)
        for r in range(count):
            totals = [
                sums_of(
                    [
                        e.load(
                            results, kind, ((m * count + r) * FINISHED + i) * lanes, align=4 * lanes
                        )
                        for i in range(FINISHED)
                    ]
                )
                for m in range(rows)
            ]
            first = e.first + each * r + start
            last = e.minimum(e.first + each * (r + 1), e.last)
            _finish(args, totals, begin, first, last, out, bias, add)


def _padded_row(args: Args, unpack: Unpack) -> Value | None:
    """The weight's last row, where need be a copy that is filled up to whole chunks: kernels read
    whole chunks, of other rows a part of the next one, which x's zeros leave out.
    """
    e, size = args.e, unpack.layout.values
    if BLOCKS[unpack.kind].values == size:
        return None
    last = args.w_rows - 1
    row = e.var(args.w.type, args.w.at(last * args.w_bytes))
    rest = args.width % size
    with e.when(rest.ne(0) & e.last.eq(args.w_rows)):
        whole = (args.width // size + 1) * unpack.chunk_bytes
        with e.loop(0, args.w_bytes, 2) as i:
            e.store(e.scratch.at(i), e.load(row.get().at(i), I16, align=1), align=1)
        with e.loop(args.w_bytes, whole) as i:
            e.store(e.scratch.at(i), e.const(I8, 0))
        row.set(e.scratch)
    return row.get()


def _finish(
    args: Args,
    totals: list[Value],
    begin: Value,
    first: Value,
    last: Value,
    out: str,
    bias: str | None,
    add: bool,
) -> None:
    """Totals of a few rows of the weight to results, from `first` on up to `last`."""
    e, count = args.e, totals[0].lanes
    mask = e.mask(last - first, count)
    bias_value = None if bias is None else e.read(args.bias, bias, first, count, mask)
    for m, result in enumerate(totals):
        row = begin + m
        with e.when(row < args.rows):
            if bias_value is not None:
                result = result + bias_value
            if add:
                at = args.addend_stride * row + first
                result = e.rounded(result, out) + e.read(args.addend, out, at, count, mask)
            e.write(args.out, out, args.out_stride * row + first, result, mask)
