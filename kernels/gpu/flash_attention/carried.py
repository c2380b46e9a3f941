"""Attention in which every row sees every key, as vision encoders have it, with the scores of the
next block of keys under way while those of this one become weights: else matrix instructions wait
for the exponentials, and these for them. Of Hopper's instructions, which run beside others.

One program owns a block of rows, as in `kernel.py`; the same sums in the same order, but that the
second part of the head comes first: what is left to wait for is then the longer product.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

from mtmd.kernels.gpu.flash_attention.kernel import KERNEL
from mtmd.kernels.gpu.flash_attention.softmax import (
    LOG2E,
    empty_state,
    fold,
    load_queries,
    scores,
    store_results,
    weighed,
)
from mtmd.kernels.gpu.flash_attention.tiles import Operands, Tile, attention_call
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, TritonKernel, declared, same
from mtmd.kernels.graph import Type

# No program is compiled for each of their values.
UNUSED = "last", "cap", "mask_batch", "mask_head", "mask_row", "mask_step"


@triton.jit(do_not_specialize=["T", "S"])
def carried_kernel(p, s, T, S, H, C: tl.constexpr):
    """ROWS rows of one batch entry and head, at least KEYS keys. Strides count ALIGN elements."""
    KEYS: tl.constexpr = C.KEYS
    blocks = tl.cdiv(T, C.ROWS)
    t = tl.program_id(0) % blocks * C.ROWS + tl.arange(0, C.ROWS)
    head = tl.program_id(0) // blocks % H
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    real = t < T
    t = tl.minimum(t, T - 1)  # surplus rows repeat the last one
    head = head.to(tl.int64)
    q = load_queries(p.q, batch * s.q_batch + t.to(tl.int64) * s.q_step + head * s.q_head, C)
    k_from = batch * s.k_batch + head * s.k_head
    v_from = batch * s.v_batch + head * s.v_head
    m, z, o1, o2 = empty_state(C)
    to_log2 = s.scale * LOG2E

    n = tl.arange(0, KEYS)
    each = n < KEYS
    step = n.to(tl.int64)
    x = scores(q, p.k, k_from + step * s.k_step, each, False, True, C)
    whole = S // KEYS * KEYS
    for start in range(KEYS, whole, KEYS):
        at = tl.multiple_of(start, KEYS) + step
        following = scores(q, p.k, k_from + at * s.k_step, each, False, True, C)
        before = v_from + (at - KEYS) * s.v_step
        m, z, o1, o2 = weighed((m, z, o1, o2), x, p.v, before, each, to_log2, q[0].dtype, False, C)
        x = following
    last = v_from + (whole - KEYS + step) * s.v_step
    m, z, o1, o2 = weighed((m, z, o1, o2), x, p.v, last, each, to_log2, q[0].dtype, False, C)
    if whole < S:
        at = whole + step
        lo = tl.zeros([C.ROWS], tl.int32)
        block = p.k, k_from + at * s.k_step, p.v, v_from + at * s.v_step
        limits = lo, lo + (S - 1)
        m, z, o1, o2 = fold((m, z, o1, o2), q, block, p.q, whole + n, S, limits, s, C, True)

    store_results(p.out, (batch * T + t) * H + head, o1, o2, z, real, C)


def plan(o: Operands, tile: Tile) -> Plan:
    """Plan for tensors without a mask or limits, of equal heads; S is at least the tile's keys."""
    call = attention_call(o, tile=tile, splits=1)
    scalars = {name: value for name, value in call.scalars.items() if name not in UNUSED}
    call = replace(call, scalars=scalars)
    out = Type.contiguous((*o.q.shape[:3], o.v.shape[3]), o.v.dtype)
    tiled = "ROWS", "KEYS"
    return Plan(out, [Launch(carried_kernel, call, same("q k v out"), tiled, head=o.v.shape[3])])


def kernel(tile: Tile) -> TritonKernel:
    return declared(
        Operands,
        lambda o: plan(o, tile),
        lambda _: None,
        what="flash attention, carried",
        cases=KERNEL.cases,
        uses=KERNEL.uses,
        error=KERNEL.error,
        limits=KERNEL.limits,
    )
