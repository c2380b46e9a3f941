"""Attention of a batch's tokens to the pages of their sequences, forward, for NVIDIA and AMD GPUs:
the `paged_attention` op. Keys and values are read where they lie: nothing is gathered.

The mathematics are those of `flash_attention/softmax.py`, whose `fold` takes each block of keys.
Row s of a sequence's past lies in the cache at pages[s / SIZE] * SIZE + s % SIZE.

**A block never mixes sequences.** One program has up to ROWS / GROUP tokens of one sequence, all
query heads of a group, and walks from the first to the last key that one of them sees: under a
window, over the window alone. Blocks are numbered so that sequence i begins with block
starts[i] / TOKENS + i (TOKENS = ROWS / GROUP), which leaves at most one of each sequence without
work; a program finds its sequence by binary search, and nothing has to be known on the host. Keys
that no row of it sees are not read, though they lie in the same block of keys: what is no number in
pages of a neighbour, or in freed ones, reaches nobody else.

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

from dataclasses import KW_ONLY, dataclass, replace
from math import e, gcd, isfinite, log2

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu import kv_rows
from mtmd.kernels.gpu.flash_attention.softmax import empty_state, fold, load_queries, store_results
from mtmd.kernels.gpu.flash_attention.tiles import MAX_HEAD, Tile, choose_tile
from mtmd.kernels.gpu.flash_attention.tiles import parts as head_parts
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.kv_rows import rotate
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.paged_attention.cases import CASES, NMSE, USES
from mtmd.kernels.gpu.rotary.turn import squares, turn
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, declared, same
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.kv_rows import BLOCK, blocks_of, value_offset

# Programs wanted, about two for each processor of an A100, H100 or MI300, the most that share out
# the keys of a block of rows, and the blocks of keys each takes at least. Not measured.
REQUESTED, MAX_SPLITS, MINIMUM = 256, 128, 2
MAX_TURNED = 16  # rows of a block whose queries are normalised and turned as they are loaded
MAX_GROUP = 32  # query heads that a block reads a key head for: rows of the smallest tile that
# takes several; those of a larger group are shared out among blocks


@dataclass(frozen=True)
class Operands:
    """Operands of `paged_attention`: q [1, T, H, K], cache [2, S, G, K], or [1, S, G, K] of keys
    that are values, too, or of keys and values in one row, pages [P], bounds [T, 2], starts
    [sequences + 1], table [T, 2, R], q_norm [K] -> [1, T, H, K], contiguous
    """

    q: Type
    cache: Type
    pages: Type
    bounds: Type
    starts: Type
    table: Type | None = None
    q_norm: Type | None = None
    _: KW_ONLY
    size: int
    scale: float
    softcap: float | None = None
    eps: float | None = None
    pairs: str = "half"
    parts: int = 1
    quant: str | None = None


@triton.jit(do_not_specialize=["S", "keys", "splits"])
def paged_attention_kernel(p, s, S, keys, H, splits, C: tl.constexpr):
    """ROWS rows (tokens x GROUP query heads) of one sequence and key head, which SHARED blocks of
    heads read. Strides of q count ALIGN elements, those of the cache too, or, where it is
    quantized, ROW_ALIGN bytes; `v_from` is the step from a key to its value. SEARCH: steps that
    find one of S sequences. With SPLIT, `out` is fp32 [T, H, splits, K] and `sums` fp32 [T, H,
    splits, 2]: o, m and z of a part of the keys.
    """
    GROUP: tl.constexpr = C.GROUP
    KEYS: tl.constexpr = C.KEYS
    TOKENS: tl.constexpr = C.ROWS // GROUP
    part = tl.program_id(0) % splits
    head = tl.program_id(0) // splits % (H // GROUP)
    block = (tl.program_id(0) // splits // (H // GROUP)).to(tl.int64)
    sequence = block * 0
    for step in tl.static_range(C.SEARCH):
        further = sequence + (1 << (C.SEARCH - 1 - step))
        inside = further < S
        first = tl.load(p.starts + further, mask=inside, other=0) // TOKENS + further
        sequence = tl.where(inside & (first <= block), further, sequence)
    begin_token = tl.load(p.starts + sequence)
    end_token = tl.load(p.starts + sequence + 1)
    token = begin_token + (block - begin_token // TOKENS - sequence) * TOKENS
    if token < end_token:
        row = tl.arange(0, C.ROWS)
        t = token + row // GROUP
        real = (row < TOKENS * GROUP) & (t < end_token)
        # Surplus rows repeat the last token: its loads and its interval are valid.
        t = tl.minimum(tl.minimum(t, token + (TOKENS - 1)), end_token - 1)
        h = head * GROUP + row % GROUP
        lo = tl.maximum(tl.load(p.bounds + t * 2), 0)
        hi = tl.minimum(tl.load(p.bounds + t * 2 + 1), keys - 1)

        q_rows = t * s.q_step + h.to(tl.int64) * s.q_head
        if C.R > 0 or C.NORM:
            q = _turned(p, s, q_rows * C.ALIGN, real, t, C)
        else:
            q = load_queries(p.q, q_rows, C)
        if C.ROTATED:  # products of rotated vectors are the same
            q = _rotated(q[0], q[1], p.q.dtype.element_ty == tl.float32, C)
        k_from = (head // C.SHARED).to(tl.int64) * s.row_head
        m, z, o1, o2 = empty_state(C)

        first_seen = tl.min(tl.where(lo <= hi, lo, keys), 0)
        begin = first_seen // KEYS * KEYS
        end = tl.max(tl.where(lo <= hi, hi, -1), 0) + 1
        if C.SPLIT:
            # In whole blocks: the last parts may be shorter, or empty with begin at or behind end.
            each = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), KEYS), splits)
            begin = tl.minimum(
                begin + part * tl.maximum(each, C.MINIMUM) * KEYS, tl.cdiv(end, KEYS) * KEYS
            )
            end = tl.minimum(end, begin + tl.maximum(each, C.MINIMUM) * KEYS)
        inner_begin = tl.minimum(tl.cdiv(tl.max(lo, 0), KEYS), tl.cdiv(end, KEYS)) * KEYS
        inner_begin = tl.maximum(inner_begin, begin)
        inner_end = tl.maximum(tl.minimum(tl.min(hi, 0) + 1, end) // KEYS * KEYS, inner_begin)
        # As in `limited_kernel`: blocks that all rows see entirely, then those around them.
        limits = lo, hi
        for start in range(inner_begin, inner_end, KEYS):
            start = tl.multiple_of(start, KEYS)
            n = start + tl.arange(0, KEYS)
            k_rows = k_from + _locations(p.pages, n, n >= 0, C.SIZE) * s.row_step
            of_keys = p.cache, k_rows, p.cache, k_rows + s.v_from
            m, z, o1, o2 = fold((m, z, o1, o2), q, of_keys, k_rows, n, end, limits, s, C, False)
        before = (inner_begin - begin) // KEYS
        after = tl.cdiv(tl.maximum(end - inner_end, 0), KEYS)
        for i in range(before + after):
            start = tl.where(i < before, begin, inner_end - before * KEYS) + i * KEYS
            start = tl.multiple_of(start, KEYS)
            n = start + tl.arange(0, KEYS)
            k_rows = k_from + _locations(p.pages, n, n < end, C.SIZE) * s.row_step
            of_keys = p.cache, k_rows, p.cache, k_rows + s.v_from
            state = m, z, o1, o2
            m, z, o1, o2 = fold(state, q, of_keys, k_rows, n, end, limits, s, C, True, first_seen)

        if C.V_ROTATED:
            o1, o2 = _rotated(o1, o2, p.q.dtype.element_ty == tl.float32, C)
        out_row = t * H + h
        if C.SPLIT:
            out_row = out_row * splits + part
            tl.store(p.sums + out_row * 2, m, mask=real)
            tl.store(p.sums + out_row * 2 + 1, z, mask=real)
            real = real & (z > 0)
            z = tl.full([C.ROWS], 1.0, tl.float32)
        store_results(p.out, out_row, o1, o2, z, real, C)


@triton.jit
def _turned(p, s, rows, real, t, C: tl.constexpr):
    """Both parts of the heads at `rows`, normalised and turned."""
    c1 = tl.arange(0, C.K1)
    c2 = C.K1 + tl.arange(0, C.K2 if C.K2 > 0 else C.K1)
    scale = rows.to(tl.float32)
    if C.NORM:
        there = tl.full([C.ROWS], True, tl.int1)
        scale = squares(p.q, rows, there, c1, C.K)
        if C.K2 > 0:
            scale += squares(p.q, rows, there, c2, C.K)
        scale = tl.rsqrt(scale / C.K + s.eps)
    angles = p.table + t * (2 * C.R)
    dtype = p.q.dtype.element_ty
    q1 = turn(p.q, rows, real, c1, angles, p.q_norm, scale, C).to(dtype)
    q2 = q1
    if C.K2 > 0:
        q2 = turn(p.q, rows, real, c2, angles, p.q_norm, scale, C).to(dtype)
    return q1, q2


@triton.jit
def _rotated(x1, x2, EXACT: tl.constexpr, C: tl.constexpr):
    """Both parts of queries or results, in their type, as a quantized cache has keys and values."""
    y1 = rotate(x1, EXACT).to(x1.dtype)
    y2 = x2
    if C.K2 > 0:
        y2 = rotate(x2, EXACT).to(x2.dtype)
    return y1, y2


@triton.jit
def _locations(pages, s, there, SIZE: tl.constexpr):
    """Compute where rows s of the table's pages lie in the cache."""
    return tl.load(pages + s // SIZE, mask=there, other=0) * SIZE + s % SIZE


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    parts, sums, out, to_log2, splits, K: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
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
            parts + i[:, None] * K + c[None, :],
            mask=(weight > 0)[:, None] & (c < K)[None, :],
            other=0,
        )
    total = tl.sum(z, 0)
    result = tl.sum(o, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * K + c, result.to(out.dtype.element_ty), mask=c < K)


def rejects(o: Operands) -> str | None:
    """None if the kernel computes paged attention on tensors of these types, else why not. Numbers
    of tokens, sequences and pages never matter short of the limits of a grid, which are named.
    """
    for name, type_ in (("q", o.q), ("the cache", None if o.quant else o.cache)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    (tokens, heads, width), groups = o.q.shape[1:], o.cache.shape[2]
    if not 16 <= width <= MAX_HEAD:
        return f"head size {width}; the kernel supports 16 to {MAX_HEAD}"
    if o.q.strides[3] != 1:
        return f"q has strides {list(o.q.strides)}; the kernel needs stride 1 in the last dimension"
    for name, kind in (
        ("the cache", o.cache),
        ("the table of pages", o.pages),
        ("bounds", o.bounds),
        ("starts", o.starts),
        ("the table of angles", o.table),
        ("the norm", o.q_norm),
    ):
        if kind is not None and not kind.is_contiguous:
            return f"{name} has strides {list(kind.strides)}; the kernel needs it contiguous"
    if heads // groups > MAX_GROUP and _at_once(o) < 8:
        return (
            f"{heads // groups} query heads of a key head; the kernel supports up to {MAX_GROUP}, "
            "or numbers with equal parts of at least 8"
        )
    scale, softcap = o.scale, o.softcap
    if not (scale > 0 and isfinite(scale)) or (
        softcap is not None and not (softcap > 0 and isfinite(softcap))
    ):
        return f"scale {scale}, softcap {softcap}; the kernel needs positive finite numbers"
    if max(tokens * heads, o.starts.shape[0] * groups) * MAX_SPLITS >= 2**31:
        return (
            f"{tokens} tokens of {o.starts.shape[0] - 1} sequences x {heads} heads; a grid has "
            "fewer than 2^31 programs"
        )
    if o.table is not None and o.table.dtype != torch.float32:
        return f"the table of angles is {name_of(o.table.dtype)}; the kernel supports fp32"
    if o.table is not None or o.eps is not None:
        rows = choose_launch(o)[0].rows
        if rows > MAX_TURNED:
            return (
                f"queries to be turned in blocks of {rows} rows; the kernel supports "
                "blocks of up to "
                f"{MAX_TURNED}"
            )
    if o.cache.shape[1] >= 2**30:
        return f"{o.cache.shape[1]} rows in the cache; the kernel numbers rows below 2^30"
    return None


def _at_once(o: Operands) -> int:
    """Return for how many query heads a block reads a key head: no more than the rows of a tile."""
    group = o.q.shape[2] // o.cache.shape[2]
    wide = o.q.dtype == torch.float32 and o.q.shape[3] > 256
    maximum = min(group, 16 if wide else MAX_GROUP)
    return next(n for n in range(maximum, 0, -1) if group % n == 0)


def choose_launch(o: Operands) -> tuple[Tile, int]:
    """The tile, and by how many programs the keys of each block of rows are shared out."""
    tokens, heads, width = o.q.shape[1:]
    sequences, group = o.starts.shape[0] - 1, _at_once(o)
    groups = heads // group
    rows = max(-(-tokens // sequences), 1) * group
    tile = choose_tile(width, o.q.dtype, rows, False)
    if width > 128 and tile.rows > 32:  # more would spill on cuda:80: places take registers, too
        tile = Tile(32, 32, 4, 2) if width <= 256 else replace(tile, rows=32)
    if tile.rows < group:  # in fp32, whose tile for few rows is the smallest there is
        tile = choose_tile(width, o.q.dtype, 32, False)
    if o.quant is not None and width > 64:  # codes and scales take registers, too
        tile = replace(tile, keys=max(tile.keys // 2, 16))
        if width > 128 and tile.rows > 16:
            tile = Tile(32, 16, 8, 1)
    programs = (tokens // (tile.rows // group) + sequences) * groups
    blocks = -(-o.pages.shape[0] * o.size // tile.keys)
    return tile, max(1, min(REQUESTED // programs, MAX_SPLITS, blocks // MINIMUM))


def plan_call(o: Operands) -> Call:
    tokens, heads, width = o.q.shape[1:]
    rows, groups = o.cache.shape[1:3]
    sequences, group = o.starts.shape[0] - 1, _at_once(o)
    tile, splits = choose_launch(o)
    first, second = head_parts(blocks_of(width) * BLOCK if o.quant else width)
    row = o.cache.shape[3]
    of_q = {
        "q_step": o.q.strides[1] if tokens > 1 else 0,
        "q_head": o.q.strides[2] if heads > 1 else 0,
    }
    v_from = rows * groups * row if o.cache.shape[0] > 1 else 0
    if o.quant is not None:
        v_from = v_from or value_offset(o.quant, width)
    of_cache = {"row_step": groups * row, "row_head": row, "v_from": v_from}
    # What all of them share, up to 16, tells the compiler how wide it may load (`load_columns`).
    if o.quant is None:
        align = row_align = gcd(16, *of_q.values(), *of_cache.values())
    else:
        align, row_align = gcd(16, *of_q.values()), gcd(16, *of_cache.values())
    scalars: dict[str, int | float] = {
        "scale": float(o.scale),
        "cap": float(o.softcap or 1.0),
        "eps": float(o.eps or 0),
        "S": sequences,
        "keys": o.pages.shape[0] * o.size,
        "H": heads,
        "splits": splits,
        **{name: step // align for name, step in of_q.items()},
        **{name: step // row_align for name, step in of_cache.items()},
    }
    constants: dict[str, int | bool | str] = {
        "GROUP": group,
        "SHARED": heads // groups // group,
        "K": width,
        "K1": first,
        "K2": second,
        "V": width,
        "V1": first,
        "V2": second,
        "R": 0 if o.table is None else o.table.shape[2],
        "PARTS": o.parts,
        "ADJACENT": o.pairs == "adjacent",
        "NORM": o.eps is not None,
        "WEIGHT": o.q_norm is not None,
        "SIZE": o.size,
        "CAP": o.softcap is not None,
        "MASK": False,
        "SPLIT": splits > 1,
        # Rounded up: each number of steps is compiled for itself.
        "SEARCH": -(-max(sequences - 1, 0).bit_length() // 4) * 4,
        "MINIMUM": MINIMUM,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "ALIGN": align,
        **kv_rows.constants(o.quant, width),
        "ROW_ALIGN": row_align,
    }
    blocks = tokens // (tile.rows // group) + sequences
    programs = blocks * (heads // group) * splits if tokens * heads else 0
    return Call(scalars, constants, programs, tile.warps, tile.stages)


def plan(o: Operands) -> Plan:
    tokens, heads, width = o.q.shape[1:]
    call, out = plan_call(o), Type.contiguous(o.q.shape, o.q.dtype)
    tile = "ROWS", "KEYS"
    pointers = same("q cache pages bounds starts table q_norm out")
    if not call.constants["SPLIT"]:
        pointers |= {"sums": "out"}
        return Plan(out, [Launch(paged_attention_kernel, call, pointers, tile, head=width)])
    pointers |= {"out": "parts", "sums": "sums"}
    splits = int(call.scalars["splits"])
    # With a cap the kernel's scores are what the softmax takes, else they are not scaled.
    to_log2 = (1.0 if call.constants["CAP"] else float(call.scalars["scale"])) * log2(e)
    columns = min(64, max(16, power_of_two(width)))
    added = Call(
        {"to_log2": to_log2, "splits": splits},
        {"K": width, "PARTS": 16, "COLUMNS": columns},
        tokens * heads * -(-width // columns) if call.programs else 0,
        4,
        1,
    )
    launches = [
        Launch(paged_attention_kernel, call, pointers, tile, head=width),
        Launch(reduce_kernel, added, None, ("PARTS", "COLUMNS"), "attention parts", width),
    ]
    shape = tokens, heads, splits
    parts, sums = (Type.contiguous((*shape, n), torch.float32) for n in (width, 2))
    return Plan(out, launches, {"parts": parts, "sums": sums})


KERNEL = declared(
    Operands, plan, rejects, what="paged attention", cases=CASES, uses=USES, limits=NMSE
)
