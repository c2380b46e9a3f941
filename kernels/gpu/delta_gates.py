"""Describes how much each head of linear attention keeps and writes, for NVIDIA and AMD GPUs: the
`delta_gates` op in one launch.

    decay = a softplus(alpha + dt)          gain = sigmoid(beta), or softplus(alpha + dt)

The first gain is the gated delta rule's, the second the step of Mamba-2. One program makes a block
of both, in fp32. Rows of `alpha` and `beta` may lie apart, as columns of one product do.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import nan_or, sigmoid
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type

# Largest mean square error against the reference, relative to the result's: exponentials and
# logarithms are not the reference's to the last bit.
NMSE = {torch.float32: 1e-11, torch.float16: 1e-11, torch.bfloat16: 1e-11}
BLOCK = 256


@dataclass(frozen=True)
class Operands:
    """Operands of `delta_gates`: alpha, beta [T, H], dt, a fp32 [H] -> fp32 [2, T, H]"""

    alpha: Type
    dt: Type
    a: Type
    beta: Type | None = None


@triton.jit(do_not_specialize=["T"])
def delta_gates_kernel(
    alpha, dt, a, beta, out, T, H, alpha_step, beta_step, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK of T x H numbers. `out` holds what is kept and then what is written. SIGMOID: there is
    a beta.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < T.to(tl.int64) * H
    t, h = i // H, i % H
    x = tl.load(alpha + t * alpha_step + h, mask=there, other=0).to(tl.float32)
    x += tl.load(dt + h, mask=there, other=0)
    # log(1 + e^x), of which little is lost where e^x is next to nothing, and which is x above 20
    power = tl.exp(tl.minimum(x, 20.0))
    one_more = 1 + power
    small = one_more == 1
    ratio = power / tl.where(small, 1.0, one_more - 1)
    saved = tl.where(small, power, tl.log(one_more) * ratio)
    step = nan_or(x, tl.where(x > 20, x, saved))
    tl.store(out + i, step * tl.load(a + h, mask=there, other=0), mask=there)
    if SIGMOID:
        y = tl.load(beta + t * beta_step + h, mask=there, other=0).to(tl.float32)
        step = nan_or(y, sigmoid(y))
    tl.store(out + T.to(tl.int64) * H + i, step, mask=there)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports numbers of these types, else why not."""
    for name, type_ in (("alpha", o.alpha), ("beta", o.beta or o.alpha)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
        if type_.shape[1] > 1 and type_.strides[1] != 1:
            return f"{name} has strides {list(type_.strides)}; the kernel needs rows in order"
    for name, type_ in (("dt", o.dt), ("a", o.a)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    if o.alpha.count >= 2**38:
        return f"{o.alpha.shape[0]} tokens of {o.alpha.shape[1]} heads; the kernel supports fewer"
    return None


def plan(o: Operands) -> Plan:
    tokens, heads = o.alpha.shape
    steps = {"alpha_step": o.alpha.strides[0], "beta_step": (o.beta or o.alpha).strides[0]}
    scalars: dict[str, int | float] = {"T": tokens, "H": heads, **steps}
    constants: dict[str, int | bool | str] = {"SIGMOID": o.beta is not None, "BLOCK": BLOCK}
    call = Call(scalars, constants, -(-o.alpha.count // BLOCK), 4, 1)
    out = Type.contiguous((2, tokens, heads), torch.float32)
    return Plan(out, [Launch(delta_gates_kernel, call, tile=("BLOCK",))])


@case
def problem(
    rng: torch.Generator,
    tokens: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
    columns: bool = False,
    sigmoid: bool = True,
) -> Problem:
    """Make a problem with values from far below zero to far above. `columns`: alpha and beta are
    columns of one product; `sigmoid`: there is a beta.
    """
    both = torch.randn(tokens, 2 * heads, generator=rng).mul_(12).to(dtype)
    alpha, beta = both[:, :heads], both[:, heads:]
    if not columns:
        alpha, beta = alpha.contiguous(), beta.contiguous()
    dt, a = (torch.randn(heads, generator=rng) for _ in "da")
    return given(alpha, dt, -a.exp(), beta if sigmoid else None)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem(3, 32),
    problem(0, 4),
    problem(1, 1, _B),
    problem(17, 31, _B, True),
    problem(1, 32, _H, True),
    problem(5, 80, _B, True, sigmoid=False),
    problem(9, 30, columns=True),
)
USES = {
    "gates of the delta rule, prefill of 512, 32 heads": problem(512, 32, _B, True),
    "steps of Mamba-2, prefill of 512, 128 heads": problem(512, 128, _B, True, False),
}

KERNEL = declared(
    Operands, plan, rejects, what="gates of heads", cases=CASES, uses=USES, limits=NMSE
)
