"""A residual and the layer norm behind it, for NVIDIA and AMD GPUs: the `add_layer_norm` op in one
launch.

    s = x + y, or x + y scale          result = s, (s - mean(s)) / sqrt(var(s) + eps) w + b

One program makes a block of rows, each read once and kept in registers. A scaled y and s are
rounded to their type before they are read on, as they are where all are ops; the mean and the
squares of what differs from it are summed one after the other, in fp32.
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
    """Operands of `add_layer_norm`: x, y [..., D], w, b, scale [D] -> [2, ..., D]"""

    x: Type
    y: Type
    w: Type
    b: Type | None = None
    scale: Type | None = None
    _: KW_ONLY
    eps: float


@triton.jit(do_not_specialize=["N"])
def add_layer_norm_kernel(p, N, D, eps, C: tl.constexpr):
    """ROWS of N rows of D values. `out` holds N sums and then N norms."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    c = tl.arange(0, C.COLUMNS)
    at = row[:, None] * D + c[None, :]
    there = (row < N)[:, None] & (c < D)[None, :]
    added = tl.load(p.y + at, mask=there, other=0).to(tl.float32)
    if C.SCALE:
        added *= tl.load(p.scale + c, mask=c < D, other=0).to(tl.float32)[None, :]
        added = added.to(p.x.dtype.element_ty).to(tl.float32)
    total = tl.load(p.x + at, mask=there, other=0).to(tl.float32) + added
    total = total.to(p.x.dtype.element_ty)
    tl.store(p.out + at, total, mask=there)
    values = total.to(tl.float32)
    values -= (tl.sum(values, 1) / D)[:, None]
    values = tl.where(there, values, 0)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    values *= tl.load(p.w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    if C.BIAS:
        values += tl.load(p.b + c, mask=c < D, other=0).to(tl.float32)[None, :]
    after = N.to(tl.int64) * D
    tl.store(p.out + after + at, values.to(p.x.dtype.element_ty), mask=there)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    return rejects_rows(o.x, {"x": o.x, "y": o.y, "w": o.w, "b": o.b, "the scale": o.scale})


def plan(o: Operands) -> Plan:
    flags = {"BIAS": o.b is not None, "SCALE": o.scale is not None}
    return plan_rows(add_layer_norm_kernel, o.x, "x y w b scale out", {"eps": o.eps}, flags)


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    mean: float = 0.0,
    scaled: bool = False,
) -> Problem:
    """The shape of x and y. `mean`: of the sums' values, about; `scaled`: y is."""
    x, y = (torch.randn(shape, generator=rng).to(dtype) for _ in "xy")
    w, b, scale = (torch.rand(shape[-1], generator=rng).add_(0.5).to(dtype) for _ in "wbs")
    x += mean
    return given(x, y, w, b if bias else None, scale if scaled else None, eps=1e-5)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 40)),
    problem((0, 8)),
    problem((1, 1), bias=False),
    problem((5, 129), _B),
    problem((2, 3, 300), _H, bias=False),
    problem((1, 1152), _B, mean=8.0),
    problem((17, 64), _B),
    problem((2, 5000), mean=30.0),
    problem((3, 131), scaled=True),
    problem((2, 2, 1030), _H, False, scaled=True),
    problem((1, 1024), _B, scaled=True),
)
USES = {
    "residual and layer norm, 4096 patches of 1152 values": problem((1, 4096, 1152), _B),
    "residual and layer norm, 1025 patches of 1024 values, scaled": problem(
        (1, 1025, 1024), _B, scaled=True
    ),
    "residual and layer norm, 3200 values": problem((1, 1025, 3200), _B),
    "residual and layer norm, decoding, 8192 values, no bias": problem((1, 8192), _B, bias=False),
}

KERNEL = declared(
    Operands, plan, rejects, what="residual and layer norm", cases=CASES, uses=USES, limits=NMSE
)
