"""Linear attention, forward, for NVIDIA and AMD GPUs: the `linear_attention` op with its state held
in registers.

Per head, with a state S [K, V], a log decay g_t and a strength b_t for each token, the gated delta
rule (arXiv:2412.06464):

    S <- exp(g_t) S          S <- S + b_t k_t (v_t - S^T k_t)^T          o_t = scale S^T q_t

Without `delta` S^T k_t is left out: the selective scan of Mamba-2 (arXiv:2405.21060), for which
u = b v below, and no system is solved.

Columns of S do not mix, so one program owns a block of them for one head of one sequence, walks
over the sequence's tokens and keeps its part of S in registers in fp32. It is held transposed: in
products, columns of S are then rows, which warps share out among them.

**Token by token.** The three lines above, as they stand: for decoding, and for inputs that are not
bf16.

**Chunks.** A step per token is a chain of dependent reductions. Over a chunk of c tokens, with d_i
the sum of decays up to token i and D_ij = exp(d_i - d_j) for j <= i, what token i adds to the state
is k_i u_i^T, where u solves a triangular system:

    (I + A) u = b (v - exp(d) k S)          A_ij = b_i D_ij (k_i.k_j) for j < i
    o = scale (exp(d) q S + (D * q k^T) u)          S <- exp(d_c) S + k^T (exp(d_c - d) u)

Everything is matrix products but the inverse of I + A. It grows from blocks of one row, whose
inverse is 1, to blocks of c rows: with X the inverses of the diagonal blocks of n rows, and M what
of A lies between two neighbours that become one block of 2 n,

    X <- X - X M X

This is block substitution: log2(c) steps, and no power of A is ever formed, whose entries can grow
beyond what fp32 resolves.

**Precision.** Products of bf16 inputs are exact. Where the other factor is fp32 (S, u), it is split
into two bf16 numbers, 16 bits of mantissa, for two products. What is small, c x c and c x columns,
is multiplied in fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import isfinite

import torch
import torch.nn.functional as F

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, same
from mtmd.kernels.graph import Type

TOKENS = 16  # of a chunk: the fewest that a matrix instruction takes
_STEPS = tl.constexpr(4)  # log2 of it
# Largest mean square error against the reference in fp32, relative to the result's: chunks of bf16
# keep 16 bits of mantissa.
NMSE = {torch.float32: 1e-10, torch.float16: 1e-10, torch.bfloat16: 1e-9}


@dataclass(frozen=True)
class Operands:
    """Operands of `linear_attention`: q, k [T, G, K], v [T, H, V], decay, beta [T, H], state [N, K,
    H, V] -> fp32 [T + S K, H, V]
    """

    q: Type
    k: Type
    v: Type
    decay: Type
    beta: Type
    state: Type
    starts: Type
    slots: Type
    _: KW_ONLY
    scale: float
    delta: bool = True


@triton.jit(do_not_specialize=["T"])
def linear_attention_kernel(p, s, T, H, C: tl.constexpr):
    """COLUMNS columns of one head of one sequence; ROWS is K or more. TOKENS: of a chunk, 1 to go
    token by token.
    """
    K: tl.constexpr = C.K
    V: tl.constexpr = C.V
    blocks = tl.cdiv(V, C.COLUMNS)
    c = tl.program_id(0) % blocks * C.COLUMNS + tl.arange(0, C.COLUMNS)
    head = (tl.program_id(0) // blocks % H).to(tl.int64)
    sequence = (tl.program_id(0) // blocks // H).to(tl.int64)
    r = tl.arange(0, C.ROWS)
    inside = (c < V)[:, None] & (r < K)[None, :]
    # The state lies as [K, H, V] and is held as [V, K]: its columns are this program's rows.
    cells = r[None, :] * (H * V) + c[:, None]
    S = tl.load(
        p.state + (tl.load(p.slots + sequence) * K * H + head) * V + cells, mask=inside, other=0
    )

    q = p.q + head // C.GROUP * s.q_head
    k = p.k + head // C.GROUP * s.k_head
    v = p.v + head * s.v_head
    decay = p.decay + head * s.decay_head
    beta = p.beta + head * s.beta_head
    start, stop = tl.load(p.starts + sequence), tl.load(p.starts + sequence + 1)
    if C.TOKENS == 1:
        for t in range(start, stop):
            key = tl.load(k + t * s.k_step + r, mask=r < K, other=0).to(tl.float32)
            query = tl.load(q + t * s.q_step + r, mask=r < K, other=0).to(tl.float32)
            value = tl.load(v + t * s.v_step + c, mask=c < V, other=0).to(tl.float32)
            S *= tl.exp(tl.load(decay + t * s.decay_step))
            if C.DELTA:
                value -= tl.sum(S * key[None, :], 1)
            u = tl.load(beta + t * s.beta_step) * value
            S += u[:, None] * key[None, :]
            out = p.out + (t * H + head) * V + c
            tl.store(out, s.scale * tl.sum(S * query[None, :], 1), mask=c < V)
    else:
        for first in range(start, stop, C.TOKENS):
            rows = (
                q + first * s.q_step,
                k + first * s.k_step,
                v + first * s.v_step,
                decay + first * s.decay_step,
                beta + first * s.beta_step,
                p.out + (first * H + head) * V,
            )
            S = _chunk(S, rows, (stop - first).to(tl.int32), r, c, s, H, C)
    tl.store(p.out + ((T + sequence * K) * H + head) * V + cells, S, mask=inside)


@triton.jit
def _chunk(S, rows, count, r, c, s, H, C: tl.constexpr):
    """S after the first TOKENS tokens, or `count` where there are fewer: the others have no decay,
    no strength and keys of zeros. `rows`: where a head's q, k, v, decay, beta and results begin.
    """
    q, k, v, decay, beta, out = rows
    i = tl.arange(0, C.TOKENS)
    there = i < count
    requested = there[:, None] & (r < C.K)[None, :]
    keys = tl.load(k + i[:, None] * s.k_step + r[None, :], mask=requested, other=0)
    queries = tl.load(q + i[:, None] * s.q_step + r[None, :], mask=requested, other=0)
    g = tl.load(decay + i * s.decay_step, mask=there, other=0)
    b = tl.load(beta + i * s.beta_step, mask=there, other=0)
    d = tl.cumsum(g, 0)
    total = tl.sum(g, 0)

    # Differences above the diagonal are positive, and exp of them may overflow: 0 goes in, 0 comes
    # out.
    past = i[:, None] >= i[None, :]
    near = tl.where(past, tl.exp(tl.where(past, d[:, None] - d[None, :], 0.0)), 0.0)
    if C.DELTA:  # here, where least is held in registers
        before = i[:, None] > i[None, :]
        A = tl.where(before, b[:, None] * near * tl.dot(keys, tl.trans(keys)), 0.0)
    mixed = near * tl.dot(queries, tl.trans(keys))
    if C.DELTA:
        X = _inverse(A, i)

    seen = (c < C.V)[:, None] & there[None, :]
    values = tl.load(v + i[None, :] * s.v_step + c[:, None], mask=seen, other=0).to(tl.float32)
    since = tl.exp(d)[None, :]
    # S in two bf16 numbers, so that both products run on matrix instructions with 16 bits.
    high = S.to(keys.dtype)
    low = (S - high.to(tl.float32)).to(keys.dtype)
    if C.DELTA:
        missing = b[None, :] * (
            values - since * tl.dot(low, tl.trans(keys), tl.dot(high, tl.trans(keys)))
        )
        u = tl.dot(missing, tl.trans(X), input_precision="ieee")
    else:
        u = b[None, :] * values
    o = since * tl.dot(low, tl.trans(queries), tl.dot(high, tl.trans(queries)))
    o = tl.dot(u, tl.trans(mixed), o, input_precision="ieee")
    tl.store(out + i[None, :] * (H * C.V) + c[:, None], s.scale * o, mask=seen)
    u *= tl.exp(total - d)[None, :]
    high = u.to(keys.dtype)
    low = (u - high.to(tl.float32)).to(keys.dtype)
    return tl.dot(low, keys, tl.dot(high, keys, S * tl.exp(total)))


@triton.jit
def _inverse(A, i):
    """(I + A)^-1 for A that is zero on its diagonal and above."""
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for step in tl.static_range(_STEPS):
        n = 1 << step
        M = tl.where(
            (i[:, None] // (2 * n) == i[None, :] // (2 * n)) & (i[:, None] // n > i[None, :] // n),
            A,
            0.0,
        )
        X -= tl.dot(X, tl.dot(M, X, input_precision="ieee"), input_precision="ieee")
    return X


def rejects(o: Operands) -> str | None:
    """None if the kernel computes linear attention on tensors of these types, else why not.
    Sizes of T, S, H and V never matter short of the limits of a grid, which are named.
    """
    for name, type_ in (("q", o.q), ("k", o.k), ("v", o.v)):
        if (
            type_.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or type_.dtype != o.q.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or "
                "fp32, the same "
                "for q, k and v"
            )
        if type_.strides[2] != 1:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel needs stride 1 in the last "
                "dimension"
            )
    size = o.q.shape[2]
    if not 1 <= size <= 256:
        return f"keys have size {size}; the kernel supports 1 to 256"
    if not o.state.is_contiguous:
        return f"the states have strides {list(o.state.strides)}; the kernel needs them contiguous"
    if not isfinite(o.scale):
        return f"scale {o.scale}; the kernel needs a finite number"
    (tokens, heads, value), count = o.v.shape, o.slots.shape[0]
    if count * heads * value >= 2**31 or size * heads * value >= 2**31:
        return (
            f"{count} sequences x {heads} heads x {value} columns; a grid, and a state, count "
            "below 2^31"
        )
    steps = [t.strides[0] for t in (o.q, o.k, o.v)]
    if max(*steps, heads * value) * TOKENS >= 2**31 or tokens >= 2**31:
        return (
            f"{tokens} tokens, {steps[0]}, {steps[1]} and {steps[2]} apart; the kernel "
            "counts below 2^31 in a chunk"
        )
    return None


def plan(o: Operands) -> Plan:
    """Plan for as many tokens as sequences: one of each, which go token by token. Both ways are
    right for any lengths.
    """
    (tokens, groups, size), (heads, value) = o.q.shape, o.v.shape[1:]
    count = o.slots.shape[0]
    chunk = TOKENS if tokens > count and o.q.dtype == torch.bfloat16 else 1
    rows, columns = power_of_two(size), power_of_two(value)
    if chunk == 1:
        # One warp and 2,048 cells of the state (64 registers a thread of 32): its reductions over
        # a token's keys then wait for no other warp.
        columns, warps = min(columns, max(2048 // rows, 1)), 1
    else:
        # The largest that do not spill on cuda:80 and cuda:90.
        rows, columns, warps = max(rows, 16), max(16, min(columns, 32 if rows <= 128 else 16)), 4
    scalars: dict[str, int | float] = {"scale": float(o.scale), "T": tokens, "H": heads}
    for name in ("q", "k", "v", "decay", "beta"):
        step, head = getattr(o, name).strides[:2]
        scalars |= {f"{name}_step": step, f"{name}_head": head}
    constants: dict[str, int | bool | str] = {
        "GROUP": heads // groups,
        "K": size,
        "V": value,
        "ROWS": rows,
        "COLUMNS": columns,
        "TOKENS": chunk,
        "DELTA": o.delta,
    }
    call = Call(scalars, constants, count * heads * -(-value // columns), warps, 1)
    out = Type.contiguous((tokens + count * size, heads, value), torch.float32)
    pointers = same("q k v decay beta state starts slots out")
    tile = "TOKENS", "COLUMNS"
    return Plan(out, [Launch(linear_attention_kernel, call, pointers, tile, head=value)])


@case
def problem(
    rng: torch.Generator,
    lengths: tuple[int, ...],
    key: int = 16,
    value: int = 16,
    heads: int = 2,
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    delta: bool = True,
) -> Problem:
    """The tokens of each sequence, and sizes. `fused`: q, k and v are columns of one buffer. Unused
    slots of the pool hold NaN.
    """
    tokens, count = sum(lengths), len(lengths)
    q, k = (F.normalize(torch.randn(tokens, groups, key, generator=rng), dim=-1) for _ in range(2))
    v = torch.randn(tokens, heads, value, generator=rng)
    if fused:
        rows = torch.cat([x.flatten(1) for x in (q, k, v)], 1).to(dtype)
        sizes = [groups * key, groups * key, heads * value]
        q, k, v = (
            x.unflatten(1, (-1, n))
            for x, n in zip(rows.split(sizes, 1), (key, key, value), strict=True)
        )
    else:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    decay = -torch.rand(tokens, heads, generator=rng).pow(3) * 8
    beta = torch.rand(tokens, heads, generator=rng)
    decay = decay if delta else beta * decay
    slots = torch.randperm(count + 2, generator=rng)[:count]
    state = torch.full((count + 2, key, heads, value), torch.nan)
    state[slots] = torch.randn(count, key, heads, value, generator=rng)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    values = q, k, v, decay, beta, state, starts, slots
    return given(*values, scale=key**-0.5 if delta else 1.0, delta=delta)


CASES = (
    problem((1,)),
    problem((1, 1, 1, 1, 1)),
    problem((1, 1), 24, 40, 6, 2),
    problem((1, 1), 128, 128, 4, 2, torch.bfloat16),
    problem((1,), 3, 5),
    problem((9, 1, 0, 2), 24, 40, 4, 2),
    problem((6,), 64, 256, 2, 2, torch.float16),
    problem((1, 1, 1), 24, 40, 6, 2, torch.bfloat16, True),
    problem((32,), 32, 32, dtype=torch.bfloat16),
    problem((33, 1, 0, 64, 2), 24, 40, 4, 2, torch.bfloat16),
    problem((5,), 256, 24),
    problem((7, 45), 24, 40, 6, 2, torch.bfloat16, True),
    problem((40, 40), 128, 128, 2, 1, torch.bfloat16),
    problem((20,), 256, 24, dtype=torch.bfloat16),
    problem((1, 1, 1), 24, 40, 6, 2, torch.bfloat16, True, delta=False),
    problem((9, 1, 0, 2), 24, 40, 4, 1, delta=False),
    problem((33, 1, 0, 64, 2), 24, 40, 4, 2, torch.bfloat16, True, delta=False),
    problem((40, 40), 128, 64, 3, 1, torch.bfloat16, True, delta=False),
    problem((9, 20), 3, 5, 3, 3, torch.bfloat16),
)

_DECODING, _PREFILL, _BF16 = (1,) * 16, (2048,), torch.bfloat16
USES = {
    f"delta rule, decoding, K = V = {size}, bf16": problem(_DECODING, size, size, 32, 16, _BF16)
    for size in (64, 128, 256)
}
USES |= {
    f"delta rule, prefill, K = V = {size}, bf16": problem(_PREFILL, size, size, 32, 16, _BF16)
    for size in (64, 128, 256)
}
USES["delta rule, prefill, K = V = 128, fp32"] = problem(_PREFILL, 128, 128, 32, 16)
# Heads and groups of Granite 4.0 H Tiny and of Nemotron 3 Nano.
USES |= {
    f"selective scan, {title}, K = 128, V = 64, {groups} group{'s' * (groups > 1)}, bf16": problem(
        lengths, 128, 64, heads, groups, _BF16, True, delta=False
    )
    for title, lengths in (("decoding", _DECODING), ("prefill", _PREFILL))
    for heads, groups in ((48, 1), (64, 8))
}

KERNEL = declared(
    Operands, plan, rejects, what="linear attention", cases=CASES, uses=USES, limits=NMSE
)
