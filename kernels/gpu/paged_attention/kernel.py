"""Attention of a batch's tokens to the pages of their sequences, forward, for NVIDIA and AMD GPUs:
the `paged_attention` op. Keys and values are read where they lie: nothing is gathered.

The mathematics are those of `flash_attention/kernel.py`, whose `fold` takes each block of keys.
Row s of a sequence's past lies in the cache at pages[s / SIZE] * SIZE + s % SIZE.

**A block never mixes sequences.** One program has up to ROWS / GROUP tokens of one sequence, all
query heads of a group, and walks from the first to the last key that one of them sees: under a
window, over the window alone. Blocks are numbered so that sequence i begins with block
starts[i] / TOKENS + i (TOKENS = ROWS / GROUP), which leaves at most one of each sequence without
work; a program finds its sequence by binary search, and nothing has to be known on the host.

**Keys are always shared out**, as in flash-decoding, by `splits` programs for each block: a number
of the launch, not of the compiled program, that depends on shapes alone, so that a recorded launch
fits whatever the sequences' lengths are. A part is at least LEAST blocks of keys; parts behind
those that a short sequence needs are left empty: they write z = 0 and nothing else, and
`reduce_kernel` passes over them. Where there are programs enough for the device without, as in a
prefill, SPLIT is False and the result is written at once.

**Queries as they come from their product.** With `eps` they are normalised and with a table of
angles turned as they are loaded, which saves two launches a layer. Each program of a block does so
for itself; blocks of many rows, which are few launches' worth of work anyway, take them as they
are.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from math import e as E
from math import gcd, isfinite, log2
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.flash_attention.kernel import fold, load_columns, store_columns
from mtmd.kernels.gpu.flash_attention.tiles import MAX_HEAD, Tile, choose_tile
from mtmd.kernels.gpu.flash_attention.tiles import parts as head_parts
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.paged_attention.cases import CASES, NMSE, USES
from mtmd.kernels.gpu.rotary.turn import squares, turn
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type

# Programs wanted, about two for each processor of an A100, H100 or MI300, the most that share out
# the keys of a block of rows, and the blocks of keys each takes at least. Not measured.
WANTED, MOST_SPLITS, LEAST = 256, 128, 2
MOST_TURNED = 16  # rows of a block whose queries are normalised and turned as they are loaded
MOST_GROUP = 32  # query heads of a key head: rows of the smallest tile that takes several


@triton.jit(do_not_specialize=["S", "keys", "splits"])
def paged_attention_kernel(
    q,
    cache,
    pages,
    bounds,
    starts,
    table,
    q_norm,
    out,
    sums,
    scale,
    cap,
    eps,
    S,
    keys,
    H,
    splits,
    q_step,
    q_head,
    row_step,
    row_head,
    values,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    SIZE: tl.constexpr,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    SEARCH: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """ROWS rows (tokens x query heads of a group) of one sequence and key head. Strides of q and
    cache count ALIGN elements; `values` is the step from a key to its value. SEARCH: steps that
    find one of S sequences. With SPLIT, `out` is fp32 [T, H, splits, K] and `sums` fp32
    [T, H, splits, 2]: o, m and z of a part of the keys.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    part = tl.program_id(0) % splits
    head = tl.program_id(0) // splits % (H // GROUP)
    block = (tl.program_id(0) // splits // (H // GROUP)).to(tl.int64)
    sequence = block * 0
    for step in tl.static_range(SEARCH):
        further = sequence + (1 << (SEARCH - 1 - step))
        inside = further < S
        first = tl.load(starts + further, mask=inside, other=0) // TOKENS + further
        sequence = tl.where(inside & (first <= block), further, sequence)
    begin_token = tl.load(starts + sequence)
    end_token = tl.load(starts + sequence + 1)
    token = begin_token + (block - begin_token // TOKENS - sequence) * TOKENS
    if token < end_token:
        row = tl.arange(0, ROWS)
        t = token + row // GROUP
        real = (row < TOKENS * GROUP) & (t < end_token)
        # Surplus rows repeat the last token: its loads and its interval are valid.
        t = tl.minimum(tl.minimum(t, token + (TOKENS - 1)), end_token - 1)
        h = head * GROUP + row % GROUP
        lo = tl.maximum(tl.load(bounds + t * 2), 0)
        hi = tl.minimum(tl.load(bounds + t * 2 + 1), keys - 1)

        all_there = tl.full([ROWS], True, tl.int1)
        q_rows = t * q_step + h.to(tl.int64) * q_head
        if R > 0 or NORM:
            c1 = tl.arange(0, K1)
            c2 = K1 + tl.arange(0, K2 if K2 > 0 else K1)
            q_rows *= ALIGN
            norm = q_rows.to(tl.float32)
            if NORM:
                norm = squares(q, q_rows, all_there, c1, K)
                if K2 > 0:
                    norm += squares(q, q_rows, all_there, c2, K)
                norm = tl.rsqrt(norm / K + eps)
            angles = table + t * (2 * R)
            q1 = turn(
                q, q_rows, real, c1, angles, q_norm, norm, K, R, PARTS, ADJACENT, NORM, WEIGHT
            ).to(q.dtype.element_ty)
            q2 = q1
            if K2 > 0:
                q2 = turn(
                    q, q_rows, real, c2, angles, q_norm, norm, K, R, PARTS, ADJACENT, NORM, WEIGHT
                ).to(q.dtype.element_ty)
        else:
            q1 = load_columns(q, q_rows, all_there, 0, K1, K, ALIGN, False)
            q2 = q1
            if K2 > 0:
                q2 = load_columns(q, q_rows, all_there, K1, K2, K, ALIGN, False)
        k_from = head.to(tl.int64) * row_head

        m = tl.full([ROWS], float("-inf"), tl.float32)
        z = tl.zeros([ROWS], tl.float32)
        o1 = tl.zeros([ROWS, K1], tl.float32)
        o2 = z
        if K2 > 0:
            o2 = tl.zeros([ROWS, K2], tl.float32)

        begin = tl.min(tl.where(lo <= hi, lo, keys), 0) // KEYS * KEYS
        end = tl.max(tl.where(lo <= hi, hi, -1), 0) + 1
        if SPLIT:
            # In whole blocks: the last parts may be shorter, or empty with begin at or behind end.
            each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), splits)
            begin = tl.minimum(
                begin + part * tl.maximum(each, LEAST) * KEYS, tl.cdiv(end, KEYS) * KEYS
            )
            end = tl.minimum(end, begin + tl.maximum(each, LEAST) * KEYS)
        inner_begin = tl.minimum(tl.cdiv(tl.max(lo, 0), KEYS), tl.cdiv(end, KEYS)) * KEYS
        inner_begin = tl.maximum(inner_begin, begin)
        inner_end = tl.maximum(tl.minimum(tl.min(hi, 0) + 1, end) // KEYS * KEYS, inner_begin)
        # As in `attention_kernel`: blocks that all rows see entirely, then those around them.
        for start in range(inner_begin, inner_end, KEYS):
            start = tl.multiple_of(start, KEYS)
            s = start + tl.arange(0, KEYS)
            k_rows = k_from + _places(pages, s, s >= 0, SIZE) * row_step
            m, z, o1, o2 = fold(
                m,
                z,
                o1,
                o2,
                q1,
                q2,
                cache,
                cache,
                k_rows,
                k_rows + values,
                k_rows,
                s,
                end,
                lo,
                hi,
                0,
                scale,
                cap,
                K,
                K,
                K1,
                K2,
                K1,
                K2,
                ALIGN,
                CAP,
                False,
                False,
            )
        before = (inner_begin - begin) // KEYS
        after = tl.cdiv(tl.maximum(end - inner_end, 0), KEYS)
        for i in range(before + after):
            start = tl.multiple_of(
                tl.where(i < before, begin, inner_end - before * KEYS) + i * KEYS, KEYS
            )
            s = start + tl.arange(0, KEYS)
            k_rows = k_from + _places(pages, s, s < end, SIZE) * row_step
            m, z, o1, o2 = fold(
                m,
                z,
                o1,
                o2,
                q1,
                q2,
                cache,
                cache,
                k_rows,
                k_rows + values,
                k_rows,
                s,
                end,
                lo,
                hi,
                0,
                scale,
                cap,
                K,
                K,
                K1,
                K2,
                K1,
                K2,
                ALIGN,
                CAP,
                False,
                True,
            )

        out_row = t * H + h
        if SPLIT:
            out_row = out_row * splits + part
            tl.store(sums + out_row * 2, m, mask=real)
            tl.store(sums + out_row * 2 + 1, z, mask=real)
            real = real & (z > 0)
            z = tl.full([ROWS], 1.0, tl.float32)
        z = tl.where(z == 0, 1.0, z)  # a row that sees nothing gives zeros
        store_columns(out, out_row * K, o1 / z[:, None], real, 0, K1, K)
        if K2 > 0:
            store_columns(out, out_row * K, o2 / z[:, None], real, K1, K2, K)


@triton.jit
def _places(pages, s, there, SIZE: tl.constexpr):
    """Where rows s of the table's pages lie in the cache."""
    return tl.load(pages + s // SIZE, mask=there, other=0) * SIZE + s % SIZE


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    partial, sums, out, to_log2, splits, K: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of one row from its `splits` parts, PARTS at a time:

        M = max_i m_i          result = sum_i exp(m_i - M) o_i / sum_i exp(m_i - M) z_i

    Parts with z = 0 hold no o. to_log2: what makes m a power of two.
    """
    blocks: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    m = tl.full([PARTS], float("-inf"), tl.float32)
    for begin in range(0, splits, PARTS):
        i = row * splits + begin + part
        m = tl.maximum(m, tl.load(sums + i * 2, mask=begin + part < splits, other=float("-inf")))
    top = tl.max(m, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    z = tl.zeros([PARTS], tl.float32)
    o = tl.zeros([PARTS, COLUMNS], tl.float32)
    for begin in range(0, splits, PARTS):
        i = row * splits + begin + part
        there = begin + part < splits
        weight = tl.load(sums + i * 2 + 1, mask=there, other=0)
        largest = tl.load(sums + i * 2, mask=there, other=float("-inf"))
        a = tl.exp2((largest - top) * to_log2)
        z += a * weight
        o += a[:, None] * tl.load(
            partial + i[:, None] * K + c[None, :],
            mask=(weight > 0)[:, None] & (c < K)[None, :],
            other=0,
        )
    total = tl.sum(z, 0)
    result = tl.sum(o, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * K + c, result.to(out.dtype.element_ty), mask=c < K)


def rejects(
    q: Type,
    cache: Type,
    pages: Type,
    bounds: Type,
    starts: Type,
    table: Type | None = None,
    q_norm: Type | None = None,
    *,
    size: int,
    scale: float,
    softcap: float | None = None,
    eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
) -> str | None:
    """None if the kernel computes paged attention on tensors of these types, else why not. Numbers
    of tokens, sequences and pages never matter short of the limits of a grid, which are named.
    """
    del pairs, parts
    for name, type_ in (("q", q), ("the cache", cache)):
        if (
            type_.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or type_.dtype != q.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32, the same "
                "for q and the cache"
            )
    if not 16 <= q.shape[3] <= MAX_HEAD:
        return f"head size {q.shape[3]}; the kernel takes 16 to {MAX_HEAD}"
    if q.strides[3] != 1:
        return f"q has strides {list(q.strides)}; the kernel needs stride 1 in the last dimension"
    for name, kind in (
        ("the cache", cache),
        ("the table of pages", pages),
        ("bounds", bounds),
        ("starts", starts),
        ("the table of angles", table),
        ("the norm", q_norm),
    ):
        if kind is not None and not kind.is_contiguous:
            return f"{name} has strides {list(kind.strides)}; the kernel needs it contiguous"
    group = q.shape[2] // cache.shape[2]
    if group > MOST_GROUP:
        return f"{group} query heads of a key head; the kernel takes up to {MOST_GROUP}"
    if not (scale > 0 and isfinite(scale)) or (
        softcap is not None and not (softcap > 0 and isfinite(softcap))
    ):
        return f"scale {scale}, softcap {softcap}; the kernel needs positive finite numbers"
    if max(q.shape[1] * q.shape[2], starts.shape[0] * cache.shape[2]) * MOST_SPLITS >= 2**31:
        return (
            f"{q.shape[1]} tokens of {starts.shape[0] - 1} sequences x {q.shape[2]} heads; a grid "
            "has fewer than 2^31 programs"
        )
    if table is not None and table.dtype != torch.float32:
        return f"the table of angles is {name_of(table.dtype)}; the kernel takes fp32"
    if table is not None or eps is not None:
        rows = choose_launch(q, cache, pages, starts, size)[0].rows
        if rows > MOST_TURNED:
            return (
                f"queries to be turned in blocks of {rows} rows; the kernel takes blocks of up to "
                f"{MOST_TURNED}"
            )
    if cache.shape[1] >= 2**30:
        return f"{cache.shape[1]} rows in the cache; the kernel numbers rows below 2^30"
    return None


def choose_launch(q: Type, cache: Type, pages: Type, starts: Type, size: int) -> tuple[Tile, int]:
    """The tile, and by how many programs the keys of each block of rows are shared out."""
    tokens, heads, width = q.shape[1:]
    sequences, groups = starts.shape[0] - 1, cache.shape[2]
    group = heads // groups
    rows = max(-(-tokens // sequences), 1) * group
    tile = choose_tile(width, q.dtype, rows, False)
    if width > 128 and tile.rows > 32:  # more would spill on cuda:80: places take registers, too
        tile = Tile(32, 32, 4, 2) if width <= 256 else Tile(32, 16, 8, 2)
    if tile.rows < group:  # in fp32, whose tile for few rows is the smallest there is
        tile = choose_tile(width, q.dtype, 32, False)
    programs = (tokens // (tile.rows // group) + sequences) * groups
    blocks = -(-pages.shape[0] * size // tile.keys)
    return tile, max(1, min(WANTED // programs, MOST_SPLITS, blocks // LEAST))


def plan_call(
    q: Type,
    cache: Type,
    pages: Type,
    bounds: Type,  # noqa: ARG001
    starts: Type,
    table: Type | None = None,
    q_norm: Type | None = None,
    *,
    size: int,
    scale: float,
    softcap: float | None = None,
    eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
) -> Call:
    tokens, heads, width = q.shape[1:]
    rows, groups = cache.shape[1:3]
    sequences, group = starts.shape[0] - 1, heads // groups
    tile, splits = choose_launch(q, cache, pages, starts, size)
    first, second = head_parts(width)
    steps = {
        "q_step": q.strides[1] if tokens > 1 else 0,
        "q_head": q.strides[2] if heads > 1 else 0,
        "row_step": groups * width,
        "row_head": width,
        "values": rows * groups * width,
    }
    # What all of them share, up to 16, tells the compiler how wide it may load (`load_columns`).
    align = gcd(16, *steps.values())
    scalars: dict[str, int | float] = {
        "scale": float(scale),
        "cap": float(softcap or 1.0),
        "eps": float(eps or 0),
        "S": sequences,
        "keys": pages.shape[0] * size,
        "H": heads,
        "splits": splits,
        **{name: step // align for name, step in steps.items()},
    }
    constants: dict[str, int | bool | str] = {
        "GROUP": group,
        "K": width,
        "K1": first,
        "K2": second,
        "R": 0 if table is None else table.shape[2],
        "PARTS": parts,
        "ADJACENT": pairs == "adjacent",
        "NORM": eps is not None,
        "WEIGHT": q_norm is not None,
        "SIZE": size,
        "CAP": softcap is not None,
        "SPLIT": splits > 1,
        # Rounded up: each number of steps is compiled for itself.
        "SEARCH": -(-max(sequences - 1, 0).bit_length() // 4) * 4,
        "LEAST": LEAST,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "ALIGN": align,
    }
    blocks = tokens // (tile.rows // group) + sequences
    programs = blocks * groups * splits if tokens * heads else 0
    return Call(scalars, constants, programs, tile.warps, tile.stages)


def plan_reduce(q: Type, call: Call) -> Call:
    """How the parts that a launch leaves are added."""
    width, splits = q.shape[3], int(call.scalars["splits"])
    # With a cap the kernel's scores are what the softmax takes, else they are not scaled.
    to_log2 = (1.0 if call.constants["CAP"] else float(call.scalars["scale"])) * log2(E)
    columns = min(64, max(16, power_of_two(width)))
    return Call(
        {"to_log2": to_log2, "splits": splits},
        {"K": width, "PARTS": 16, "COLUMNS": columns},
        q.shape[1] * q.shape[2] * -(-width // columns),
        4,
        1,
    )


def paged_attention(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    bounds: Tensor,
    starts: Tensor,
    table: Tensor | None = None,
    q_norm: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The `paged_attention` op: q [1, T, H, K], cache [2, S, G, K] -> [1, T, H, K], contiguous

    Raises PlacementError with what `rejects` says.
    """
    types = [
        None if t is None else Type.of(t) for t in (q, cache, pages, bounds, starts, table, q_norm)
    ]
    reason = rejects(*types, **options)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"paged attention on the GPU: {reason}")
    call = plan_call(*types, **options)  # type: ignore[arg-type]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not call.programs:
        return out
    # Absent tensors are not read; the launch needs some pointer in their place.
    absent = (q if t is None else t for t in (table, q_norm))
    given = q, cache, pages, bounds, starts, *absent
    if not call.constants["SPLIT"]:
        run_call(paged_attention_kernel, call, (*given, out, out))
        return out
    shape = (*q.shape[1:3], int(call.scalars["splits"]))
    partial = torch.empty((*shape, q.shape[3]), dtype=torch.float32, device=q.device)
    sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    run_call(paged_attention_kernel, call, (*given, partial, sums))
    run_call(reduce_kernel, plan_reduce(Type.of(q), call), (partial, sums, out))
    return out


def workspace(q: Type, *types: Type | None, **options: Any) -> int:
    """Bytes that a launch takes for the parts of its result and their sums."""
    call = plan_call(q, *types, **options)  # type: ignore[arg-type]
    splits = int(call.scalars["splits"])
    return 4 * splits * q.shape[1] * q.shape[2] * (q.shape[3] + 2) if splits > 1 else 0


def launches(*types: Type | None, **options: Any) -> int:
    """One, and one more where the keys are shared out."""
    return 2 if plan_call(*types, **options).constants["SPLIT"] else 1  # type: ignore[arg-type]


def program(q: Type, cache: Type, *others: Type | None, **options: Any) -> Program:
    """What a run on these types launches. Parts are added by a second, `reduce_program`."""
    call = plan_call(q, cache, *others, **options)  # type: ignore[arg-type]
    out = Type.contiguous((1,), torch.float32) if call.constants["SPLIT"] else fresh(q)
    names = "pages", "bounds", "starts", "table", "q_norm"
    given = zip(names, (*others, None, None), strict=False)
    operands = {"q": q, "cache": cache, **{name: t or q for name, t in given}}
    return Program(
        paged_attention_kernel,
        call,
        operands | {"out": out, "sums": out},
        ("ROWS", "KEYS"),
        head=q.shape[3],
    )


def reduce_program(q: Type, *others: Type | None, **options: Any) -> Program:
    """What adds the parts of a launch."""
    part = Type.contiguous((1,), torch.float32)
    call = plan_reduce(q, plan_call(q, *others, **options))  # type: ignore[arg-type]
    operands = {"partial": part, "sums": part, "out": fresh(q)}
    tile = "PARTS", "COLUMNS"
    return Program(reduce_kernel, call, operands, tile, "attention parts", q.shape[3])


def programs(*types: Type | None, **options: Any) -> list[Program]:
    """All that a run launches."""
    first = program(*types, **options)  # type: ignore[arg-type]
    second = [reduce_program(*types, **options)] if first.call.constants["SPLIT"] else []  # type: ignore[arg-type]
    return [first, *second] if first.call.programs else []


KERNEL = TritonKernel(
    run=paged_attention,
    rejects=rejects,
    workspace=workspace,
    program=program,
    programs=programs,
    launches=launches,
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
