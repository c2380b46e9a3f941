"""How much each head of the gated delta rule keeps and writes, for NVIDIA and AMD GPUs: the
`delta_gates` op in one launch.

    decay = a softplus(alpha + dt)          gain = sigmoid(beta)

One program makes a block of both, in fp32. Rows of `alpha` and `beta` may lie apart, as columns of
one product do.
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
from mtmd.kernels.gpu.gated import nan_or, sigmoid
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Type

# Largest mean square error against the reference, relative to the result's: exponentials and
# logarithms are not the reference's to the last bit.
NMSE = {torch.float32: 1e-11, torch.float16: 1e-11, torch.bfloat16: 1e-11}
BLOCK = 256


@triton.jit(do_not_specialize=["T"])
def delta_gates_kernel(alpha, beta, dt, a, out, T, H, alpha_step, beta_step, BLOCK: tl.constexpr):
    """BLOCK of T x H numbers. `out` holds what is kept and then what is written."""
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
    kept = tl.where(small, power, tl.log(one_more) * ratio)
    kept = nan_or(x, tl.where(x > 20, x, kept)) * tl.load(a + h, mask=there, other=0)
    tl.store(out + i, kept, mask=there)
    y = tl.load(beta + t * beta_step + h, mask=there, other=0).to(tl.float32)
    tl.store(out + T.to(tl.int64) * H + i, nan_or(y, sigmoid(y)), mask=there)


def rejects(alpha: Type, beta: Type, dt: Type, a: Type) -> str | None:
    """None if the kernel takes numbers of these types, else why not."""
    for name, type_ in (("alpha", alpha), ("beta", beta)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
        if type_.shape[1] > 1 and type_.strides[1] != 1:
            return f"{name} has strides {list(type_.strides)}; the kernel needs rows in order"
    for name, type_ in (("dt", dt), ("a", a)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    if alpha.count >= 2**38:
        return f"{alpha.shape[0]} tokens of {alpha.shape[1]} heads; the kernel takes fewer"
    return None


def plan_call(alpha: Type, beta: Type, dt: Type, a: Type) -> Call:
    del dt, a
    scalars: dict[str, int | float] = {
        "T": alpha.shape[0],
        "H": alpha.shape[1],
        "alpha_step": alpha.strides[0],
        "beta_step": beta.strides[0],
    }
    return Call(scalars, {"BLOCK": BLOCK}, -(-alpha.count // BLOCK), 4, 1)


def delta_gates(alpha: Tensor, beta: Tensor, dt: Tensor, a: Tensor) -> Tensor:
    """The `delta_gates` op: alpha, beta [T, H], dt, a fp32 [H] -> fp32 [2, T, H]

    Raises PlacementError with what `rejects` says.
    """
    types = tuple(Type.of(t) for t in (alpha, beta, dt, a))
    reason = rejects(*types)
    if reason:
        raise PlacementError(f"gates of the delta rule on the GPU: {reason}")
    out = torch.empty((2, *alpha.shape), dtype=torch.float32, device=alpha.device)
    call = plan_call(*types)
    if call.programs:
        run_call(delta_gates_kernel, call, (alpha, beta, dt, a, out))
    return out


def program(alpha: Type, beta: Type, dt: Type, a: Type) -> Program:
    """What a run on these types launches."""
    out = Type.contiguous((2, *alpha.shape), torch.float32)
    operands = {"alpha": alpha, "beta": beta, "dt": dt, "a": a, "out": out}
    return Program(delta_gates_kernel, plan_call(alpha, beta, dt, a), operands, ("BLOCK",))


@dataclass(frozen=True)
class Case:
    """One problem. `apart`: alpha and beta are columns of one product."""

    tokens: int
    heads: int
    dtype: torch.dtype = torch.float32
    apart: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads} {name_of(self.dtype)}" + " apart" * self.apart

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """From far below zero to far above."""
        rng = torch.Generator().manual_seed(seed)
        both = torch.randn(self.tokens, 2 * self.heads, generator=rng).mul_(12)
        both = both.to(self.dtype).to(device)
        columns = both[:, : self.heads], both[:, self.heads :]
        alpha, beta = columns if self.apart else (t.contiguous() for t in columns)
        dt, a = (torch.randn(self.heads, generator=rng).to(device) for _ in "da")
        return alpha, beta, dt, -a.exp()


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case(3, 32),
    Case(0, 4),
    Case(1, 1, _B),
    Case(17, 31, _B, True),
    Case(1, 32, _H, True),
    Case(9, 30, apart=True),
)
USES = {"gates of the delta rule, prefill of 512, 32 heads": Case(512, 32, _B, True)}

KERNEL = TritonKernel(
    run=delta_gates, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
