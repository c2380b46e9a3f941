"""Short convolutions and gated delta rules of few tokens, and states put back.

Sequences begin at `starts` among the tokens and keep their states in `slots` of a pool; results are
packed as the ops of these names have them (kernels/ops/recurrent.py): outputs, then new states.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I64, SIZES, Emitter, Value, vec

LANES = 16
WIDE = 4  # vectors of values that are worked on at once: independent sums


def emit_conv(e: Emitter, dtype: str, w: str, taps: int, bias: str | None, silu: bool) -> None:
    """y[t, c] = act(sum_j w[c, j] x[t - W + 1 + j, c] + bias[c]), W = `taps`

    args: x, x stride, w, state, starts, slots, bias, out, T, S, C. Units: blocks of 16 channels.
    """
    x, stride, w_ptr, state = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), e.arg_ptr(3)
    starts, slots, bias_ptr, out = (e.arg_ptr(i) for i in (4, 5, 6, 7))
    tokens, sequences, channels = e.arg(8), e.arg(9), e.arg(10)
    before = taps - 1

    def work(c: Value, mask: Value | None) -> None:
        factors = []
        for j in range(taps):  # a tap of each channel, W apart
            result = e.f32(0.0, LANES)
            for lane in range(LANES):
                at = c + lane
                at = e.select(at < channels, at, channels - 1)
                result = result.insert(lane, e.read(w_ptr, w, at * taps + j))
            factors.append(result)
        offset = e.read(bias_ptr, bias, c, LANES, mask) if bias else e.f32(0.0, LANES)
        with e.loop(0, sequences) as s:
            start, stop = e.load(starts, I64, s), e.load(starts, I64, s + 1)
            old = e.load(slots, I64, s) * before

            def row(t: Value) -> Value:
                """Return the row of the sequence's token t, below 0 of its state."""
                size = SIZES[dtype]
                saved = state.at(((old + before + t) * channels + c) * size)
                new = x.at(((start + t) * stride + c) * size)
                return e.read(e.select(t < 0, saved, new), dtype, 0, LANES, mask)

            count = stop - start
            with e.loop(0, count) as t:
                y = offset
                for j, factor in enumerate(factors):
                    y = e.fma(row(t - before + j), factor, y)
                y = e.silu(y) if silu else y
                e.write(out, dtype, (start + t) * channels + c, y, mask)
            for j in range(before):
                to = (tokens + s * before + j) * channels + c
                e.write(out, dtype, to, row(count - before + j), mask)

    with e.loop(e.first, e.last) as unit:
        c = unit * LANES
        with e.either(c + LANES <= channels) as (whole, rest):
            with whole:
                work(c, None)
            with rest:
                work(c, e.mask(channels - c, LANES))


def emit_delta(e: Emitter, q: str, k: str, v: str) -> None:
    """The gated delta rule, token after token; each column of a head's state goes its own way:

        S <- exp(decay) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = scale S^T q

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
                with e.loop(0, size) as i:
                    key = e.read(k_ptr, k, t * kt + g * kg + i).splat(LANES)
                    for sum_, row in zip(sums, each(source, i), strict=True):
                        sum_.set(e.fma(key, row, sum_.get()))
                strength = e.load(beta, F32, t * heads + h)
                changes = []
                for n, sum_ in enumerate(sums):
                    value = e.read(v_ptr, v, t * vt + h * vh + c + n * LANES, LANES, mask)
                    changes.append((value - sum_.get() * keep) * strength)
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
