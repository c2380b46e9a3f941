"""A residual and the norm behind it, for NVIDIA and AMD GPUs: the `add_norm` op in one launch.

    s = x + y, or x + rms_norm(y) w_y          result = s, rms_norm(s) w

One program makes a block of rows, each read once and kept in registers. s is rounded to its type
before its own norm is taken, as it is where both are ops; sums are fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.norms.residual import NMSE, plan_rows, rejects_rows
from mtmd.kernels.gpu.triton_kernel import Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class Operands:
    """Operands of `add_norm`: x, y [..., D], w, y_norm [D] -> [2, ..., D]"""

    x: Type
    y: Type
    w: Type
    y_norm: Type | None = None
    _: KW_ONLY
    eps: float
    y_eps: float | None = None


@triton.jit(do_not_specialize=["N"])
def add_norm_kernel(p, N, D, eps, y_eps, C: tl.constexpr):
    """ROWS of N rows of D values. `out` holds N sums and then N norms."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    c = tl.arange(0, C.COLUMNS)
    at = row[:, None] * D + c[None, :]
    there = (row < N)[:, None] & (c < D)[None, :]
    added = tl.load(p.y + at, mask=there, other=0).to(tl.float32)
    if C.Y_NORM:
        added *= tl.rsqrt(tl.sum(added * added, 1) / D + y_eps)[:, None]
        added *= tl.load(p.y_norm + c, mask=c < D, other=0).to(tl.float32)[None, :]
        added = added.to(p.x.dtype.element_ty).to(tl.float32)
    total = tl.load(p.x + at, mask=there, other=0).to(tl.float32) + added
    total = total.to(p.x.dtype.element_ty)
    tl.store(p.out + at, total, mask=there)
    values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    values *= tl.load(p.w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    after = N.to(tl.int64) * D
    tl.store(p.out + after + at, values.to(p.x.dtype.element_ty), mask=there)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    return rejects_rows(o.x, {"x": o.x, "y": o.y, "w": o.w, "y's norm": o.y_norm})


def plan(o: Operands) -> Plan:
    scalars = {"eps": float(o.eps), "y_eps": float(o.y_eps or 0)}
    flags = {"Y_NORM": o.y_norm is not None}
    return plan_rows(add_norm_kernel, o.x, "x y w y_norm out", scalars, flags)


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    normed: bool = False,
    weight: torch.dtype = torch.float32,
) -> Problem:
    """The shape of x and y. `normed`: y is, too."""
    x, y = (torch.randn(shape, generator=rng).to(dtype) for _ in "xy")
    w, other = (torch.rand(shape[-1], generator=rng).add_(0.5).to(weight) for _ in "wy")
    return given(x, y, w, other if normed else None, eps=1e-6, y_eps=1e-5 if normed else None)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 40)),
    problem((0, 8)),
    problem((1, 1)),
    problem((5, 129), _B, True),
    problem((2, 3, 300), _H, weight=_H),
    problem((1, 2560), _B, True),
    problem((17, 64), _B),
    problem((2, 5000), torch.float32, True),
)
USES = {
    "residual and norm, decoding, 2560 values, both normed": problem((1, 2560), _B, True),
    "residual and norm, 16 rows of 4096": problem((16, 4096), _B),
    "residual and norm, prefill of 512, 4096 values": problem((512, 4096), _B),
    "residual and norm, prefill of 512, 8192 values, both normed": problem((512, 8192), _B, True),
}

KERNEL = declared(
    Operands, plan, rejects, what="residual and norm", cases=CASES, uses=USES, limits=NMSE
)
