"""Kernels on rows: elementwise ops, norms, rotary embeddings, rows picked and rows stored.

A unit is a row (of a norm: what is normalised; of `emit_each`: `BLOCK` values of a row). Rows are
numbered through two dimensions, of which the inner has `inner` rows; each operand has a stride for
either, in elements. All values are computed in float32; where the ops round to their type in the
middle (silu_mul, scale), so do these.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtmd.kernels.cpu.native.emit import F32, I64, Emitter, Value, vec

LANES = 16
BLOCK = 512  # values of an elementwise unit: 2 KiB, some hundred cycles

UNARY = ("copy", "scale", "clamp", "gelu", "silu", "relu", "sigmoid", "softplus", "softcap")
BINARY = ("add", "mul", "silu_mul", "gelu_mul")


def leading(shape: Sequence[int], *strides: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Dimensions as few as all operands allow: those of size 1 are left out, neighbours that lie
    one after the other in each are one. Shape and each operand's strides.
    """
    sizes: list[int] = []
    result: list[list[int]] = [[] for _ in strides]
    for i, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(f[-1] == s[i] * size for f, s in zip(result, strides, strict=True)):
            sizes[-1] *= size
            for f, s in zip(result, strides, strict=True):
                f[-1] = s[i]
            continue
        sizes.append(size)
        for f, s in zip(result, strides, strict=True):
            f.append(s[i])
    return sizes, result


def two_level(
    shape: Sequence[int], *strides: Sequence[int]
) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Rows as outer times inner ones and each operand's strides; None where that is not enough."""
    sizes, result = leading(shape, *strides)
    if len(sizes) > 2:
        return None
    sizes = [1] * (2 - len(sizes)) + sizes
    pairs = [(0, 0) if not f else (0, f[0]) if len(f) == 1 else (f[0], f[1]) for f in result]
    return sizes[0], sizes[1], pairs


def _two(unit: Value, inner: Value) -> tuple[Value, Value]:
    outer = unit // inner
    return outer, unit - outer * inner


def emit_each(
    e: Emitter, kind: str, a: str, b: str, out: str, step: int = 1, approximate: str = ""
) -> None:
    """out = kind(a, b), elementwise

    args: a, a outer, a inner, b, b outer, b inner, out, out outer, out inner, inner, columns, two
    float32 (scale: factor and offset; softcap: the cap) or pointers (clamp: low and high). `step`
    0: a row of b is one value. Units: rows times blocks of columns.
    """
    x, xo, xi, y, yo, yi, z, zo, zi = (e.arg_ptr(i) if i % 3 == 0 else e.arg(i) for i in range(9))
    inner, columns = e.arg(9), e.arg(10)
    blocks = (columns + (BLOCK - 1)) // BLOCK
    binary = kind in (*BINARY, "relu_mul")  # the latter for experts

    def first(v: Value) -> Value:
        return {
            "silu_mul": lambda: e.rounded(e.silu(v), out),
            "gelu_mul": lambda: e.rounded(e.gelu(v, approximate), out),
            "gelu": lambda: e.gelu(v, approximate),
            "silu": lambda: e.silu(v),
            "sigmoid": lambda: e.sigmoid(v),
            "softplus": lambda: e.select(v > 20.0, v, e.softplus(v)),
            "relu": lambda: e.select(v < 0.0, e.f32(0.0, v.lanes), v),
            "relu_mul": lambda: e.select(v < 0.0, e.f32(0.0, v.lanes), v),
            "scale": lambda: e.rounded(v * e.arg_f32(11), out) + e.arg_f32(12),
            "softcap": lambda: (
                e.rounded(e.tanh(e.rounded(v / e.arg_f32(11), out)), out) * e.arg_f32(11)
            ),
            "clamp": lambda: _clamped(e, v, a),
        }.get(kind, lambda: v)()

    with e.loop(e.first, e.last) as unit:
        row = unit // blocks
        start = (unit - row * blocks) * BLOCK
        o, i = _two(row, inner)
        at, bt, ct = o * xo + i * xi, o * yo + i * yi, o * zo + i * zi
        stop = start + BLOCK
        stop = e.select(stop < columns, stop, columns)
        one = e.read(y, b, bt) if binary and step == 0 else None
        for c, mask in e.spans(start, stop, LANES):
            value = first(e.read(x, a, at + c, LANES, mask))
            if binary:
                other = one.splat(LANES) if one else e.read(y, b, bt + c, LANES, mask)
                value = value + other if kind == "add" else value * other
            e.write(z, out, ct + c, value, mask)


def _clamped(e: Emitter, v: Value, dtype: str) -> Value:
    low, high = (e.read(e.arg_ptr(i), dtype, 0).splat(v.lanes) for i in (11, 12))
    v = e.select(v < low, low, v)
    return e.select(v > high, high, v)


def emit_norm(e: Emitter, kind: str, x: str, out: str, weight: bool) -> None:
    """rms: x rsqrt(mean(x^2) + eps) w; l2: x rsqrt(sum(x^2) + eps)

    args: x, x outer, x inner, out, out outer, out inner, inner, D, eps, w (float32)
    """
    x_ptr, xo, xi = e.arg_ptr(0), e.arg(1), e.arg(2)
    out_ptr, oo, oi = e.arg_ptr(3), e.arg(4), e.arg(5)
    inner, count, eps = e.arg(6), e.arg(7), e.arg_f32(8)
    w = e.arg_ptr(9)
    with e.loop(e.first, e.last) as unit:
        o, i = _two(unit, inner)
        at, to = o * xo + i * xi, o * oo + i * oi
        factor = _norm_factor(e, kind, x_ptr, x, at, count, eps)
        for c, mask in e.spans(0, count, LANES):
            value = e.read(x_ptr, x, at + c, LANES, mask) * factor
            if weight:
                value = value * e.read(w, "f32", c, LANES, mask)
            e.write(out_ptr, out, to + c, value, mask)


def _norm_factor(
    e: Emitter, kind: str, x: Value, dtype: str, at: Value, count: Value, eps: Value
) -> Value:
    squares = _squares(e, x, dtype, at, count)
    if kind == "rms":
        squares = squares / Value(e, e.b.sitofp(count.ir, F32))
    return (1.0 / e.sqrt(squares + eps)).splat(LANES)


def _squares(e: Emitter, x: Value, dtype: str, at: Value, count: Value) -> Value:
    """Return the sum of the squares of a row."""
    total = [e.var(vec(F32, LANES), 0.0) for _ in range(2)]
    whole = count // (2 * LANES) * (2 * LANES)
    with e.loop(0, whole, 2 * LANES) as c:
        for half, sum_ in enumerate(total):
            value = e.read(x, dtype, at + c + half * LANES, LANES)
            sum_.set(e.fma(value, value, sum_.get()))
    for c, mask in e.spans(whole, count, LANES):
        value = e.read(x, dtype, at + c, LANES, mask)
        total[0].set(e.fma(value, value, total[0].get()))
    return e.sum(total[0].get() + total[1].get())


def _mean(e: Emitter, x: Value, dtype: str, at: Value, count: Value, width: Value) -> Value:
    """Return the mean of a row."""
    total = e.var(vec(F32, LANES), 0.0)
    for c, mask in e.spans(0, count, LANES):
        total.set(total.get() + e.read(x, dtype, at + c, LANES, mask))
    return e.sum(total.get()) / width


def _squares_from(e: Emitter, x: Value, dtype: str, at: Value, count: Value, mean: Value) -> Value:
    """Return the sum of the squares of what a row differs from its mean by."""
    squares, nothing = e.var(vec(F32, LANES), 0.0), e.f32(0.0, LANES)
    for c, mask in e.spans(0, count, LANES):
        value = e.read(x, dtype, at + c, LANES, mask) - mean
        value = value if mask is None else e.select(mask, value, nothing)
        squares.set(e.fma(value, value, squares.get()))
    return e.sum(squares.get())


def emit_match_magnitude(e: Emitter, y: str, out: str) -> None:
    """The `match_magnitude` op

    args: y, y outer, y inner, x, x outer, x inner, out, out outer, out inner, inner, D, floor
    """
    y_ptr, yo, yi, x_ptr, xo, xi, out_ptr, oo, oi = (
        e.arg_ptr(i) if i % 3 == 0 else e.arg(i) for i in range(9)
    )
    inner, count, floor = e.arg(9), e.arg(10), e.arg_f32(11)
    width = Value(e, e.b.sitofp(count.ir, F32))
    with e.loop(e.first, e.last) as unit:
        o, i = _two(unit, inner)
        at, to = o * yo + i * yi, o * oo + i * oi
        expected = _squares(e, x_ptr, y, o * xo + i * xi, count) / width
        actual = _squares(e, y_ptr, y, at, count) / width
        actual = e.select(actual < floor, floor, actual)
        factor = e.sqrt(expected / actual).splat(LANES)
        for c, mask in e.spans(0, count, LANES):
            e.write(out_ptr, out, to + c, e.read(y_ptr, y, at + c, LANES, mask) * factor, mask)


def emit_gaussian_topk(e: Emitter, x: str, out: str) -> None:
    """The `gaussian_topk` op

    args: x, x outer, x inner, out, out outer, out inner, inner, D, deviations
    """
    x_ptr, xo, xi = e.arg_ptr(0), e.arg(1), e.arg(2)
    out_ptr, oo, oi = e.arg_ptr(3), e.arg(4), e.arg(5)
    inner, count, deviations = e.arg(6), e.arg(7), e.arg_f32(8)
    width, zeros = Value(e, e.b.sitofp(count.ir, F32)), e.f32(0.0, LANES)
    with e.loop(e.first, e.last) as unit:
        o, i = _two(unit, inner)
        at, to = o * xo + i * xi, o * oo + i * oi
        mean = _mean(e, x_ptr, x, at, count, width)
        variance = _squares_from(e, x_ptr, x, at, count, mean.splat(LANES)) / width
        cutoff = (mean + e.sqrt(variance) * deviations).splat(LANES)
        for c, mask in e.spans(0, count, LANES):
            value = e.read(x_ptr, x, at + c, LANES, mask) - cutoff
            e.write(out_ptr, out, to + c, e.select(value < 0.0, zeros, value), mask)


def emit_add_mixed(e: Emitter, x: str, streams: int) -> None:
    """The `add_mixed` op, of so many streams

    args: base, its strides of tokens and of streams, x, its strides, weights, their strides, out,
    M, D. Units: tokens times M.
    """
    base, bt, bm, x_ptr, xt, xn, weights, wt, wm = (
        e.arg_ptr(i) if i % 3 == 0 else e.arg(i) for i in range(9)
    )
    out, rows, count = e.arg_ptr(9), e.arg(10), e.arg(11)
    with e.loop(e.first, e.last) as unit:
        t, m = _two(unit, rows)
        shares = [e.read(weights, x, t * wt + m * wm + n).splat(LANES) for n in range(streams)]
        for c, mask in e.spans(0, count, LANES):
            total = e.read(base, x, t * bt + m * bm + c, LANES, mask)
            for n, share in enumerate(shares):
                total = e.fma(e.read(x_ptr, x, t * xt + xn * n + c, LANES, mask), share, total)
            e.write(out, x, unit * count + c, total, mask)


def emit_layer_norm(e: Emitter, x: str, out: str, bias: bool) -> None:
    """(x - mean) rsqrt(mean((x - mean)^2) + eps) w + b

    args: x, x outer, x inner, out, out outer, out inner, inner, D, eps, w, b (both of x's type)
    """
    x_ptr, xo, xi = e.arg_ptr(0), e.arg(1), e.arg(2)
    out_ptr, oo, oi = e.arg_ptr(3), e.arg(4), e.arg(5)
    inner, count, eps = e.arg(6), e.arg(7), e.arg_f32(8)
    w, b = e.arg_ptr(9), e.arg_ptr(10)
    width = Value(e, e.b.sitofp(count.ir, F32))
    with e.loop(e.first, e.last) as unit:
        o, i = _two(unit, inner)
        at, to = o * xo + i * xi, o * oo + i * oi
        mean = _mean(e, x_ptr, x, at, count, width).splat(LANES)
        squares = _squares_from(e, x_ptr, x, at, count, mean)
        factor = (1.0 / e.sqrt(squares / width + eps)).splat(LANES)
        for c, mask in e.spans(0, count, LANES):
            value = (e.read(x_ptr, x, at + c, LANES, mask) - mean) * factor
            value = value * e.read(w, x, c, LANES, mask)
            if bias:
                value = value + e.read(b, x, c, LANES, mask)
            e.write(out_ptr, out, to + c, value, mask)


def emit_rope(e: Emitter, x: str, out: str, pairs: str) -> None:
    """The `rope` op in one part

    args: x, x outer, x inner, out, out outer, out inner, inner, K, R, table (float32 [T, 2, R]).
    The outer number of a row is its token.
    """
    x_ptr, xo, xi = e.arg_ptr(0), e.arg(1), e.arg(2)
    out_ptr, oo, oi = e.arg_ptr(3), e.arg(4), e.arg(5)
    inner, size, count, table = e.arg(6), e.arg(7), e.arg(8), e.arg_ptr(9)
    with e.loop(e.first, e.last) as unit:
        o, i = _two(unit, inner)
        at, to, angle = o * xo + i * xi, o * oo + i * oi, o * count * 2
        for c, mask in e.spans(0, count, LANES):
            cos = e.read(table, "f32", angle + c, LANES, mask)
            sin = e.read(table, "f32", angle + count + c, LANES, mask)
            if pairs == "half":
                a, b = (e.read(x_ptr, x, at + s + c, LANES, mask) for s in (e.i64(0), count))
                e.write(out_ptr, out, to + c, a * cos - b * sin, mask)
                e.write(out_ptr, out, to + count + c, b * cos + a * sin, mask)
                continue
            even, odd = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
            both = None if mask is None else e.mask((count - c) * 2, 2 * LANES)
            pair = e.read(x_ptr, x, at + c * 2, 2 * LANES, both)
            a, b = pair.shuffle(even), pair.shuffle(odd)
            one, two = a * cos - b * sin, b * cos + a * sin
            order = [i // 2 + (i % 2) * LANES for i in range(2 * LANES)]
            e.write(out_ptr, out, to + c * 2, one.shuffle(order, two), both)
        for c, mask in e.spans(count * 2, size, LANES):  # what is not turned
            e.write(out_ptr, out, to + c, e.read(x_ptr, x, at + c, LANES, mask), mask)


def emit_rope_table(e: Emitter) -> None:
    """The `rope_table` op

    args: positions (int64 [A, T]), T, out (float32 [T, 2, R]), R, frequencies (float32 [R]), axes
    (int64 [R], offsets of the axis' first position), scale. Units: tokens.
    """
    positions, out, count = e.arg_ptr(0), e.arg_ptr(2), e.arg(3)
    frequencies, axes, scale = e.arg_ptr(4), e.arg_ptr(5), e.arg_f32(6)
    lanes = 8
    at = e.local(F32, lanes)
    with e.loop(e.first, e.last) as t:
        for c, mask in e.spans(0, count, lanes):
            with e.loop(0, lanes) as lane:  # positions differ by axis
                column = c + lane
                column = e.select(column < count, column, count - 1)
                location = e.load(positions, I64, e.load(axes, I64, column) + t)
                e.store(at, Value(e, e.b.sitofp(location.ir, F32)), lane)
            angles = e.load(at, vec(F32, lanes)) * e.read(frequencies, "f32", c, lanes, mask)
            sin, cos = e.sin_cos(angles)
            e.write(out, "f32", t * count * 2 + c, cos * scale, mask)
            e.write(out, "f32", t * count * 2 + count + c, sin * scale, mask)


def emit_take(e: Emitter, x: str, out: str, scaled: bool) -> None:
    """out[b, t] = x[b, at[t]] (* scale)

    args: x, x stride, at (int64), out, out stride, D, scale, rows taken of each b, x stride of b.
    Units: rows taken.
    """
    x_ptr, stride, at = e.arg_ptr(0), e.arg(1), e.arg_ptr(2)
    out_ptr, out_stride, count, scale = e.arg_ptr(3), e.arg(4), e.arg(5), e.arg_f32(6)
    each, batch = e.arg(7), e.arg(8)
    with e.loop(e.first, e.last) as unit:
        outer, t = _two(unit, each)
        source = e.load(at, I64, t) * stride + outer * batch
        for c, mask in e.spans(0, count, LANES):
            value = e.read(x_ptr, x, source + c, LANES, mask)
            value = value * scale if scaled else value
            e.write(out_ptr, out, unit * out_stride + c, value, mask)


def emit_take_each(e: Emitter, x: str, out: str) -> None:
    """out[b, t] = x[b, at[t]] of single values

    args: x, x stride, at (int64), out, values taken of each b, x stride of b. Units: b times blocks
    of values.
    """
    x_ptr, stride, at = e.arg_ptr(0), e.arg(1), e.arg_ptr(2)
    out_ptr, count, batch = e.arg_ptr(3), e.arg(4), e.arg(5)
    blocks = (count + (BLOCK - 1)) // BLOCK
    with e.loop(e.first, e.last) as unit:
        outer, block = _two(unit, blocks)
        stop = block * BLOCK + BLOCK
        with e.loop(block * BLOCK, e.select(stop < count, stop, count)) as t:
            value = e.read(x_ptr, x, outer * batch + e.load(at, I64, t) * stride)
            e.write(out_ptr, out, outer * count + t, value)


def emit_put(e: Emitter, rows: str, x: str, add: bool) -> None:
    """x[at[m]] = rows[m], or += where `add`

    args: x, x stride, at (int64), rows, rows stride, D. Units: rows put.
    """
    x_ptr, stride, at = e.arg_ptr(0), e.arg(1), e.arg_ptr(2)
    rows_ptr, rows_stride, count = e.arg_ptr(3), e.arg(4), e.arg(5)
    with e.loop(e.first, e.last) as m:
        to = e.load(at, I64, m) * stride
        for c, mask in e.spans(0, count, LANES):
            value = e.rounded(e.read(rows_ptr, rows, m * rows_stride + c, LANES, mask), x)
            if add:
                value = e.read(x_ptr, x, to + c, LANES, mask) + value
            e.write(x_ptr, x, to + c, value, mask)


def emit_store(e: Emitter, x: str, cache: str, halves: int) -> None:
    """The `kv_store` op: keys and values of tokens to their slots of the cache; keys alone if
    `halves` is 1

    args: k, k outer, k inner, v, v outer, v inner, slots (int64), cache, elements of a half, G, K.
    Units: tokens times G.
    """
    sources = [(e.arg_ptr(i), e.arg(i + 1), e.arg(i + 2)) for i in (0, 3)]
    slots, out, half, groups, size = e.arg_ptr(6), e.arg_ptr(7), e.arg(8), e.arg(9), e.arg(10)
    with e.loop(e.first, e.last) as unit:
        t, g = _two(unit, groups)
        to = (e.load(slots, I64, t) * groups + g) * size
        for which, (source, outer, inner) in enumerate(sources[:halves]):
            at, begin = t * outer + g * inner, to + half * which
            for c, mask in e.spans(0, size, LANES):
                e.write(out, cache, begin + c, e.read(source, x, at + c, LANES, mask), mask)
