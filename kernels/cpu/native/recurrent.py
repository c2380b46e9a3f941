"""Short convolutions and linear attention of few tokens, and states put back.

Sequences begin at `starts` among the tokens and keep their states in `slots` of a pool; results are
packed as the ops of these names have them (kernels/ops/recurrent.py): outputs, then new states.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I64, SIZES, Emitter, Value, vec
from mtmd.kernels.cpu.tiled.activation import activated

LANES = 16
CHANNELS = 256  # of a convolution, at most, that are gone through together
AT_ONCE = 4  # tokens of a convolution
WIDE = 4  # vectors of values that are worked on at once: independent sums


def emit_conv(e: Emitter, dtype: str, w: str, taps: int, bias: str | None, silu: bool) -> None:
    """y[t, c] = act(sum_j w[c, j] x[t - W + 1 + j, c] + bias[c]), W = `taps`

    args: x, x stride, w, state, starts, slots, bias, out, T, S, C. Units: blocks of 16 channels.

    Some channels at a time are gone through token by token, as they lie in memory, four tokens at
    once where all that these read are the sequence's.
    """
    x, stride, w_ptr, state = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), e.arg_ptr(3)
    starts, slots, bias_ptr, out = (e.arg_ptr(i) for i in (4, 5, 6, 7))
    tokens, sequences, channels = e.arg(8), e.arg(9), e.arg(10)
    before, size = taps - 1, SIZES[dtype]
    factors = e.local(F32, taps * CHANNELS)

    with e.loop(e.first * LANES, e.minimum(e.last * LANES, channels), CHANNELS) as begin:
        end = e.minimum(begin + CHANNELS, e.minimum(e.last * LANES, channels))
        with e.loop(begin, end) as c:
            for j in range(taps):
                tap = e.read(w_ptr, w, c * taps + j)
                e.store(factors, tap, c - begin + j * CHANNELS)
        with e.loop(0, sequences) as s:
            start, stop = e.load(starts, I64, s), e.load(starts, I64, s + 1)
            count, old = stop - start, e.load(slots, I64, s) * before

            def row(
                t: Value,
                c: Value,
                mask: Value | None,
                inside: bool = False,
                start: Value = start,
                old: Value = old,
            ) -> Value:
                """Return the row of the sequence's token t, below 0 of its state."""
                here = x.at(((start + t) * stride + c) * size)
                if not inside:
                    saved = state.at(((old + before + t) * channels + c) * size)
                    here = e.select(t < 0, saved, here)
                return e.read(here, dtype, 0, LANES, mask)

            def work(
                t: Value, many: int, begin: Value = begin, end: Value = end, start: Value = start
            ) -> None:
                """Results of `many` tokens from t on."""
                for c, mask in e.spans(begin, end, LANES):
                    rows = [row(t - before + i, c, mask, many > 1) for i in range(before + many)]
                    offset = e.read(bias_ptr, bias, c, LANES, mask) if bias else None
                    at = c - begin
                    shares = [
                        e.load(factors, vec(F32, LANES), at + j * CHANNELS) for j in range(taps)
                    ]
                    for i in range(many):
                        y = e.f32(0.0, LANES) if offset is None else offset
                        for j, share in enumerate(shares):
                            y = e.fma(rows[i + j], share, y)
                        y = activated(e, y, "silu", dtype) if silu else y
                        e.write(out, dtype, (start + t + i) * channels + c, y, mask)
                        if many > 1:
                            ahead = (start + t + AT_ONCE + before + i) * stride + c
                            e.prefetch(x.at(ahead * size))

            first = e.minimum(count, before)
            whole = first + (count - first) // AT_ONCE * AT_ONCE
            with e.loop(0, first) as t:
                work(t, 1)
            with e.loop(first, whole, AT_ONCE) as t:
                work(t, AT_ONCE)
            with e.loop(whole, count) as t:
                work(t, 1)
            for c, mask in e.spans(begin, end, LANES):
                for j in range(before):
                    to = (tokens + s * before + j) * channels + c
                    e.write(out, dtype, to, row(count - before + j, c, mask), mask)


def emit_linear(e: Emitter, q: str, k: str, v: str, delta: bool) -> None:
    """Linear attention, token after token; each column of a head's state goes its own way:

        S <- exp(decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    Without `delta` u = beta v.

    args: q, q token, q group; k, k token, k group; v, v token, v head; decay, beta (float32
    [T, H]), state (float32 [N, K, H, V]), starts, slots, out (float32), T, G, H, K, V, scale.
    Units: S * H.
    """
    q_ptr, qt, qg, k_ptr, kt, kg, v_ptr, vt, vh = (
        e.arg_ptr(i) if i % 3 == 0 else e.arg(i) for i in range(9)
    )
    decay, beta, state, starts, slots, out = (e.arg_ptr(i) for i in range(9, 15))
    tokens, groups, heads, size, count = (e.arg(i) for i in range(15, 20))
    scale = e.arg_f32(20)
    with e.loop(e.first, e.last) as unit:
        s = unit // heads
        h = unit - s * heads
        g = h * groups // heads
        start, stop = e.load(starts, I64, s), e.load(starts, I64, s + 1)
        step = heads * count  # between rows of a state
        pooled = state.at((e.load(slots, I64, s) * size * heads + h) * count, F32)
        packed = out.at(((tokens + s * size) * heads + h) * count, F32)

        def columns(
            c: Value,
            many: int,
            mask: Value | None,
            s: tuple[Value, ...] = (start, stop, step, h, g, pooled, packed),
        ) -> None:
            start, stop, step, h, g, pooled, packed = s

            def each(base: Value, i: Value) -> list[Value]:
                return [
                    e.read(base, "f32", i * step + c + n * LANES, LANES, mask) for n in range(many)
                ]

            with e.when(start.eq(stop)), e.loop(0, size) as i:
                for n, value in enumerate(each(pooled, i)):
                    e.write(packed, "f32", i * step + c + n * LANES, value, mask)
            with e.loop(start, stop) as t:
                source = e.select(t.eq(start), pooled, packed)
                keep = e.exp(e.load(decay, F32, t * heads + h))
                sums = [e.var(vec(F32, LANES), 0.0) for _ in range(many)]
                if delta:
                    with e.loop(0, size) as i:
                        key = e.read(k_ptr, k, t * kt + g * kg + i).splat(LANES)
                        for sum_, row in zip(sums, each(source, i), strict=True):
                            sum_.set(e.fma(key, row, sum_.get()))
                strength = e.load(beta, F32, t * heads + h)
                changes = []
                for n, sum_ in enumerate(sums):
                    value = e.read(v_ptr, v, t * vt + h * vh + c + n * LANES, LANES, mask)
                    changes.append((value - sum_.get() * keep if delta else value) * strength)
                    sum_.set(0.0)
                with e.loop(0, size) as i:
                    key = e.read(k_ptr, k, t * kt + g * kg + i).splat(LANES)
                    query = e.read(q_ptr, q, t * qt + g * qg + i).splat(LANES)
                    rows = each(source, i)
                    for n, (row, change, sum_) in enumerate(zip(rows, changes, sums, strict=True)):
                        new = e.fma(key, change, row * keep)
                        e.write(packed, "f32", i * step + c + n * LANES, new, mask)
                        sum_.set(e.fma(query, new, sum_.get()))
                for n, sum_ in enumerate(sums):
                    to = (t * heads + h) * count + c + n * LANES
                    e.write(out, "f32", to, sum_.get() * scale, mask)

        wide = count // (WIDE * LANES) * (WIDE * LANES)
        with e.loop(0, wide, WIDE * LANES) as c:
            columns(c, WIDE, None)
        for c, mask in e.spans(wide, count, LANES):
            columns(c, 1, mask)


def emit_state_store(e: Emitter, rows: str, state: str) -> None:
    """state[slots[s]] = rows of sequence s

    args: state, rows, slots, values of a state, values of a unit. Units: S times the units of a
    state.
    """
    state_ptr, rows_ptr, slots, size, block = (
        *(e.arg_ptr(i) for i in range(3)),
        e.arg(3),
        e.arg(4),
    )
    parts = (size + block - 1) // block
    with e.loop(e.first, e.last) as unit:
        s = unit // parts
        begin = (unit - s * parts) * block
        end = e.select(begin + block < size, begin + block, size)
        to = e.load(slots, I64, s) * size
        for c, mask in e.spans(begin, end, LANES):
            value = e.read(rows_ptr, rows, s * size + c, LANES, mask)
            e.write(state_ptr, state, to + c, value, mask)
