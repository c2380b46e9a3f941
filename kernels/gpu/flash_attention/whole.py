"""Attention in which every row sees every key, as vision encoders have it: keys are walked over in
blocks without a comparison, but for those behind the last whole block. Keys of few rows are shared
out as in `limited.py`.
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


@triton.jit(do_not_specialize=["T", "S", "last"])
def whole_kernel(p, s, T, S, H, last, C: tl.constexpr):
    """ROWS rows of one batch entry and key head. WHOLE: S is a multiple of KEYS. last: the last
    row, T * GROUP - 1. Strides of q, k and v count ALIGN elements. Results as `limited_kernel` has
    them.
    """
    head, batch, row = rows_of(T * C.GROUP - 1, H, False, C)
    # Surplus rows repeat the last one: its loads are valid.
    row = tl.minimum(row, T * C.GROUP - 1)
    t = row // C.GROUP
    h = head * C.GROUP + row % C.GROUP
    q_rows, k_from, v_from, mask_rows = locations_of(p, s, batch, head, t, h)
    q = load_queries(p.q, q_rows, C)
    m, z, o1, o2 = empty_state(C)
    lo = tl.zeros_like(t)
    limits = lo, lo + (S - 1)
    begin, end = S * 0, S
    if C.SPLITS > 1:
        begin, end = part_of(begin, end, C)
    whole = end if C.WHOLE else tl.maximum(end // C.KEYS * C.KEYS, begin)
    for start in range(begin, whole, C.KEYS):
        start = tl.multiple_of(start, C.KEYS)
        n = start + tl.arange(0, C.KEYS)
        # 64 bits: a long cache of many heads has more elements than 32 bits count.
        k_rows = k_from + n.to(tl.int64) * s.k_step
        block = p.k, k_rows, p.v, v_from + n.to(tl.int64) * s.v_step
        m, z, o1, o2 = fold((m, z, o1, o2), q, block, mask_rows, n, end, limits, s, C, False)
    if not C.WHOLE:
        for start in range(whole, end, C.KEYS):
            start = tl.multiple_of(start, C.KEYS)
            n = start + tl.arange(0, C.KEYS)
            k_rows = k_from + n.to(tl.int64) * s.k_step
            block = p.k, k_rows, p.v, v_from + n.to(tl.int64) * s.v_step
            m, z, o1, o2 = fold((m, z, o1, o2), q, block, mask_rows, n, end, limits, s, C, True)

    # Where results go, found anew from `last`, of which the compiler knows nothing: else a thread
    # keeps its rows in registers during the loops, beside all else, or in memory.
    head, batch, row = rows_of(last, H, False, C)
    real = row <= last
    row = tl.minimum(row, last)
    out_row = (batch * T + row // C.GROUP) * H + head * C.GROUP + row % C.GROUP
    store_part(p, out_row, m, z, o1, o2, real, C)
