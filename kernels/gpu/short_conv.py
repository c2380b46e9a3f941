"""Short causal depthwise convolution, forward, for NVIDIA and AMD GPUs: the `short_conv` op over
several sequences in one launch.

    y[t, c] = act(sum_j w[c, j] x[t - W + 1 + j, c] + bias[c])

The sum is over a sequence's own tokens: what lies before its first token comes from its state, the
W - 1 inputs before that one. After the outputs, the result holds each sequence's last W - 1 inputs,
which are found in the same places.

One program makes a block of rows of the result by a block of channels. A row finds its sequence by
a binary search in `starts`, so that nothing has to be known on the host; neighbouring rows read the
same inputs, which the cache holds. Sums are fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, same
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-10 / 3, torch.float16: 2.0**-22 / 3, torch.bfloat16: 2.0**-16 / 3}


@dataclass(frozen=True)
class Operands:
    """Operands of `short_conv`: x [T, C], w [C, W], state [N, W - 1, C] -> [T + S (W - 1), C] in
    x's type
    """

    x: Type
    w: Type
    state: Type
    starts: Type
    slots: Type
    bias: Type | None = None
    _: KW_ONLY
    activation: str


@triton.jit(do_not_specialize=["T", "S"])
def short_conv_kernel(p, s, T, S, C: tl.constexpr):
    """ROWS rows by BLOCK channels of the result, either of outputs or of states. SEARCH: steps that
    find one of S sequences.
    """
    W: tl.constexpr = C.W
    blocks = tl.cdiv(s.channels, C.BLOCK)
    c = tl.program_id(0) % blocks * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = c < s.channels
    block = (tl.program_id(0) // blocks).to(tl.int64)
    # Blocks of outputs first, then blocks of states: one launch writes both, and no program has
    # rows of both kinds.
    outputs = tl.cdiv(T, C.ROWS)
    if block < outputs:
        t = block * C.ROWS + tl.arange(0, C.ROWS)
        sequence = _sequence_of(t, p.starts, S, C.SEARCH)
        start = tl.load(p.starts + sequence)
        slot = tl.load(p.slots + sequence)
        y = tl.zeros([C.ROWS, C.BLOCK], tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(p.w + c * s.w_channel + j * s.w_tap, mask=inside, other=0).to(tl.float32)
            y += tap[None, :] * _inputs(p, s, t - (W - 1) + j, t < T, start, slot, c, W).to(
                tl.float32
            )
        if C.BIAS:
            y += tl.load(p.bias + c, mask=inside, other=0).to(tl.float32)[None, :]
        if C.SILU:
            y *= tl.sigmoid(y)
        to = p.out + t[:, None] * s.channels + c[None, :]
        tl.store(to, y.to(p.out.dtype.element_ty), mask=(t < T)[:, None] & inside[None, :])
    else:
        row = (block - outputs) * C.ROWS + tl.arange(0, C.ROWS)
        there = row < S * (W - 1)
        sequence = tl.minimum(row // (W - 1), S - 1)
        t = tl.load(p.starts + sequence + 1) - (W - 1) + row % (W - 1)
        start, slot = tl.load(p.starts + sequence), tl.load(p.slots + sequence)
        last = _inputs(p, s, t, there, start, slot, c, W)
        to = p.out + (T + row)[:, None] * s.channels + c[None, :]
        tl.store(to, last.to(p.out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def _sequence_of(t, starts, S, SEARCH: tl.constexpr):
    """The last sequence that starts at t or before: those without tokens start where the next one
    does.
    """
    result = t * 0
    for step in tl.static_range(SEARCH):
        further = result + (1 << (SEARCH - 1 - step))
        inside = further < S
        begin = tl.load(starts + further, mask=inside, other=0)
        result = tl.where(inside & (begin <= t), further, result)
    return result


@triton.jit
def _inputs(p, s, t, requested, start, slot, c, W: tl.constexpr):
    """The inputs of tokens t of sequences that start at `start`: from x, or from the state where t
    lies before.
    """
    inside = (c < s.channels)[None, :]
    # Both places are loaded under masks that exclude each other: a row's inputs may lie partly in
    # the state and partly in x.
    own = t >= start
    at = p.x + t[:, None] * s.x_step + c[None, :] * s.x_channel
    here = tl.load(at, mask=(requested & own)[:, None] & inside, other=0)
    earlier = (slot * (W - 1) + (t - start + (W - 1)))[:, None] * s.channels + c[None, :]
    before = tl.load(p.state + earlier, mask=(requested & (t < start))[:, None] & inside, other=0)
    return tl.where(own[:, None], here.to(tl.float32), before.to(tl.float32))


def rejects(o: Operands) -> str | None:
    """None if the kernel convolves tensors of these types, else why not. Sizes of T, S and C never
    matter short of the limits of a grid, which are named.
    """
    for name, type_ in (("x", o.x), ("w", o.w), ("the state", o.state), ("bias", o.bias)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    for name, type_ in (("the state", o.state), ("bias", o.bias)):
        if type_ is not None and not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    (tokens, channels), taps, count = o.x.shape, o.w.shape[1], o.slots.shape[0]
    if not 2 <= taps <= 8:
        return f"a convolution over {taps} tokens; the kernel supports 2 to 8"
    if (tokens + count * taps) * channels >= 2**40 or tokens >= 2**30:
        return (
            f"{tokens} tokens of {count} sequences x {channels} channels; the kernel "
            "supports below "
            "2^30 and 2^40 values"
        )
    return None


def plan(o: Operands) -> Plan:
    (tokens, channels), width, count = o.x.shape, o.w.shape[1], o.slots.shape[0]
    # Few different numbers of rows and of search steps, as each is compiled for itself: 4 rows when
    # decoding, and steps rounded up to multiples of 4.
    rows, search = 4 if tokens <= 16 else 16, -(-max(count - 1, 0).bit_length() // 4) * 4
    block = min(256, max(16, power_of_two(channels)))
    call = Call(
        {
            "T": tokens,
            "S": count,
            "channels": channels,
            "x_step": o.x.strides[0],
            "x_channel": o.x.strides[1],
            "w_channel": o.w.strides[0],
            "w_tap": o.w.strides[1],
        },
        {
            "W": width,
            "BIAS": o.bias is not None,
            "SILU": o.activation == "silu",
            "SEARCH": search,
            "ROWS": rows,
            "BLOCK": block,
        },
        (-(-tokens // rows) + -(-count * (width - 1) // rows)) * -(-channels // block),
        4,
        1,
    )
    out = Type.contiguous((tokens + count * (width - 1), channels), o.x.dtype)
    pointers = same("x w state starts slots bias out")
    return Plan(out, [Launch(short_conv_kernel, call, pointers, ("ROWS", "BLOCK"))])


@case
def problem(
    rng: torch.Generator,
    lengths: tuple[int, ...],
    channels: int = 40,
    width: int = 3,
    dtype: torch.dtype = torch.float32,
    activation: str = "none",
    bias: bool = False,
    columns: bool = False,
) -> Problem:
    """The tokens of each sequence, and sizes. `columns`: x is some columns of a wider buffer.
    Unused slots of the pool, and columns that are not x's, hold NaN.
    """
    tokens, count = sum(lengths), len(lengths)
    x = torch.full((tokens, channels + 8 * columns), torch.nan)
    x[:, :channels] = torch.randn(tokens, channels, generator=rng)
    w = torch.randn(channels, width, generator=rng)
    slots = torch.randperm(count + 2, generator=rng)[:count]
    state = torch.full((count + 2, width - 1, channels), torch.nan)
    state[slots] = torch.randn(count, width - 1, channels, generator=rng)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    added = torch.randn(channels, generator=rng).to(dtype) if bias else None
    x, w, state = (t.to(dtype) for t in (x, w, state))
    return given(x[:, :channels], w, state, starts, slots, added, activation=activation)


CASES = (
    problem((1,)),
    problem((1, 1, 1, 1, 1), 130, 4, activation="silu"),
    problem((37,), 300, 4, torch.bfloat16, "silu"),
    problem((2, 1, 3, 1), 24, 4),
    problem((0, 5, 0, 0, 17, 1, 0), 33, 3, torch.bfloat16, bias=True),
    problem((20, 1, 33), 40, 2, torch.float16, "silu", True),
    problem((3, 30), 64, 3, columns=True),
    problem((1,) * 17, 16, 3, torch.bfloat16, columns=True),
    problem((16, 16), 1, 4, bias=True),
)

USES = {
    "short convolution, decoding": problem((1,) * 16, 8192, 4, torch.bfloat16, "silu"),
    "short convolution, prefill": problem((1024, 512, 512), 8192, 4, torch.bfloat16, "silu"),
}

KERNEL = declared(
    Operands, plan, rejects, what="short convolution", cases=CASES, uses=USES, limits=NMSE
)
