"""The largest values of a row, for NVIDIA and AMD GPUs: the `gaussian_topk` op in one launch.

    y = max(x - mean(x) - deviations sqrt(var(x)), 0)

One program makes a row, which is read once and kept in registers; the mean and the squares of what
differs from it are summed one after the other, in fp32. Rows may lie apart, as halves of one
product do.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from math import prod

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import row_step
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.norms.residual import WIDEST
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits; in fp32 what little is left of a difference.
NMSE = {torch.float32: 1e-10, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}


@dataclass(frozen=True)
class Operands:
    """Operands of `gaussian_topk`: x [..., D] -> contiguous"""

    x: Type
    _: KW_ONLY
    deviations: float


@triton.jit
def largest_kernel(x, out, D, x_step, deviations, COLUMNS: tl.constexpr):
    """A row of D values."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    value = tl.load(x + row * x_step + c, mask=c < D, other=0).to(tl.float32)
    value -= tl.sum(value, 0) / D
    centered = tl.where(c < D, value, 0)
    value -= deviations * tl.sqrt(tl.sum(centered * centered, 0) / D)
    value = tl.where(value < 0, 0.0, value)  # NaN stays
    tl.store(out + row * D + c, value.to(out.dtype.element_ty), mask=c < D)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of this type, else why not."""
    x = o.x
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel supports bf16, fp16 or fp32"
    step = row_step(x)
    if x.strides[-1] != 1 or step is None or step < x.shape[-1]:
        return f"x has strides {list(x.strides)}; the kernel supports rows one after another"
    if x.shape[-1] > WIDEST or prod(x.shape[:-1]) >= 2**31:
        return f"{x}; the kernel supports below 2^31 rows of up to {WIDEST} values"
    return None


def plan(o: Operands) -> Plan:
    width, step = o.x.shape[-1], row_step(o.x)
    assert step is not None
    columns = power_of_two(max(width, 1))
    scalars: dict[str, int | float] = {
        "D": width,
        "x_step": step,
        "deviations": float(o.deviations),
    }
    rows = prod(o.x.shape[:-1]) if width else 0
    call = Call(scalars, {"COLUMNS": columns}, rows, 4 if columns <= 4096 else 8, 1)
    out = Type.contiguous(o.x.shape, o.x.dtype)
    return Plan(out, [Launch(largest_kernel, call, tile=("COLUMNS",))])


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    deviations: float = 0.5,
    fused: bool = False,
    mean: float = 0.0,
) -> Problem:
    """`fused`: x is some columns of twice as many, of which the others hold NaN; `mean`: of its
    values, about.
    """
    width = shape[-1]
    both = torch.full((*shape[:-1], 2 * width), torch.nan)
    both[..., :width] = torch.randn(shape, generator=rng) + mean
    x = both.to(dtype)[..., :width]
    return given(x if fused else x.contiguous(), deviations=deviations)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 40)),
    problem((1, 1), _H, -0.5),
    problem((5, 1030), _B, 1.645, True),
    problem((2, 3, 24), _H, -0.5, True),
    problem((17, 129), mean=30.0),
    problem((1, 8192), _B, 1.645, True),
)
USES = {
    "largest values of a gate, decoding, 8192": problem((1, 8192), _B, 1.645, True),
    "largest values of a gate, prefill of 512, 16384": problem((512, 16384), _B, 1.645, True),
}

KERNEL = declared(
    Operands, plan, rejects, what="largest values", cases=CASES, uses=USES, limits=NMSE
)
