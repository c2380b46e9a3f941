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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-10 / 3, torch.float16: 2.0**-22 / 3, torch.bfloat16: 2.0**-16 / 3}


@triton.jit(do_not_specialize=["T", "S"])
def short_conv_kernel(
    x,
    w,
    state,
    starts,
    slots,
    bias,
    out,
    T,
    S,
    C,
    x_step,
    x_channel,
    w_channel,
    w_tap,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SEARCH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """ROWS rows by CHANNELS channels of the result, either of outputs or of states. SEARCH: steps
    that find one of S sequences.
    """
    blocks = tl.cdiv(C, CHANNELS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    block = (tl.program_id(0) // blocks).to(tl.int64)
    # Blocks of outputs first, then blocks of states: one launch writes both, and no program has
    # rows of both kinds.
    outputs = tl.cdiv(T, ROWS)
    if block < outputs:
        t = block * ROWS + tl.arange(0, ROWS)
        sequence = _sequence_of(t, starts, S, SEARCH)
        start = tl.load(starts + sequence)
        slot = tl.load(slots + sequence)
        y = tl.zeros([ROWS, CHANNELS], tl.float32)
        for j in tl.static_range(W):
            tap = tl.load(w + c * w_channel + j * w_tap, mask=c < C, other=0).to(tl.float32)
            y += tap[None, :] * _inputs(
                x, state, t - (W - 1) + j, t < T, start, slot, c, C, x_step, x_channel, W
            ).to(tl.float32)
        if BIAS:
            y += tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
        if SILU:
            y *= tl.sigmoid(y)
        tl.store(
            out + t[:, None] * C + c[None, :],
            y.to(out.dtype.element_ty),
            mask=(t < T)[:, None] & (c < C)[None, :],
        )
    else:
        row = (block - outputs) * ROWS + tl.arange(0, ROWS)
        there = row < S * (W - 1)
        sequence = tl.minimum(row // (W - 1), S - 1)
        t = tl.load(starts + sequence + 1) - (W - 1) + row % (W - 1)
        kept = _inputs(
            x,
            state,
            t,
            there,
            tl.load(starts + sequence),
            tl.load(slots + sequence),
            c,
            C,
            x_step,
            x_channel,
            W,
        )
        tl.store(
            out + (T + row)[:, None] * C + c[None, :],
            kept.to(out.dtype.element_ty),
            mask=there[:, None] & (c < C)[None, :],
        )


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
def _inputs(x, state, t, wanted, start, slot, c, C, x_step, x_channel, W: tl.constexpr):
    """The inputs of tokens t of sequences that start at `start`: from x, or from the state where t
    lies before.
    """
    inside = (c < C)[None, :]
    # Both places are loaded under masks that exclude each other: a row's inputs may lie partly in
    # the state and partly in x.
    own = t >= start
    here = tl.load(
        x + t[:, None] * x_step + c[None, :] * x_channel,
        mask=(wanted & own)[:, None] & inside,
        other=0,
    )
    earlier = (slot * (W - 1) + (t - start + (W - 1)))[:, None] * C + c[None, :]
    before = tl.load(state + earlier, mask=(wanted & (t < start))[:, None] & inside, other=0)
    return tl.where(own[:, None], here.to(tl.float32), before.to(tl.float32))


def rejects(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,
    slots: Type,
    bias: Type | None = None,
    *,
    activation: str,
) -> str | None:
    """None if the kernel convolves tensors of these types, else why not. Sizes of T, S and C never
    matter short of the limits of a grid, which are named.
    """
    del starts, activation
    for name, type_ in (("x", x), ("w", w), ("the state", state), ("bias", bias)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
    for name, type_ in (("the state", state), ("bias", bias)):
        if type_ is not None and not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    if not 2 <= w.shape[1] <= 8:
        return f"a convolution over {w.shape[1]} tokens; the kernel takes 2 to 8"
    if (x.shape[0] + slots.shape[0] * w.shape[1]) * x.shape[1] >= 2**40 or x.shape[0] >= 2**30:
        return (
            f"{x.shape[0]} tokens of {slots.shape[0]} sequences x {x.shape[1]} channels; the "
            "kernel takes below 2^30 and 2^40 values"
        )
    return None


def plan_call(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,
    slots: Type,
    bias: Type | None = None,
    *,
    activation: str,
) -> Call:
    del state, starts
    (tokens, channels), width, count = x.shape, w.shape[1], slots.shape[0]
    # Few different numbers of rows and of search steps, as each is compiled for itself: 4 rows when
    # decoding, and steps rounded up to multiples of 4.
    rows, search = 4 if tokens <= 16 else 16, -(-max(count - 1, 0).bit_length() // 4) * 4
    block = min(256, max(16, power_of_two(channels)))
    scalars: dict[str, int | float] = {
        "T": tokens,
        "S": count,
        "C": channels,
        "x_step": x.strides[0],
        "x_channel": x.strides[1],
        "w_channel": w.strides[0],
        "w_tap": w.strides[1],
    }
    constants: dict[str, int | bool | str] = {
        "W": width,
        "BIAS": bias is not None,
        "SILU": activation == "silu",
        "SEARCH": search,
        "ROWS": rows,
        "CHANNELS": block,
    }
    programs = (-(-tokens // rows) + -(-count * (width - 1) // rows)) * -(-channels // block)
    return Call(scalars, constants, programs, 4, 1)


def short_conv(
    x: Tensor,
    w: Tensor,
    state: Tensor,
    starts: Tensor,
    slots: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """The `short_conv` op: x [T, C], w [C, W], state [N, W - 1, C] -> [T + S (W - 1), C] in x's
    type

    Raises PlacementError with what `rejects` says.
    """
    types = [None if t is None else Type.of(t) for t in (x, w, state, starts, slots, bias)]
    reason = rejects(*types, activation=activation)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"short convolution on the GPU: {reason}")
    out = torch.empty(
        (x.shape[0] + slots.shape[0] * (w.shape[1] - 1), x.shape[1]), dtype=x.dtype, device=x.device
    )
    call = plan_call(*types, activation=activation)  # type: ignore[arg-type]
    if call.programs:
        run_call(
            short_conv_kernel, call, (x, w, state, starts, slots, x if bias is None else bias, out)
        )
    return out


def program(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,
    slots: Type,
    bias: Type | None = None,
    *,
    activation: str,
) -> Program:
    """What a run on these types launches."""
    call = plan_call(x, w, state, starts, slots, bias, activation=activation)
    operands = {"x": x, "w": w, "state": state, "starts": starts, "slots": slots}
    return Program(
        short_conv_kernel,
        call,
        operands | {"bias": bias or x, "out": fresh(x)},
        ("ROWS", "CHANNELS"),
    )


@dataclass(frozen=True)
class Case:
    """One problem: the tokens of each sequence, and sizes. `columns`: x is some columns of a wider
    buffer.
    """

    lengths: tuple[int, ...]
    channels: int = 40
    width: int = 3
    dtype: torch.dtype = torch.float32
    activation: str = "none"
    bias: bool = False
    columns: bool = False

    def __str__(self) -> str:
        text = (
            f"C{self.channels} W{self.width} {name_of(self.dtype)} {self.activation} "
            f"T{'+'.join(map(str, self.lengths))}"
        )
        return text + " bias" * self.bias + " columns" * self.columns

    @property
    def options(self) -> dict[str, Any]:
        return {"activation": self.activation}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """x, w, state, starts, slots, bias; unused slots of the pool, and columns that are not x's,
        hold NaN.
        """
        rng, tokens, count = (
            torch.Generator().manual_seed(seed),
            sum(self.lengths),
            len(self.lengths),
        )
        x = torch.full((tokens, self.channels + 8 * self.columns), torch.nan)
        x[:, : self.channels] = torch.randn(tokens, self.channels, generator=rng)
        w = torch.randn(self.channels, self.width, generator=rng)
        slots = torch.randperm(count + 2, generator=rng)[:count]
        state = torch.full((count + 2, self.width - 1, self.channels), torch.nan)
        state[slots] = torch.randn(count, self.width - 1, self.channels, generator=rng)
        bias = (
            torch.randn(self.channels, generator=rng).to(self.dtype).to(device)
            if self.bias
            else None
        )
        x, w, state = (t.to(self.dtype).to(device) for t in (x, w, state))
        return (
            x[:, : self.channels],
            w,
            state,
            torch.tensor([0, *self.lengths]).cumsum(0).to(device),
            slots.to(device),
            bias,
        )


CASES = (
    Case((1,)),
    Case((1, 1, 1, 1, 1), 130, 4, activation="silu"),
    Case((37,), 300, 4, torch.bfloat16, "silu"),
    Case((2, 1, 3, 1), 24, 4),
    Case((0, 5, 0, 0, 17, 1, 0), 33, 3, torch.bfloat16, bias=True),
    Case((20, 1, 33), 40, 2, torch.float16, "silu", True),
    Case((3, 30), 64, 3, columns=True),
    Case((1,) * 17, 16, 3, torch.bfloat16, columns=True),
    Case((16, 16), 1, 4, bias=True),
)

USES = {
    "short convolution, decoding": Case((1,) * 16, 8192, 4, torch.bfloat16, "silu"),
    "short convolution, prefill": Case((1024, 512, 512), 8192, 4, torch.bfloat16, "silu"),
}

KERNEL = TritonKernel(
    run=short_conv, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
