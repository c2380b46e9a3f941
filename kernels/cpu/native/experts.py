"""Mixtures of experts: routing, products with the experts chosen, and their sum.

Which expert's weights a product reads is known only while the program runs. `emit_chosen` calls a
product's kernel for each pair of a token and an expert, with the arguments of that pair.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I32, I64, Emitter, vec

LANES = 16
ARGS = 12  # of a product (products.py): 0 is x, 2 the weight, 4 the result


def emit_route(e: Emitter, router: str, normalize: bool, shares: bool) -> None:
    """The `top_k` largest of softmax(router) of each token and where they are

    args: router, router stride, E, top_k, weights (float32 [T, k]), chosen (int64 [T, k]), shares
    (float32 [E]), taken (int32 [T, E], to be written to). Units: tokens.
    """
    router_ptr, stride, experts, maximum = e.arg_ptr(0), e.arg(1), e.arg(2), e.arg(3)
    weights, chosen, shares_ptr, taken = (e.arg_ptr(i) for i in (4, 5, 6, 7))
    best, location, total, saved = e.var(F32), e.var(I64), e.var(F32), e.var(F32)
    with e.loop(e.first, e.last) as t:
        at = t * stride
        best.set(float("-inf"))
        with e.loop(0, experts) as i:
            best.set(e.maximum(e.read(router_ptr, router, at + i), best.get()))
            e.store(taken, e.const(I32, 0), t * experts + i)
        top = best.get()
        total.set(0.0)
        with e.loop(0, experts) as i:
            total.add(e.exp(e.read(router_ptr, router, at + i) - top))
        whole = total.get()
        saved.set(0.0)
        with e.loop(0, maximum) as n:  # the largest that is left, of equals the first
            best.set(float("-inf"))
            location.set(-1)
            with e.loop(0, experts) as i:
                value = e.read(router_ptr, router, at + i)
                free = e.load(taken, I32, t * experts + i).eq(0)
                with e.when(free & ((value > best.get()) | (location.get() < 0))):
                    best.set(value)
                    location.set(i)
            e.store(taken, e.const(I32, 1), t * experts + location.get())
            weight = e.exp(best.get() - top) / whole
            saved.add(weight)
            e.store(weights, weight, t * maximum + n)
            e.store(chosen, location.get(), t * maximum + n)
        with e.loop(0, maximum) as n:
            weight = e.load(weights, F32, t * maximum + n)
            if normalize:
                weight = weight / saved.get()
            if shares:
                expert = e.load(chosen, I64, t * maximum + n)
                weight = weight * e.load(shares_ptr, F32, expert)
            e.store(weights, weight, t * maximum + n)


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


def emit_mix(e: Emitter, y: str, out: str) -> None:
    """out[t] = sum over n of weights[t, n] y[t, n]

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
                weight = e.load(weights, F32, t * maximum + n).splat(LANES)
                value = e.read(y_ptr, y, (t * maximum + n) * size + c, LANES, mask)
                sum_.set(e.fma(weight, value, sum_.get()))
            e.write(out_ptr, out, t * size + c, sum_.get(), mask)
