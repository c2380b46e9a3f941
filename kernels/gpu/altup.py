"""Alternating updates of a token's streams (arXiv:2301.13310), for NVIDIA and AMD GPUs: the `altup`
op in one launch, for which torch takes some ten.

    r = tanh(scale rms_norm(read) router^T)          shares = mix r
    streams + shares streams          or, with y, streams + (shares + 1) (y - the active stream)

One program makes a block of columns of all streams of a token. Each asks the router for itself: its
few rows are in the cache, and no program waits for another. Sums are fp32 and the result is rounded
once.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, not_dense
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
MAX_STREAMS = 16  # also rows of the router
FEW = 16  # tokens, whose columns more programs share out
ROUTED = 4096  # products of the router at a time: 32 for each thread


@dataclass(frozen=True)
class Operands:
    """Operands of `altup`: streams [T, N, D], norm [D], router [R, D], mix [N N, R], or [N, R] with
    y [T, D] -> [T, N, D]
    """

    streams: Type
    norm: Type
    router: Type
    mix: Type
    y: Type | None = None
    _: KW_ONLY
    active: int
    eps: float
    scale: float


@triton.jit
def altup_kernel(
    streams, norm, router, mix, y, out, D, R, y_step, eps, scale, active, C: tl.constexpr
):
    """COLUMNS of D columns of the N streams of a token. CORRECT: by y, else each by all streams.
    LANES and ROWS are powers of two that hold N and R.
    """
    N: tl.constexpr = C.N
    blocks = tl.cdiv(D, C.COLUMNS)
    t = (tl.program_id(0) // blocks).to(tl.int64)
    own = streams + t * N * D
    read = own + active * D
    if C.CORRECT:
        read = y + t * y_step

    j = tl.arange(0, C.ROWS)
    squares = tl.zeros([C.WIDE], tl.float32)
    products = tl.zeros([C.ROWS, C.WIDE], tl.float32)
    for start in range(0, D, C.WIDE):
        k = start + tl.arange(0, C.WIDE)
        value = tl.load(read + k, mask=k < D, other=0).to(tl.float32)
        squares += value * value
        value *= tl.load(norm + k, mask=k < D, other=0).to(tl.float32)
        rows = tl.load(
            router + j[:, None] * D + k[None, :], mask=(j < R)[:, None] & (k < D)[None, :], other=0
        )
        products += rows.to(tl.float32) * value[None, :]
    factor = tl.rsqrt(tl.sum(squares, 0) / D + eps) * scale
    routed = tl.sum(products, 1) * factor
    small = tl.exp(-2 * tl.abs(routed))
    routed = tl.where(routed < 0, -1.0, 1.0) * (1 - small) / (1 + small)  # tanh; NaN stays

    m = tl.arange(0, C.LANES)
    c = tl.program_id(0) % blocks * C.COLUMNS + tl.arange(0, C.COLUMNS)
    at = m[:, None] * D + c[None, :]
    there = (m < N)[:, None] & (c < D)[None, :]
    known = (m < N)[:, None] & (j < R)[None, :]
    total = tl.load(own + at, mask=there, other=0).to(tl.float32)
    if C.CORRECT:
        change = tl.load(read + c, mask=c < D, other=0).to(tl.float32)
        change -= tl.load(own + active * D + c, mask=c < D, other=0).to(tl.float32)
        parts = tl.load(mix + m[:, None] * R + j[None, :], mask=known, other=0).to(tl.float32)
        share = 1 + tl.sum(parts * routed[None, :], 1)
        total += share[:, None] * change[None, :]
    else:
        for n in tl.static_range(N):
            one = tl.load(own + n * D + c, mask=c < D, other=0).to(tl.float32)
            row = (m * N + n)[:, None] * R + j[None, :]
            parts = tl.load(mix + row, mask=known, other=0).to(tl.float32)
            total += tl.sum(parts * routed[None, :], 1)[:, None] * one[None, :]
    tl.store(out + t * N * D + at, total.to(out.dtype.element_ty), mask=there)


def rejects(o: Operands) -> str | None:
    """None if the kernel updates streams of these types, else why not."""
    if reason := not_dense(
        {"streams": o.streams, "norm": o.norm, "router": o.router, "mix": o.mix}
    ):
        return reason
    (tokens, count, width), rows = o.streams.shape, o.router.shape[0]
    if o.y is not None and width > 1 and o.y.strides[1] != 1:
        return f"y has strides {list(o.y.strides)}; the kernel needs rows in order"
    if max(count, rows) > MAX_STREAMS:
        return f"{count} streams, {rows} rows of a router; the kernel supports {MAX_STREAMS}"
    if tokens * width >= 2**31 or MAX_STREAMS * width >= 2**31:
        return f"{tokens} tokens of {width} values; a grid has fewer than 2^31 programs"
    return None


def plan(o: Operands) -> Plan:
    (tokens, count, width), rows = o.streams.shape, o.router.shape[0]
    lanes, of_router = power_of_two(count), power_of_two(rows)
    maximum = 256 if tokens <= FEW else ROUTED // lanes
    columns = min(power_of_two(max(width, 1)), maximum)
    scalars: dict[str, int | float] = {
        "D": width,
        "R": rows,
        "y_step": 0 if o.y is None else o.y.strides[0],
        "eps": float(o.eps),
        "scale": float(o.scale),
        "active": o.active,
    }
    constants: dict[str, int | bool | str] = {
        "N": count,
        "CORRECT": o.y is not None,
        "LANES": lanes,
        "ROWS": of_router,
        "WIDE": min(power_of_two(max(width, 1)), ROUTED // of_router),
        "COLUMNS": columns,
    }
    call = Call(scalars, constants, tokens * -(-width // columns), 4, 1)
    out = Type.contiguous(o.streams.shape, o.streams.dtype)
    return Plan(out, [Launch(altup_kernel, call, tile=("WIDE", "COLUMNS"))])


@case
def problem(
    rng: torch.Generator,
    tokens: int,
    width: int,
    count: int = 4,
    dtype: torch.dtype = torch.float32,
    correct: bool = False,
    active: int = 0,
    rows: int | None = None,
) -> Problem:
    """Make a problem of so many tokens of `count` streams. `correct`: there is a y, whose rows lie
    apart; `rows`: of the router, as many as streams if None. Columns that are not y's hold NaN.
    """
    rows = count if rows is None else rows
    streams = torch.randn(tokens, count, width, generator=rng).to(dtype)
    norm = torch.rand(width, generator=rng).add_(0.5)
    router = torch.randn(rows, width, generator=rng).mul_(width**0.5).to(dtype)
    mix = torch.randn(count * (1 if correct else count), rows, generator=rng).to(dtype)
    wide = torch.full((tokens, width + 8), torch.nan)
    wide[:, :width] = torch.randn(tokens, width, generator=rng)
    y = wide.to(dtype)[:, :width]
    return given(
        streams, norm, router, mix, y if correct else None, active=active, eps=1e-6, scale=1 / width
    )


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem(3, 40),
    problem(0, 8),
    problem(1, 1, 2, correct=True),
    problem(5, 129, 3, _B, active=2),
    problem(2, 300, 4, _B, True, 1),
    problem(1, 2048, 4, _B),
    problem(17, 1030, 4, _H, True),
    problem(18, 72, 5, _B, rows=3),
    problem(1, 24, 16, _H, True, 15, 1),
)
USES = {
    "streams predicted, decoding, 4 of 2048 values": problem(1, 2048, 4, _B),
    "streams corrected, decoding, 4 of 2048 values": problem(1, 2048, 4, _B, True),
    "streams predicted, prefill of 512, 4 of 2048 values": problem(512, 2048, 4, _B),
    "streams corrected, prefill of 512, 4 of 2048 values": problem(512, 2048, 4, _B, True),
}

KERNEL = declared(
    Operands, plan, rejects, what="alternating updates", cases=CASES, uses=USES, limits=NMSE
)
