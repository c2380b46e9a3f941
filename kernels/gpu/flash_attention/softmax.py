"""The steps of flash attention that its kernels share: rows of queries, one block of keys into the
running sums, columns of a head in two parts.

**Online softmax** (arXiv:2205.14135). One program owns a block of rows and walks over blocks of
keys, keeping per row the largest score m so far, the sum z of exp(score - m) and the weighted sum o
of values. When a block raises m to m', what was summed before is scaled by a = exp(m - m'):

    z <- a z + sum_s exp(x_s - m')

    o <- a o + sum_s exp(x_s - m') v_s
    result = o / z

with x_s = scale q.k_s, capped by c tanh(x / c), plus mask; MASK 2 adds it before the cap.
Exponentials are taken to base 2 (one instruction), sums are fp32. A row that sees nothing keeps
m = -inf, z = 0 and gives zeros.

**Head size.** Matrix instructions want sizes that are powers of two. Instead of padding 72 to 128,
the head is split into 64 + 16 (11 % padding, not 78 %): two products add into the same scores, and
values are summed in two parts. See `parts`. Heads above 256 are two parts as well, the first of
256.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.kv_rows import read_columns

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold(
    state,
    q,
    block,
    mask_rows,
    n,
    end,
    limits,
    s,
    C: tl.constexpr,
    COMPARE: tl.constexpr,
    first=None,
    SHARED: tl.constexpr = False,
):
    """One block of keys, numbered n, into the running m, z, o. block: keys, where their rows lie,
    values, where theirs do. limits: the first and the last key that each row sees; without COMPARE
    all rows see all of these keys. Keys before `first`, if any, and from `end` on are seen by no
    row and are not read: a weight of zero would not keep out what is no number. SHARED: rows of
    several sequences may be among these, and see keys of their own. In a product what is no number
    in the values of a key would reach rows that give it a weight of zero, too: such values are not
    read, and the scores of the key are no numbers, which only those rows see that see the key.
    """
    k, k_rows, v, v_rows = block
    there = n < end
    if first is not None:
        there = there & (n >= first)
    x = scores(q, k, k_rows, there, COMPARE, False, C)
    if C.CAP or C.MASK:
        x *= s.scale
        if C.MASK == 2:
            x += _mask(mask_rows, n, there, s, COMPARE)
        if C.CAP:
            x = s.cap * (2 * tl.sigmoid(2 * x / s.cap) - 1)  # tanh
        if C.MASK == 1:
            x += _mask(mask_rows, n, there, s, COMPARE)
        to_log2 = LOG2E
    else:
        to_log2 = s.scale * LOG2E
    if COMPARE and SHARED:
        zeros = _zeros(v, v_rows, there, q[0].dtype, C)
        x += zeros[None, :]
        there = there & (zeros == 0)
    if COMPARE:
        lo, hi = limits
        x = tl.where((n[None, :] >= lo[:, None]) & (n[None, :] <= hi[:, None]), x, float("-inf"))
    return weighed(state, x, v, v_rows, there, to_log2, q[0].dtype, COMPARE, C)


@triton.jit
def _mask(mask_rows, n, there, s, COMPARE: tl.constexpr):
    """Numbers that are added to the scores of keys n."""
    at = mask_rows[:, None] + n.to(tl.int64)[None, :] * s.mask_step
    if COMPARE:
        return tl.load(at, mask=there[None, :], other=0).to(tl.float32)
    return tl.load(at).to(tl.float32)


@triton.jit
def scores(q, k, k_rows, there, COMPARE: tl.constexpr, SMALL_FIRST: tl.constexpr, C: tl.constexpr):
    """Products of rows with keys. SMALL_FIRST: over the second part of the head first."""
    q1, q2 = q
    x = tl.zeros([q1.shape[0], k_rows.shape[0]], tl.float32)
    SHARED: tl.constexpr = q1.dtype == tl.float32 and C.K1 + C.K2 > 256
    if C.K2 > 0 and SMALL_FIRST:
        k2 = load_stored(k, k_rows, there, C.K1, C.K2, C.K, q1.dtype, C, COMPARE, False)
        x = _add_products(x, q2, k2, SHARED)
    k1 = load_stored(k, k_rows, there, 0, C.K1, C.K, q1.dtype, C, COMPARE, False)
    x = _add_products(x, q1, k1, SHARED)
    if C.K2 > 0 and not SMALL_FIRST:
        k2 = load_stored(k, k_rows, there, C.K1, C.K2, C.K, q1.dtype, C, COMPARE, False)
        x = _add_products(x, q2, k2, SHARED)
    return x


@triton.jit
def _add_products(x, q, k, SHARED: tl.constexpr):
    """Products over a part of the head are added. SHARED: multiply-adds of few scores, of which a
    thread would hold whole rows in registers: threads share out a row by 32 columns, and their sums
    are added.
    """
    PIECES: tl.constexpr = q.shape[1] // 32
    if SHARED and PIECES > 1:
        q = tl.permute(tl.reshape(q, [q.shape[0], PIECES, 32]), (1, 0, 2))
        k = tl.permute(tl.reshape(k, [k.shape[0], PIECES, 32]), (1, 2, 0))
        x += tl.sum(tl.dot(q, k, input_precision="ieee"), 0)
    else:
        x = tl.dot(q, tl.trans(k), x, input_precision="ieee")
    return x


@triton.jit
def weighed(
    state, x, v, v_rows, there, to_log2, TYPE: tl.constexpr, COMPARE: tl.constexpr, C: tl.constexpr
):
    """Values by the scores of their keys, into the running m, z, o. TYPE is what is computed in."""
    m, z, o1, o2 = state
    # `larger` is what the next block sees; `top` is what is subtracted in this one.
    larger = tl.maximum(m, tl.max(x, 1))
    top = larger
    if COMPARE or C.MASK:
        top = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf would be NaN
    # A mask may hold the lowest finite number, which times log2(e) is -inf: subtract first. Else
    # one multiply-add does both.
    p = (
        tl.exp2((x - top[:, None]) * to_log2)
        if C.MASK
        else tl.exp2(x * to_log2 - (top * to_log2)[:, None])
    )
    a = tl.exp2((m - top) * to_log2)
    z = z * a + tl.sum(p, 1)
    # Weights are rounded to the values' type: matrix instructions want both alike. Their sum z is
    # of the exact ones.
    p = p.to(TYPE)
    v1 = load_stored(v, v_rows, there, 0, C.V1, C.V, TYPE, C, COMPARE, True)
    o1 = tl.dot(p, v1, o1 * a[:, None], input_precision="ieee")
    if C.V2 > 0:
        v2 = load_stored(v, v_rows, there, C.V1, C.V2, C.V, TYPE, C, COMPARE, True)
        o2 = tl.dot(p, v2, o2 * a[:, None], input_precision="ieee")
    return larger, z, o1, o2


@triton.jit
def _zeros(v, v_rows, there, TYPE: tl.constexpr, C: tl.constexpr):
    """Zero for each key, but no number for one whose values are not all numbers."""
    v1 = load_stored(v, v_rows, there, 0, C.V1, C.V, TYPE, C, True, True)
    zeros = tl.sum(v1.to(tl.float32) * 0.0, 1)
    if C.V2 > 0:
        v2 = load_stored(v, v_rows, there, C.V1, C.V2, C.V, TYPE, C, True, True)
        zeros += tl.sum(v2.to(tl.float32) * 0.0, 1)
    return zeros


@triton.jit
def empty_state(C: tl.constexpr):
    """The running maximum, sum of weights and weighted sum of values before the first key, all fp32
    whatever the inputs are.
    """
    m = tl.full([C.ROWS], float("-inf"), tl.float32)
    z = tl.zeros([C.ROWS], tl.float32)
    o1 = tl.zeros([C.ROWS, C.V1], tl.float32)
    o2 = z
    if C.V2 > 0:
        o2 = tl.zeros([C.ROWS, C.V2], tl.float32)
    return m, z, o1, o2


@triton.jit
def load_queries(q, rows, C: tl.constexpr):
    """Both parts of the heads at `rows`."""
    there = tl.full([C.ROWS], True, tl.int1)
    q1 = load_columns(q, rows, there, 0, C.K1, C.K, C.ALIGN, False)
    q2 = q1
    if C.K2 > 0:
        q2 = load_columns(q, rows, there, C.K1, C.K2, C.K, C.ALIGN, False)
    return q1, q2


@triton.jit
def rows_of(last, H, CAUSAL: tl.constexpr, C: tl.constexpr):
    """The key head, batch entry and rows of this program; rows behind the last are not there."""
    blocks = last // C.ROWS + 1
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest rows first
    head = tl.program_id(0) // blocks % (H // C.GROUP)
    batch = (tl.program_id(0) // blocks // (H // C.GROUP)).to(tl.int64)
    return head, batch, block * C.ROWS + tl.arange(0, C.ROWS)


@triton.jit
def part_of(begin, end, C: tl.constexpr):
    """Return the keys of a row block that are this program's, in whole blocks: the last parts may
    be shorter, or empty with begin at or behind end.
    """
    each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), C.KEYS), C.SPLITS) * C.KEYS
    begin = tl.minimum(begin + tl.program_id(1) * each, tl.cdiv(end, C.KEYS) * C.KEYS)
    return begin, tl.minimum(end, begin + each)


@triton.jit
def locations_of(p, s, batch, head, t, h):
    """Return where rows of queries, keys, values and of the mask begin."""
    q_rows = batch * s.q_batch + t.to(tl.int64) * s.q_step + h.to(tl.int64) * s.q_head
    k_from = batch * s.k_batch + head.to(tl.int64) * s.k_head
    v_from = batch * s.v_batch + head.to(tl.int64) * s.v_head
    mask_rows = p.mask + batch * s.mask_batch + h.to(tl.int64) * s.mask_head
    return q_rows, k_from, v_from, mask_rows + t.to(tl.int64) * s.mask_row


@triton.jit
def load_columns(
    base,
    rows,
    there,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Columns FIRST..FIRST + COUNT of rows; zeros past column SIZE and, under COMPARE, in rows that
    are not there.

    `rows` are offsets in units of ALIGN elements. The multiplication tells the compiler how wide it
    may load: what it finds out by itself is strides that divide by 16, and with a head stride of 72
    it would load single elements.
    """
    c = FIRST + tl.arange(0, COUNT)
    at = base + ((rows * ALIGN)[:, None] + c[None, :])
    if FIRST + COUNT > SIZE:
        inside = c[None, :] < SIZE
        if COMPARE:
            inside = inside & there[:, None]
        return tl.load(at, mask=inside, other=0)
    if COMPARE:
        return tl.load(at, mask=there[:, None], other=0)
    return tl.load(at)


@triton.jit
def load_stored(
    base,
    rows,
    there,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    TYPE: tl.constexpr,
    C: tl.constexpr,
    COMPARE: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Do what `load_columns` does, in TYPE: of keys or VALUES, which a cache may have quantized."""
    if base.dtype.element_ty == tl.uint8:
        QUANT: tl.constexpr = C.V_QUANT if VALUES else C.QUANT
        return read_columns(base, rows, there, FIRST, COUNT, QUANT, C, COMPARE).to(TYPE)
    return load_columns(base, rows, there, FIRST, COUNT, SIZE, C.ALIGN, COMPARE).to(TYPE)


@triton.jit
def store_columns(
    out, rows, values, real, FIRST: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr
):
    """Columns FIRST..FIRST + COUNT of those rows that are `real`, none past column SIZE; `rows` are
    offsets.
    """
    c = FIRST + tl.arange(0, COUNT)
    tl.store(
        out + rows[:, None] + c[None, :],
        values.to(out.dtype.element_ty),
        mask=real[:, None] & (c < SIZE)[None, :],
    )


@triton.jit
def store_results(out, out_row, o1, o2, z, real, C: tl.constexpr):
    """The rows that are `real`, their weighted sums divided by their sums of weights."""
    z = tl.where(z == 0, 1.0, z)  # a row that sees nothing gives zeros
    store_columns(out, out_row * C.V, o1 / z[:, None], real, 0, C.V1, C.V)
    if C.V2 > 0:
        store_columns(out, out_row * C.V, o2 / z[:, None], real, C.V1, C.V2, C.V)


@triton.jit
def store_part(p, out_row, m, z, o1, o2, real, C: tl.constexpr):
    """Results or, with several SPLITS, the sums of a part of the keys."""
    if C.SPLITS > 1:
        out_row = out_row * C.SPLITS + tl.program_id(1)
        tl.store(p.sums + out_row * 2, m, mask=real)
        tl.store(p.sums + out_row * 2 + 1, z, mask=real)
        z = tl.full([C.ROWS], 1.0, tl.float32)
    store_results(p.out, out_row, o1, o2, z, real, C)
