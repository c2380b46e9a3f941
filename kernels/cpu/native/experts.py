"""Mixtures of experts: routing, products with the experts chosen, and their sum.

Which expert's weights a product reads is known only while the program runs. `emit_chosen` calls a
product's kernel for each pair of a token and an expert, with the arguments of that pair. Of many
tokens, `emit_sort` groups the pairs by their experts, `emit_lay_rows` lays out what each expert
reads and `emit_grouped` multiplies an expert's rows at once.
"""

from __future__ import annotations

from collections.abc import Callable

from mtmd.kernels.cpu.native.emit import F32, I16, I32, I64, Emitter, Value, Var, vec
from mtmd.kernels.ops.moe import Routing

LANES = 16
BLOCK = 16  # rows of one expert that are laid out together, of many tokens
ARGS = 12  # of a product (products.py): 0 is x, 2 the weight, 4 the result


def emit_route(
    e: Emitter, router: str, routing: Routing, shares: bool, bias: bool, reads: bool
) -> None:
    """The experts of each token, as `routing` says, and their weights

    args: router, router stride, E, weights (float32 [T, k]), chosen (int64 [T, k]), shares (float32
    [E]), bias (float32 [E]), and memory to be written to: scores and ratings (float32 [T, E] each),
    what may not be chosen (int32 [T, E + groups]), the groups' ratings (float32 [T, groups]); with
    `reads`, whether experts read a token (int32 [T]), else its experts are -1. Units: tokens.
    """
    router_ptr, stride, experts = e.arg_ptr(0), e.arg(1), e.arg(2)
    weights, chosen, shares_ptr, bias_ptr = (e.arg_ptr(i) for i in (3, 4, 5, 6))
    scores, ratings, closed, group_ratings = (e.arg_ptr(i) for i in (7, 8, 9, 10))
    best, second, total, saved = (e.var(F32) for _ in range(4))
    location, maximum, groups = e.var(I64), routing.top_k, routing.groups
    with e.loop(e.first, e.last) as t:
        at, own = t * stride, t * experts
        best.set(float("-inf"))
        with e.loop(0, experts) as i:
            best.set(e.maximum(e.read(router_ptr, router, at + i), best.get()))
        top = best.get()
        total.set(0.0)
        with e.loop(0, experts) as i:
            value = e.read(router_ptr, router, at + i)
            score = e.exp(value - top) if routing.score == "softmax" else e.sigmoid(value)
            total.add(score)
            e.store(scores, score, own + i)
        whole = total.get()
        # Closed experts follow closed groups in memory.
        first = t * (experts + groups)
        with e.loop(0, experts) as i:
            if routing.by_logits(bias or None):
                rating = e.read(router_ptr, router, at + i)
            else:
                rating = e.load(scores, F32, own + i)
                if routing.score == "softmax":
                    rating = rating / whole
                if bias:
                    rating = rating + e.load(bias_ptr, F32, i)
            e.store(ratings, rating, own + i)
            e.store(closed, e.const(I32, int(groups > 1)), first + groups + i)
        if groups > 1:
            each = experts // groups
            with e.loop(0, groups) as g:
                best.set(float("-inf"))
                second.set(float("-inf"))
                with e.loop(0, each) as i:
                    value = e.load(ratings, F32, own + g * each + i)
                    with e.when(value > second.get()):
                        second.set(e.minimum(value, best.get()))
                        best.set(e.maximum(value, best.get()))
                rating = best.get() + second.get() if routing.group_best == 2 else best.get()
                e.store(group_ratings, rating, t * groups + g)
                e.store(closed, e.const(I32, 0), first + g)
            with e.loop(0, routing.top_groups):
                _highest(e, group_ratings, closed, t * groups, first, groups, best, location)
                with e.loop(0, each) as i:
                    expert = location.get() * each + i
                    e.store(closed, e.const(I32, 0), first + groups + expert)
        saved.set(0.0)
        with e.loop(0, maximum) as n:
            _highest(e, ratings, closed, own, first + groups, experts, best, location)
            weight = e.load(scores, F32, own + location.get())
            if routing.score == "softmax":
                weight = weight / whole
            saved.add(weight)
            e.store(weights, weight, t * maximum + n)
            e.store(chosen, location.get(), t * maximum + n)
        with e.loop(0, maximum) as n:
            weight = e.load(weights, F32, t * maximum + n)
            if routing.normalize:
                weight = weight / (saved.get() + routing.eps)
            weight = weight * routing.scale
            if shares:
                expert = e.load(chosen, I64, t * maximum + n)
                weight = weight * e.load(shares_ptr, F32, expert)
            e.store(weights, weight, t * maximum + n)
        if reads:
            with e.when(e.load(e.arg_ptr(11), I32, t).eq(0)), e.loop(0, maximum) as n:
                e.store(chosen, e.i64(-1), t * maximum + n)


def _highest(
    e: Emitter,
    ratings: Value,
    closed: Value,
    at: Value,
    first: Value,
    count: Value | int,
    best: Var,
    location: Var,
) -> None:
    """The highest rating that is not closed, of equals the first, which is closed then."""
    best.set(float("-inf"))
    location.set(-1)
    with e.loop(0, count) as i:
        value = e.load(ratings, F32, at + i)
        free = e.load(closed, I32, first + i).eq(0)
        with e.when(free & ((value > best.get()) | (location.get() < 0))):
            best.set(value)
            location.set(i)
    e.store(closed, e.const(I32, 1), first + location.get())


def emit_chosen(e: Emitter) -> None:
    """A product's kernel for every token and each of its experts

    args: the product's own, for the first pair; then its kernel's address, the rows of a weight,
    chosen (int64 [T, k]), bytes from one expert's weight to the next, from one x to the next and
    how many pairs share one, from one result to the next. Units: pairs times rows.
    """
    address, rows, chosen = e.arg(ARGS), e.arg(ARGS + 1), e.arg_ptr(ARGS + 2)
    w_step, x_step, each, out_step = (e.arg(ARGS + 3 + i) for i in range(4))
    own = e.local(I64, ARGS)
    for i in range(ARGS):
        e.store(own, e.arg(i), i)
    first, last = e.first, e.last
    begin = first // rows
    end = (last + rows - 1) // rows
    with e.loop(begin, end) as pair:
        expert = e.load(chosen, I64, pair)
        e.store(own, e.arg(0) + pair // each * x_step, 0)
        e.store(own, e.arg(2) + expert * w_step, 2)
        e.store(own, e.arg(4) + pair * out_step, 4)
        low, high = first - pair * rows, last - pair * rows
        low = e.select(low > 0, low, e.i64(0))
        high = e.select(high < rows, high, rows)
        with e.when(expert > -1):  # which stands for none
            e.call_address(address, own, low, high, e.scratch)


def emit_sort(e: Emitter) -> None:
    """Group pairs of a token and an expert by their experts, without those of no expert (-1)

    args: chosen (int64 [pairs]), pairs, E, and what is written: pairs of each expert (int64 [E]),
    where their rows begin (int64 [E], multiples of `BLOCK`), the row of each pair (int64 [pairs]),
    the pair of each row (int64 [rows]; nothing behind an expert's last pair). Units: 1.
    """
    chosen, pairs, experts = e.arg_ptr(0), e.arg(1), e.arg(2)
    counts, begins, locations, order = (e.arg_ptr(i) for i in range(3, 7))
    with e.loop(e.first, e.last):
        with e.loop(0, experts) as i:
            e.store(counts, e.i64(0), i)
        with e.loop(0, pairs) as pair:
            expert = e.load(chosen, I64, pair)
            with e.when(expert > -1):
                e.store(counts, e.load(counts, I64, expert) + 1, expert)
        row = e.var(I64, 0)
        with e.loop(0, experts) as i:
            e.store(begins, row.get(), i)
            row.add((e.load(counts, I64, i) + (BLOCK - 1)) // BLOCK * BLOCK)
            e.store(counts, e.i64(0), i)
        with e.loop(0, pairs) as pair:
            expert = e.load(chosen, I64, pair)
            with e.when(expert > -1):
                count = e.load(counts, I64, expert)
                location = e.load(begins, I64, expert) + count
                e.store(counts, count + 1, expert)
                e.store(locations, location, pair)
                e.store(order, pair, location)


# Arguments of `emit_lay_rows`
X, X_BYTES, EACH, ORDER, COUNTS, BEGINS, TO, BLOCK_BYTES, WIDTH = range(9)
FEW, MEDIUM, PREPARE, ROW_BYTES, PREPARE_TILES, TILE_RUNS, TILE_BYTES = range(9, 16)


def emit_lay_rows(e: Emitter, x: str, taken: bool, prepared: bool) -> None:
    """Lay the rows that each expert reads out as its product takes them

    Experts with up to FEW rows have them prepared one by one (with `prepared`, else they are as
    they are stored), those with up to MEDIUM in blocks by tiles, others as they are stored. Row r
    is x[ORDER[r] / EACH] where it is `taken`, else x[r], and then rows of others stay where they
    are. Block b of 16 rows begins at TO + b BLOCK_BYTES, rows of an expert follow each other.
    Scratch memory: 16 rows of x. Units: experts.
    """
    x_ptr, x_bytes, width = e.arg_ptr(X), e.arg(X_BYTES), e.arg(WIDTH)
    order, own = e.arg_ptr(ORDER), e.local(I64, 5)
    element = F32 if x == "f32" else I16

    def copy(source: Value, to: Value) -> None:
        for c, mask in e.spans(0, width, 2 * LANES):
            kind = vec(element, 2 * LANES)
            if mask is None:
                e.store(to, e.load(source, kind, c), c)
            else:
                e.masked_store(to, e.masked_load(source, kind, c, mask), c, mask)

    def call(address: int, units: Value | int, *args: Value) -> None:
        for i, arg in enumerate(args):
            e.store(own, arg, i)
        e.call_address(e.arg(address), own, e.i64(0), e.i64(units), e.scratch)

    with e.loop(e.first, e.last) as expert:
        count = e.load(e.arg_ptr(COUNTS), I64, expert)
        begin = e.load(e.arg_ptr(BEGINS), I64, expert)
        to = e.arg(TO) + begin // BLOCK * e.arg(BLOCK_BYTES)
        few = count <= e.arg(FEW)

        def row(i: Value, begin: Value = begin) -> Value:
            at = begin + i
            return e.load(order, I64, at) // e.arg(EACH) if taken else at

        def each(
            prepared: bool, count: Value = count, to: Value = to, row: Callable[..., Value] = row
        ) -> None:
            with e.loop(0, count) as i:
                source = row(i) * x_bytes
                if prepared:
                    target = to + i * e.arg(ROW_BYTES)
                    call(PREPARE, 1, e.arg(X) + source, width, target, width)
                else:
                    copy(x_ptr.at(source), (to + i * x_bytes).to_ptr())

        with e.either(few) as (yes, no):
            with yes:
                each(prepared)
            with no, e.either(count <= e.arg(MEDIUM)) as (medium, many):
                with medium, e.loop(0, count, BLOCK) as i:
                    rows = e.minimum(count - i, BLOCK)
                    source = e.arg(X) + (begin + i) * x_bytes
                    if taken:
                        with e.loop(0, rows) as n:
                            at = x_ptr.at(row(i + n) * x_bytes)
                            copy(at, e.scratch.at(n * x_bytes))
                        source = Value(e, e.b.ptrtoint(e.scratch.ir, I64))
                    target = to + i // BLOCK * e.arg(TILE_BYTES)
                    call(PREPARE_TILES, e.arg(TILE_RUNS), source, width, target, width, rows)
                with many:
                    if taken:
                        each(False)


# Arguments of `emit_grouped`, behind COUNTS and BEGINS as above
G_COUNTS, G_BEGINS, G_FEW, G_MEDIUM, UNITS, COLUMNS, OUTER, WEIGHT, WEIGHT_BYTES, ROW = range(10)
OUT, OUT_BYTES, G_WIDTH, LAID, LAID_BYTES, STRIDE, PLAIN, PLAIN_BYTES = range(10, 18)
BY_ROWS, BY_TILES, BY_PANELS, PANEL_ARGS = 18, 22, 23, 24  # addresses; four sizes


def emit_grouped(e: Emitter) -> None:
    """Multiply each expert's rows with its weight, by the kernel that is for so many rows

    BY_ROWS are kernels for 1, 2, 4 and 8 rows, of rows that are STRIDE apart, as `emit_lay_rows`
    laid them out at LAID; BY_TILES takes its blocks, BY_PANELS rows as they are stored at PLAIN, of
    which 16 are PLAIN_BYTES. Units: experts times UNITS, of COLUMNS rows of the weight.
    """
    own, outer, width = e.local(I64, 20), e.arg(OUTER), e.arg(G_WIDTH)

    def arguments(*args: Value | int) -> None:
        for i, arg in enumerate(args):
            e.store(own, e.i64(arg), i)

    with e.loop(e.first, e.last) as unit:
        expert = unit // e.arg(UNITS)
        first = unit % e.arg(UNITS)
        low = first * e.arg(COLUMNS)
        high = e.minimum(low + e.arg(COLUMNS), outer)
        count = e.load(e.arg_ptr(G_COUNTS), I64, expert)
        begin = e.load(e.arg_ptr(G_BEGINS), I64, expert)
        block, w = begin // BLOCK, e.arg(WEIGHT) + expert * e.arg(WEIGHT_BYTES)
        laid, row = e.arg(LAID) + block * e.arg(LAID_BYTES), e.arg(ROW)
        out = e.arg(OUT) + begin * e.arg(OUT_BYTES)
        with e.when(count > 0), e.either(count <= e.arg(G_MEDIUM)) as (less, many):
            with less:
                few = count <= e.arg(G_FEW)
                stride = e.select(few, e.arg(STRIDE), e.i64(0))
                arguments(laid, stride, w, row, out, outer, width, count, 0, 0, outer, outer)
                address = e.arg(BY_ROWS)
                for more, rows in enumerate((1, 2, 4)):
                    address = e.select(count > rows, e.arg(BY_ROWS + 1 + more), address)
                address = e.select(few, address, e.arg(BY_TILES))
                e.call_address(address, own, low, high, e.scratch)
            with many:
                padded = (count + (BLOCK - 1)) // BLOCK * BLOCK
                x = e.arg(PLAIN) + block * e.arg(PLAIN_BYTES)
                sizes = [e.arg(PANEL_ARGS + i) for i in range(4)]
                arguments(x, width, padded, width, w, row, outer, 0, out, outer)
                for i, size in enumerate((e.arg(COLUMNS), sizes[0], e.i64(1), *sizes[1:])):
                    e.store(own, size, 10 + i)
                e.call_address(e.arg(BY_PANELS), own, first, first + 1, e.scratch)


def emit_heads(e: Emitter, count: int) -> None:
    """A product's kernel for each head

    args: the kernel's address, its units, bytes from one head's x, weight and result to the next,
    then its own `count` args: 0 is x, 4 the weight, 8 the result. Units: heads times the kernel's.
    """
    address, units = e.arg(0), e.arg(1)
    own = e.local(I64, count)
    for i in range(count):
        e.store(own, e.arg(5 + i), i)
    with e.loop(e.first // units, (e.last + units - 1) // units) as head:
        for step, location in enumerate((0, 4, 8)):
            e.store(own, e.arg(5 + location) + head * e.arg(2 + step), location)
        first = e.maximum(e.first - head * units, 0)
        last = e.minimum(e.last - head * units, units)
        e.call_address(address, own, first, last, e.scratch)


def emit_mix(
    e: Emitter, y: str, out: str, weighted: bool, located: bool = False, reads: bool = False
) -> None:
    """out[t] = sum over n of weights[t, n] y[t, n], of y[t, n] if it is not `weighted`

    args: y ([T, k, D]), weights (float32 [T, k]), k, out, D; with `located`, the rows that y[t, n]
    are (int64 [T, k]); with `reads`, which of them there are (int32 [T]), else the sum is 0. Units:
    T times blocks of 256 values.
    """
    y_ptr, weights, maximum, out_ptr, size = (
        e.arg_ptr(0),
        e.arg_ptr(1),
        e.arg(2),
        e.arg_ptr(3),
        e.arg(4),
    )
    blocks = (size + 255) // 256
    sum_ = e.var(vec(F32, LANES))
    with e.loop(e.first, e.last) as unit:
        t = unit // blocks
        start = (unit - t * blocks) * 256
        stop = e.select(start + 256 < size, start + 256, size)
        for c, mask in e.spans(start, stop, LANES):
            sum_.set(0.0)
            there = e.load(e.arg_ptr(6), I32, t).ne(0) if reads else None
            terms = maximum if there is None else e.select(there, maximum, e.i64(0))
            with e.loop(0, terms) as n:
                row = t * maximum + n
                row = e.load(e.arg_ptr(5), I64, row) if located else row
                value = e.read(y_ptr, y, row * size + c, LANES, mask)
                if weighted:
                    weight = e.load(weights, F32, t * maximum + n).splat(LANES)
                    sum_.set(e.fma(weight, value, sum_.get()))
                else:
                    sum_.add(value)
            e.write(out_ptr, out, t * size + c, sum_.get(), mask)
