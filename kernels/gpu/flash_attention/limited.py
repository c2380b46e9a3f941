"""Attention in which rows see some of the keys, as text decoders have it, and of few rows over many
keys.

**Which keys a row sees** is always an interval [lo, hi]: `causal`, `window` and `bounds` each cut
it from one side or both. Keys outside the intervals of all rows of a block are never loaded, key
blocks inside all of them run without comparisons, and only the blocks in between are compared key
by key.

**A sequence's NaN stays its own.** Keys that no row of a block sees are not read. With `bounds`,
a block of rows may have rows of several sequences (SHARED), each of which sees its own keys: see
`fold`.

**Few tokens over many keys** (flash-decoding, https://pytorch.org/blog/flash-decoding). B * G
programs would leave most of a GPU idle, so SPLITS programs share out the key blocks that a block of
rows sees. Each writes its own m, z and o, and `combine_kernel` adds them:

    M = max_i m_i          result = sum_i exp(m_i - M) o_i / sum_i exp(m_i - M) z_i
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.flash_attention.softmax import (
    empty_state,
    fold,
    load_queries,
    locations_of,
    part_of,
    rows_of,
    store_part,
)
from mtmd.kernels.gpu.jit import tl, triton


@triton.jit
def _intervals(t, bounds, T, S, window, s, C: tl.constexpr):
    """First and last key that each row may see; first > last where it sees none."""
    lo = tl.zeros_like(t)
    hi = lo + (S - 1)
    if C.CAUSAL:
        hi = tl.minimum(hi, t + (S - T))
    if C.WINDOW:
        lo = tl.maximum(lo, t + (S - T) - window + 1)
    if C.BOUNDS:
        at = bounds + t.to(tl.int64) * s.bound_step
        # Bounds may be 64-bit: cut to size first, then narrow.
        lo = tl.maximum(lo, tl.minimum(tl.maximum(tl.load(at), 0), S).to(tl.int32))
        hi = tl.minimum(hi, tl.minimum(tl.maximum(tl.load(at + s.bound_end), -1), S).to(tl.int32))
    return lo, hi


@triton.jit(do_not_specialize=["T", "S", "window", "last"])
def limited_kernel(p, s, window, T, S, H, last, C: tl.constexpr):
    """ROWS rows of one batch entry and key head. last: the last row, T * GROUP - 1. Strides of q, k
    and v count ALIGN elements. With several SPLITS, `out` is fp32 [B, T, H, SPLITS, V] and `sums`
    fp32 [B, T, H, SPLITS, 2]: o, m and z of a part of the keys.
    """
    KEYS: tl.constexpr = C.KEYS
    head, batch, row = rows_of(T * C.GROUP - 1, H, C.CAUSAL, C)
    # Surplus rows repeat the last one: its loads and its interval are valid.
    row = tl.minimum(row, T * C.GROUP - 1)
    t = row // C.GROUP
    h = head * C.GROUP + row % C.GROUP
    lo, hi = _intervals(t, p.bounds + batch * s.bound_batch, T, S, window, s, C)
    q_rows, k_from, v_from, mask_rows = locations_of(p, s, batch, head, t, h)
    q = load_queries(p.q, q_rows, C)
    m, z, o1, o2 = empty_state(C)

    # Keys begin..end hold everything that some row sees; inner_begin..inner_end are blocks that all
    # rows see entirely.
    first_seen = tl.min(tl.where(lo <= hi, lo, S), 0)
    begin = first_seen // KEYS * KEYS
    end = tl.max(tl.where(lo <= hi, hi, -1), 0) + 1
    if C.SPLITS > 1:
        begin, end = part_of(begin, end, C)
    inner_begin = tl.minimum(tl.cdiv(tl.max(lo, 0), KEYS), tl.cdiv(end, KEYS)) * KEYS
    inner_begin = tl.maximum(inner_begin, begin)
    inner_end = tl.maximum(tl.minimum(tl.min(hi, 0) + 1, end) // KEYS * KEYS, inner_begin)
    # The blocks that need no comparison first, in a loop of their own that the compiler can
    # pipeline; then those before and after them, in one loop, so that `fold` is compiled twice and
    # not three times.
    limits = lo, hi
    for start in range(inner_begin, inner_end, KEYS):
        start = tl.multiple_of(start, KEYS)
        n = start + tl.arange(0, KEYS)
        # 64 bits: a long cache of many heads has more elements than 32 bits count.
        k_rows = k_from + n.to(tl.int64) * s.k_step
        block = p.k, k_rows, p.v, v_from + n.to(tl.int64) * s.v_step
        m, z, o1, o2 = fold((m, z, o1, o2), q, block, mask_rows, n, end, limits, s, C, False)
    before = (inner_begin - begin) // KEYS
    after = tl.cdiv(tl.maximum(end - inner_end, 0), KEYS)
    for i in range(before + after):
        start = tl.where(i < before, begin, inner_end - before * KEYS) + i * KEYS
        start = tl.multiple_of(start, KEYS)
        n = start + tl.arange(0, KEYS)
        k_rows = k_from + n.to(tl.int64) * s.k_step
        block = p.k, k_rows, p.v, v_from + n.to(tl.int64) * s.v_step
        state = m, z, o1, o2
        m, z, o1, o2 = fold(
            state, q, block, mask_rows, n, end, limits, s, C, True, first_seen, C.SHARED
        )

    # Where results go, found anew from `last`, as `whole_kernel` does.
    head, batch, row = rows_of(last, H, C.CAUSAL, C)
    real = row <= last
    row = tl.minimum(row, last)
    out_row = (batch * T + row // C.GROUP) * H + head * C.GROUP + row % C.GROUP
    store_part(p, out_row, m, z, o1, o2, real, C)


@triton.jit
def combine_kernel(
    parts, sums, out, to_log2, V: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of one row from its SPLITS parts, which `limited_kernel` leaves. to_log2:
    what makes m a power of two.
    """
    first = tl.program_id(0).to(tl.int64) * SPLITS
    part = tl.arange(0, SPLITS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.load(sums + (first + part) * 2)
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    a = tl.exp2((m - top) * to_log2)
    z = tl.sum(a * tl.load(sums + (first + part) * 2 + 1), 0)
    o = tl.load(parts + (first + part)[:, None] * V + c[None, :], mask=(c < V)[None, :], other=0)
    o = tl.sum(o * a[:, None], 0) / tl.where(z == 0, 1.0, z)
    tl.store(out + tl.program_id(0).to(tl.int64) * V + c, o.to(out.dtype.element_ty), mask=c < V)
