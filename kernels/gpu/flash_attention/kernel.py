"""Flash attention, forward, for NVIDIA and AMD GPUs: the `attention` op without ever holding its
scores.

**Online softmax** (arXiv:2205.14135). One program owns a block of rows and walks over blocks of
keys, keeping per row the largest score m so far, the sum z of exp(score - m) and the weighted sum o
of values. When a block raises m to m', what was summed before is scaled by a = exp(m - m'):

    z <- a z + sum_s exp(x_s - m')

    o <- a o + sum_s exp(x_s - m') v_s
    result = o / z

with x_s = scale q.k_s, capped by c tanh(x / c), plus mask. Exponentials are taken to base 2 (one
instruction), sums are fp32. A row that sees nothing keeps m = -inf, z = 0 and gives zeros.

**Which keys a row sees** is always an interval [lo, hi]: `causal`, `window` and `bounds` each cut
it from one side or both. Keys outside the intervals of all rows of a block are never loaded, key
blocks inside all of them run without comparisons, and only the blocks in between are compared key
by key.

**Head size.** Matrix instructions want sizes that are powers of two. Instead of padding 72 to 128,
the head is split into 64 + 16 (11 % padding, not 78 %): two products add into the same scores, and
values are summed in two parts. See `parts`. Heads above 256 are two parts as well, the first of
256.

**Grouped heads.** The H / G query heads that share a key head are rows of the same block (row =
token * H / G + head in the group): keys and values are loaded once for all of them, and decoding
one token fills a matrix instruction with its query heads.

**Few tokens over many keys** (flash-decoding, https://pytorch.org/blog/flash-decoding). B * G
programs would leave most of a GPU idle, so SPLITS programs share out the key blocks that a block of
rows sees. Each writes its own m, z and o, and `combine_kernel` adds them:

    M = max_i m_i          result = sum_i exp(m_i - M) o_i / sum_i exp(m_i - M) z_i
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.flash_attention.cases import CASES, TOLERANCE, USES, largest_error
from mtmd.kernels.gpu.flash_attention.tiles import (
    MAX_HEAD,
    Launch,
    plan_combine,
    plan_launch,
    workspace,
)
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import on_device_of, options_on
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold(
    m,
    z,
    o1,
    o2,
    q1,
    q2,
    k,
    v,
    k_rows,
    v_rows,
    mask_rows,
    s,
    end,
    lo,
    hi,
    mask_step,
    scale,
    cap,
    K: tl.constexpr,
    V: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ALIGN: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """One block of keys s, which lie at k_rows and v_rows, into the running m, z, o. Without
    COMPARE all rows see all of these keys.
    """
    there = s < end
    x = scores(q1, q2, k, k_rows, there, K, K1, K2, ALIGN, COMPARE, False)
    if CAP or MASK:
        x *= scale
        if CAP:
            x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
        if MASK:
            at = mask_rows[:, None] + s.to(tl.int64)[None, :] * mask_step
            if COMPARE:
                x += tl.load(at, mask=there[None, :], other=0).to(tl.float32)
            else:
                x += tl.load(at).to(tl.float32)
        to_log2 = LOG2E
    else:
        to_log2 = scale * LOG2E
    if COMPARE:
        x = tl.where((s[None, :] >= lo[:, None]) & (s[None, :] <= hi[:, None]), x, float("-inf"))
    return weighed(
        m, z, o1, o2, x, v, v_rows, there, to_log2, V, V1, V2, ALIGN, MASK, COMPARE, q1.dtype
    )


@triton.jit
def scores(
    q1,
    q2,
    k,
    k_rows,
    there,
    K: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    ALIGN: tl.constexpr,
    COMPARE: tl.constexpr,
    SMALL_FIRST: tl.constexpr,
):
    """Products of rows with keys. SMALL_FIRST: over the second part of the head first."""
    x = tl.zeros([q1.shape[0], k_rows.shape[0]], tl.float32)
    SHARED: tl.constexpr = q1.dtype == tl.float32 and K1 + K2 > 256
    if K2 > 0 and SMALL_FIRST:
        k2 = load_columns(k, k_rows, there, K1, K2, K, ALIGN, COMPARE)
        x = _add_products(x, q2, k2, SHARED)
    k1 = load_columns(k, k_rows, there, 0, K1, K, ALIGN, COMPARE)
    x = _add_products(x, q1, k1, SHARED)
    if K2 > 0 and not SMALL_FIRST:
        k2 = load_columns(k, k_rows, there, K1, K2, K, ALIGN, COMPARE)
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
    m,
    z,
    o1,
    o2,
    x,
    v,
    v_rows,
    there,
    to_log2,
    V: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ALIGN: tl.constexpr,
    MASK: tl.constexpr,
    COMPARE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Values by the scores of their keys, into the running m, z, o."""
    # `larger` is what the next block sees; `top` is what is subtracted in this one.
    larger = tl.maximum(m, tl.max(x, 1))
    top = larger
    if COMPARE or MASK:
        top = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf would be NaN
    # A mask may hold the lowest finite number, which times log2(e) is -inf: subtract first. Else
    # one multiply-add does both.
    p = (
        tl.exp2((x - top[:, None]) * to_log2)
        if MASK
        else tl.exp2(x * to_log2 - (top * to_log2)[:, None])
    )
    a = tl.exp2((m - top) * to_log2)
    z = z * a + tl.sum(p, 1)
    # Weights are rounded to the values' type: matrix instructions want both alike. Their sum z is
    # of the exact ones.
    p = p.to(TYPE)
    o1 = tl.dot(
        p,
        load_columns(v, v_rows, there, 0, V1, V, ALIGN, COMPARE),
        o1 * a[:, None],
        input_precision="ieee",
    )
    if V2 > 0:
        o2 = tl.dot(
            p,
            load_columns(v, v_rows, there, V1, V2, V, ALIGN, COMPARE),
            o2 * a[:, None],
            input_precision="ieee",
        )
    return larger, z, o1, o2


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
def _intervals(
    t,
    bounds,
    T,
    S,
    window,
    bound_step,
    bound_end,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BOUNDS: tl.constexpr,
):
    """First and last key that each row may see; first > last where it sees none."""
    lo = tl.zeros_like(t)
    hi = lo + (S - 1)
    if CAUSAL:
        hi = tl.minimum(hi, t + (S - T))
    if WINDOW:
        lo = tl.maximum(lo, t + (S - T) - window + 1)
    if BOUNDS:
        at = bounds + t.to(tl.int64) * bound_step
        # Bounds may be 64-bit: cut to size first, then narrow.
        lo = tl.maximum(lo, tl.minimum(tl.maximum(tl.load(at), 0), S).to(tl.int32))
        hi = tl.minimum(hi, tl.minimum(tl.maximum(tl.load(at + bound_end), -1), S).to(tl.int32))
    return lo, hi


@triton.jit
def _rows(last, H, GROUP: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """The key head, batch entry and rows of this program; rows behind the last are not there."""
    blocks = last // ROWS + 1
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # the longest rows first
    head = tl.program_id(0) // blocks % (H // GROUP)
    batch = (tl.program_id(0) // blocks // (H // GROUP)).to(tl.int64)
    return head, batch, block * ROWS + tl.arange(0, ROWS)


@triton.jit(do_not_specialize=["T", "S", "window", "last"])
def attention_kernel(
    q,
    k,
    v,
    mask,
    bounds,
    out,
    sums,
    scale,
    cap,
    window,
    T,
    S,
    H,
    last,
    q_batch,
    q_step,
    q_head,
    k_batch,
    k_step,
    k_head,
    v_batch,
    v_step,
    v_head,
    mask_batch,
    mask_head,
    mask_row,
    mask_step,
    bound_batch,
    bound_step,
    bound_end,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BOUNDS: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """ROWS rows of one batch entry and key head. WHOLE: every row sees every key, and S is a
    multiple of KEYS. last: the last row, T * GROUP - 1. Strides of q, k and v count ALIGN elements.
    With several SPLITS, `out` is fp32 [B, T, H, SPLITS, V] and `sums` fp32 [B, T, H, SPLITS, 2]: o,
    m and z of a part of the keys.
    """
    head, batch, row = _rows(T * GROUP - 1, H, GROUP, CAUSAL, ROWS)
    # Surplus rows repeat the last one: its loads and its interval are valid.
    row = tl.minimum(row, T * GROUP - 1)
    t = row // GROUP
    h = head * GROUP + row % GROUP
    lo, hi = _intervals(
        t, bounds + batch * bound_batch, T, S, window, bound_step, bound_end, CAUSAL, WINDOW, BOUNDS
    )

    all_there = tl.full([ROWS], True, tl.int1)
    q_rows = batch * q_batch + t.to(tl.int64) * q_step + h.to(tl.int64) * q_head
    q1 = load_columns(q, q_rows, all_there, 0, K1, K, ALIGN, False)
    q2 = q1
    if K2 > 0:
        q2 = load_columns(q, q_rows, all_there, K1, K2, K, ALIGN, False)
    k_from = batch * k_batch + head.to(tl.int64) * k_head
    v_from = batch * v_batch + head.to(tl.int64) * v_head
    mask_rows = mask + batch * mask_batch + h.to(tl.int64) * mask_head + t.to(tl.int64) * mask_row

    # Running maximum, sum of weights and weighted sum of values, all fp32 whatever the inputs are.
    m = tl.full([ROWS], float("-inf"), tl.float32)
    z = tl.zeros([ROWS], tl.float32)
    o1 = tl.zeros([ROWS, V1], tl.float32)
    o2 = z
    if V2 > 0:
        o2 = tl.zeros([ROWS, V2], tl.float32)

    # Keys begin..end hold everything that some row sees; inner_begin..inner_end are blocks that all
    # rows see entirely.
    begin = tl.min(tl.where(lo <= hi, lo, S), 0) // KEYS * KEYS
    end = tl.max(tl.where(lo <= hi, hi, -1), 0) + 1
    if SPLITS > 1:
        # A row block's keys, in whole blocks: the last parts may be shorter, or empty with begin at
        # or behind end.
        each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), SPLITS) * KEYS
        begin = tl.minimum(begin + tl.program_id(1) * each, tl.cdiv(end, KEYS) * KEYS)
        end = tl.minimum(end, begin + each)
    inner_begin = tl.minimum(tl.cdiv(tl.max(lo, 0), KEYS), tl.cdiv(end, KEYS)) * KEYS
    inner_begin = tl.maximum(inner_begin, begin)
    inner_end = tl.maximum(tl.minimum(tl.min(hi, 0) + 1, end) // KEYS * KEYS, inner_begin)
    if WHOLE:
        inner_begin, inner_end = S * 0, S
        if SPLITS > 1:
            inner_begin, inner_end = begin, end
    # The blocks that need no comparison first, in a loop of their own that the compiler can
    # pipeline; then those before and after them, in one loop, so that `fold` is compiled twice and
    # not three times.
    for start in range(inner_begin, inner_end, KEYS):
        start = tl.multiple_of(start, KEYS)
        s = start + tl.arange(0, KEYS)
        # 64 bits: a long cache of many heads has more elements than 32 bits count.
        m, z, o1, o2 = fold(
            m,
            z,
            o1,
            o2,
            q1,
            q2,
            k,
            v,
            k_from + s.to(tl.int64) * k_step,
            v_from + s.to(tl.int64) * v_step,
            mask_rows,
            s,
            end,
            lo,
            hi,
            mask_step,
            scale,
            cap,
            K,
            V,
            K1,
            K2,
            V1,
            V2,
            ALIGN,
            CAP,
            MASK,
            False,
        )
    if not WHOLE:
        before = (inner_begin - begin) // KEYS
        after = tl.cdiv(tl.maximum(end - inner_end, 0), KEYS)
        for i in range(before + after):
            start = tl.multiple_of(
                tl.where(i < before, begin, inner_end - before * KEYS) + i * KEYS, KEYS
            )
            s = start + tl.arange(0, KEYS)
            # 64 bits: a long cache of many heads has more elements than 32 bits count.
            m, z, o1, o2 = fold(
                m,
                z,
                o1,
                o2,
                q1,
                q2,
                k,
                v,
                k_from + s.to(tl.int64) * k_step,
                v_from + s.to(tl.int64) * v_step,
                mask_rows,
                s,
                end,
                lo,
                hi,
                mask_step,
                scale,
                cap,
                K,
                V,
                K1,
                K2,
                V1,
                V2,
                ALIGN,
                CAP,
                MASK,
                True,
            )

    # Where results go, found anew from `last`, of which the compiler knows nothing: else a thread
    # keeps its rows in registers during the loops, beside all else, or in memory.
    head, batch, row = _rows(last, H, GROUP, CAUSAL, ROWS)
    real = row <= last
    row = tl.minimum(row, last)
    out_row = (batch * T + row // GROUP) * H + head * GROUP + row % GROUP
    if SPLITS > 1:
        out_row = out_row * SPLITS + tl.program_id(1)
        tl.store(sums + out_row * 2, m, mask=real)
        tl.store(sums + out_row * 2 + 1, z, mask=real)
        z = tl.full([ROWS], 1.0, tl.float32)
    z = tl.where(z == 0, 1.0, z)  # a row that sees nothing gives zeros
    store_columns(out, out_row * V, o1 / z[:, None], real, 0, V1, V)
    if V2 > 0:
        store_columns(out, out_row * V, o2 / z[:, None], real, V1, V2, V)


@triton.jit
def combine_kernel(
    parts, sums, out, to_log2, V: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of one row from its SPLITS parts, which `attention_kernel` leaves. to_log2:
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


def rejects(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """None if the kernel computes attention on tensors of these types, else why not. Sizes of B, T,
    S and H never matter short of the limits of a grid and of 32-bit row numbers, which are named.
    """
    del causal, window
    for name, type_ in (("q", q), ("k", k), ("v", v)):
        if (
            type_.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or type_.dtype != q.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32, the same "
                "for q, k and v"
            )
        if not 16 <= type_.shape[3] <= MAX_HEAD:
            return f"{name} has head size {type_.shape[3]}; the kernel takes 16 to {MAX_HEAD}"
        if type_.strides[3] != 1:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel needs stride 1 in the last "
                "dimension"
            )
        if min(type_.strides) < 0:
            return f"{name} has strides {list(type_.strides)}; the kernel takes none below 0"
    if mask is not None and not mask.dtype.is_floating_point:
        return f"mask is {name_of(mask.dtype)}; the kernel adds a floating-point mask"
    if bounds is not None and bounds.dtype not in (torch.int32, torch.int64):
        return f"bounds are {name_of(bounds.dtype)}; the kernel takes i32 or i64"
    if not (scale > 0 and isfinite(scale)) or (
        softcap is not None and not (softcap > 0 and isfinite(softcap))
    ):
        return f"scale {scale}, softcap {softcap}; the kernel needs positive finite numbers"
    batch, rows, heads, _ = q.shape
    if rows + k.shape[1] >= 2**30 or rows * (heads // k.shape[2]) >= 2**30:
        return (
            f"{rows} rows x {heads // k.shape[2]} heads of a group, {k.shape[1]} keys; the kernel "
            "numbers rows and keys below 2^30"
        )
    if batch * heads * rows >= 2**31:
        return f"{batch} x {heads} x {rows} rows; a grid has fewer than 2^31 programs"
    return None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The `attention` op

    q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V], contiguous

    mask [T, S], [H, T, S] or [B, H, T, S]; bounds [T, 2] or [B, T, 2]. Raises PlacementError with
    what `rejects` says.
    """
    types = [None if t is None else Type.of(t) for t in (q, k, v, mask, bounds)]
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
    }
    reason = rejects(*types, **options)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"flash attention on the GPU: {reason}")
    return run_launch(plan_launch(*types, **options), q, k, v, mask, bounds)  # type: ignore[arg-type]


def run_launch(
    launch: Launch, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Tensor | None
) -> Tensor:
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=v.dtype, device=q.device)
    if not out.numel():
        return out
    # Absent tensors are not read; the launch needs some pointer in their place.
    given = q, k, v, q if mask is None else mask, q if bounds is None else bounds
    call = launch.call
    options = {**call.scalars, **call.constants, **options_on(q.device, call)}
    with on_device_of(q):
        if launch.splits == 1:
            attention_kernel[(launch.programs,)](*given, out, out, **options)
            return out
        parts = torch.empty(
            (*q.shape[:3], launch.splits, v.shape[3]), dtype=torch.float32, device=q.device
        )
        sums = torch.empty((*q.shape[:3], launch.splits, 2), dtype=torch.float32, device=q.device)
        attention_kernel[(launch.programs, launch.splits)](*given, parts, sums, **options)
        call = plan_combine(launch)
        combine_kernel[(out.numel() // v.shape[3], call.programs)](
            parts, sums, out, **call.scalars, **call.constants, **options_on(q.device, call)
        )
    return out


def program(
    q: Type, k: Type, v: Type, mask: Type | None = None, bounds: Type | None = None, **options: Any
) -> Program:
    """What a run on these types launches; the options are those of `plan_launch`. The parts of
    shared-out keys are added by a second program, `combine_program`.
    """
    launch = plan_launch(q, k, v, mask, bounds, **options)
    out = fresh(v) if launch.splits == 1 else Type.contiguous((1,), torch.float32)
    operands = {"q": q, "k": k, "v": v, "mask": mask or q, "bounds": bounds or q}
    return Program(
        attention_kernel,
        launch.call,
        operands | {"out": out, "sums": out},
        ("ROWS", "KEYS"),
        head=v.shape[3],
    )


def launches(
    q: Type, k: Type, v: Type, mask: Type | None = None, bounds: Type | None = None, **options: Any
) -> int:
    """One, and one more where the keys are shared out."""
    return 1 if plan_launch(q, k, v, mask, bounds, **options).splits == 1 else 2


def combine_program(
    q: Type, k: Type, v: Type, mask: Type | None = None, bounds: Type | None = None, **options: Any
) -> Program:
    """What adds the parts of a launch over shared-out keys."""
    part = Type.contiguous((1,), torch.float32)
    call = plan_combine(plan_launch(q, k, v, mask, bounds, **options))
    operands = {"parts": part, "sums": part, "out": fresh(v)}
    tile = "SPLITS", "COLUMNS"
    return Program(combine_kernel, call, operands, tile, "attention parts", v.shape[3])


def programs(*types: Type | None, **options: Any) -> list[Program]:
    """All that a run launches."""
    first = program(*types, **options)  # type: ignore[arg-type]
    split = first.call.constants["SPLITS"] != 1 and first.call.programs
    return [first, combine_program(*types, **options)] if split else [first]  # type: ignore[arg-type]


KERNEL = TritonKernel(
    run=flash_attention,
    rejects=rejects,
    workspace=workspace,
    program=program,
    programs=programs,
    launches=launches,
    cases=CASES,
    uses=USES,
    error=largest_error,
    limits=TOLERANCE,
)
