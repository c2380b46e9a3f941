"""A residual beside one of low rank and the norm behind both (arXiv:2411.07501), for NVIDIA and AMD
GPUs: the `laurel` op in one launch.

    s = factor (x + rms_norm(y) y_norm + u + rms_norm(v) v_norm)          result = s, rms_norm(s) w

One program makes a block of rows, each read once and kept in registers. s is rounded to its type
before its own norm is taken; sums are fp32. Rows of x may lie apart, as those of a stream do.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import row_step
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.norms.residual import NMSE, plan_rows, rejects_rows
from mtmd.kernels.gpu.triton_kernel import Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class Operands:
    """Operands of `laurel`: x, y, u, v [..., D], y_norm, v_norm, w [D] -> [2, ..., D]"""

    x: Type
    y: Type
    y_norm: Type
    u: Type
    v: Type
    v_norm: Type
    w: Type
    _: KW_ONLY
    eps: float
    factor: float


@triton.jit(do_not_specialize=["N"])
def laurel_kernel(p, N, D, x_step, eps, factor, C: tl.constexpr):
    """ROWS of N rows of D values. `out` holds N sums and then N norms."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    c = tl.arange(0, C.COLUMNS)
    at = row[:, None] * D + c[None, :]
    there = (row < N)[:, None] & (c < D)[None, :]
    total = tl.load(p.x + (row * x_step)[:, None] + c[None, :], mask=there, other=0).to(tl.float32)
    total += _normed(p.y, p.y_norm, at, c, there, D, eps)
    total += tl.load(p.u + at, mask=there, other=0).to(tl.float32)
    total += _normed(p.v, p.v_norm, at, c, there, D, eps)
    total = (total * factor).to(p.x.dtype.element_ty)
    tl.store(p.out + at, total, mask=there)
    values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    values *= tl.load(p.w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    after = N.to(tl.int64) * D
    tl.store(p.out + after + at, values.to(p.x.dtype.element_ty), mask=there)


@triton.jit
def _normed(x, norm, at, c, there, D, eps):
    """Rows of x, fp32, normalised, times the weights `norm`."""
    values = tl.load(x + at, mask=there, other=0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    return values * tl.load(norm + c, mask=c < D, other=0).to(tl.float32)[None, :]


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    named = {"y": o.y, "y's norm": o.y_norm, "u": o.u, "v": o.v, "v's norm": o.v_norm, "w": o.w}
    if reason := rejects_rows(o.y, named):
        return reason
    if o.x.dtype != o.y.dtype:
        return f"x is {name_of(o.x.dtype)}, y {name_of(o.y.dtype)}; the kernel needs both alike"
    step = row_step(o.x)
    if o.x.strides[-1] != 1 or step is None or step < o.x.shape[-1]:
        return f"x has strides {list(o.x.strides)}; the kernel supports rows one after another"
    return None


def plan(o: Operands) -> Plan:
    scalars = {"x_step": row_step(o.x) or 0, "eps": float(o.eps), "factor": float(o.factor)}
    names = "x y y_norm u v v_norm w out"
    return plan_rows(laurel_kernel, o.y, names, scalars, {})


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    stream: bool = False,
    weight: torch.dtype = torch.float32,
) -> Problem:
    """`stream`: x is one of three that lie side by side, of which the others hold NaN."""
    width = shape[-1]
    x, y, u, v = (torch.randn(shape, generator=rng).to(dtype) for _ in "xyuv")
    if stream:
        every = torch.full((*shape[:-1], 3 * width), torch.nan, dtype=dtype)
        every[..., width : 2 * width] = x
        x = every[..., width : 2 * width]
    norms = [torch.rand(width, generator=rng).add_(0.5).to(weight) for _ in "yvw"]
    return given(x, y, norms[0], u, v, *norms[1:], eps=1e-6, factor=2.0**-0.5)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 40)),
    problem((0, 8)),
    problem((1, 1)),
    problem((5, 129), _B, True),
    problem((2, 3, 300), _H, weight=_H),
    problem((1, 2048), _B, True),
    problem((17, 64), _B),
    problem((2, 5000), stream=True),
)
USES = {
    "residual of low rank and norm, decoding, 2048 values": problem((1, 2048), _B, True),
    "residual of low rank and norm, prefill of 512, 2048 values": problem((512, 2048), _B, True),
}

KERNEL = declared(
    Operands,
    plan,
    rejects,
    what="residual of low rank and norm",
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
