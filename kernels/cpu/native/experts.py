"""Mixtures of experts: routing, products with the experts chosen, and their sum.

Which expert's weights a product reads is known only while the program runs. `emit_chosen` calls a
product's kernel for each pair of a token and an expert, with the arguments of that pair.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I32, I64, Emitter, Value, Var, vec
from mtmd.kernels.ops.moe import Routing

LANES = 16
ARGS = 12  # of a product (products.py): 0 is x, 2 the weight, 4 the result


def emit_route(e: Emitter, router: str, routing: Routing, shares: bool, bias: bool) -> None:
    """The experts of each token, as `routing` says, and their weights

    args: router, router stride, E, weights (float32 [T, k]), chosen (int64 [T, k]), shares (float32
    [E]), bias (float32 [E]), and memory to be written to: scores and ratings (float32 [T, E] each),
    what may not be chosen (int32 [T, E + groups]), the groups' ratings (float32 [T, groups]).
    Units: tokens.
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
        e.call_address(address, own, low, high, e.scratch)


def emit_mix(e: Emitter, y: str, out: str, weighted: bool) -> None:
    """out[t] = sum over n of weights[t, n] y[t, n], of y[t, n] if it is not `weighted`

    args: y ([T, k, D]), weights (float32 [T, k]), k, out, D. Units: T times blocks of 256 values.
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
            with e.loop(0, maximum) as n:
                value = e.read(y_ptr, y, (t * maximum + n) * size + c, LANES, mask)
                if weighted:
                    weight = e.load(weights, F32, t * maximum + n).splat(LANES)
                    sum_.set(e.fma(weight, value, sum_.get()))
                else:
                    sum_.add(value)
            e.write(out_ptr, out, t * size + c, sum_.get(), mask)
