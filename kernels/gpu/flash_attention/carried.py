"""Attention in which every row sees every key, as vision encoders have it, with the scores of the
next block of keys under way while those of this one become weights: else matrix instructions wait
for the exponentials, and these for them. Of Hopper's instructions, which run beside others.

One program owns a block of rows, as in `kernel.py`; the same sums in the same order, but that the
second part of the head comes first: what is left to wait for is then the longer product.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.gpu.flash_attention.kernel import (
    fold,
    load_columns,
    scores,
    store_columns,
    weighed,
)
from mtmd.kernels.gpu.flash_attention.tiles import Launch, Tile, plan_launch
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.gpu.triton_kernel import Program, fresh
from mtmd.kernels.graph import Type

LOG2E = tl.constexpr(1.4426950408889634)
SCALARS = (
    "scale", "T", "S", "H", "q_batch", "q_step", "q_head", "k_batch", "k_step", "k_head",
    "v_batch", "v_step", "v_head",
)  # fmt: skip
CONSTANTS = ("K", "V", "K1", "K2", "V1", "V2", "ROWS", "KEYS", "ALIGN")


@triton.jit(do_not_specialize=["T", "S"])
def carried_kernel(
    q,
    k,
    v,
    out,
    scale,
    T,
    S,
    H,
    q_batch,
    q_step,
    q_head,
    k_batch,
    k_step,
    k_head,
    v_batch,
    v_step,
    v_head,
    K: tl.constexpr,
    V: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """ROWS rows of one batch entry and head, at least KEYS keys. Strides count ALIGN elements."""
    blocks = tl.cdiv(T, ROWS)
    t = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(0) // blocks % H
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    real = t < T
    t = tl.minimum(t, T - 1)  # surplus rows repeat the last one
    head = head.to(tl.int64)
    all_there = tl.full([ROWS], True, tl.int1)
    q_rows = batch * q_batch + t.to(tl.int64) * q_step + head * q_head
    q1 = load_columns(q, q_rows, all_there, 0, K1, K, ALIGN, False)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q, q_rows, all_there, K1, K2, K, ALIGN, False)
    k_from = batch * k_batch + head * k_head
    v_from = batch * v_batch + head * v_head
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    o1 = tl.zeros([ROWS, V1], tl.float32)
    o2 = z
    if V2 > 0:
        o2 = tl.zeros([ROWS, V2], tl.float32)
    to_log2 = scale * LOG2E

    s = tl.arange(0, KEYS)
    each = s < KEYS
    step = s.to(tl.int64)
    x = scores(q1, q2, k, k_from + step * k_step, each, K, K1, K2, ALIGN, False, True)
    whole = S // KEYS * KEYS
    for start in range(KEYS, whole, KEYS):
        at = tl.multiple_of(start, KEYS) + step
        following = scores(q1, q2, k, k_from + at * k_step, each, K, K1, K2, ALIGN, False, True)
        before = v_from + (at - KEYS) * v_step
        m, z, o1, o2 = weighed(
            m, z, o1, o2, x, v, before, each, to_log2, V, V1, V2, ALIGN, False, False, q1.dtype
        )
        x = following
    last = v_from + (whole - KEYS + step) * v_step
    m, z, o1, o2 = weighed(
        m, z, o1, o2, x, v, last, each, to_log2, V, V1, V2, ALIGN, False, False, q1.dtype
    )
    if whole < S:
        at = whole + step
        lo = tl.zeros([ROWS], tl.int32)
        m, z, o1, o2 = fold(
            m,
            z,
            o1,
            o2,
            q1,
            q2,
            k,
            v,
            k_from + at * k_step,
            v_from + at * v_step,
            q,
            whole + s,
            S,
            lo,
            lo + (S - 1),
            0,
            scale,
            1.0,
            K,
            V,
            K1,
            K2,
            V1,
            V2,
            ALIGN,
            False,
            False,
            True,
        )

    out_row = (batch * T + t) * H + head
    store_columns(out, out_row * V, o1 / z[:, None], real, 0, V1, V)
    if V2 > 0:
        store_columns(out, out_row * V, o2 / z[:, None], real, V1, V2, V)


def plan_call(q: Type, k: Type, v: Type, tile: Tile, scale: float) -> Call:
    """For tensors without a mask or limits, of equal heads."""
    launch: Launch = plan_launch(q, k, v, scale=scale, tile=tile, splits=1)
    scalars = {name: launch.scalars[name] for name in SCALARS}
    constants: dict[str, int | bool | str] = {name: launch.constants[name] for name in CONSTANTS}
    return Call(scalars, constants, launch.programs, tile.warps, tile.stages)


def carried_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, tile: Tile) -> Tensor:
    """q [B, T, H, K], k [B, S, H, K], v [B, S, H, V] -> [B, T, H, V]; S at least the tile's keys"""
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=v.dtype, device=q.device)
    if out.numel():
        call = plan_call(Type.of(q), Type.of(k), Type.of(v), tile, scale)
        run_call(carried_kernel, call, (q, k, v, out))
    return out


def program(q: Type, k: Type, v: Type, *, scale: float, tile: Tile) -> Program:
    """What a run on these types launches."""
    call = plan_call(q, k, v, tile, scale)
    operands = {"q": q, "k": k, "v": v, "out": fresh(v)}
    return Program(carried_kernel, call, operands, ("ROWS", "KEYS"), head=v.shape[3])
