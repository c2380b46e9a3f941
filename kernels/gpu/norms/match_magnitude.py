"""Rows made as large as others, for NVIDIA and AMD GPUs: the `match_magnitude` op in one launch.

    y sqrt(mean(x^2) / max(mean(y^2), floor))

One program makes a row, which is read once and kept in registers. Sums are fp32 and the result is
rounded once.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.norms.residual import WIDEST
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, same
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}


@dataclass(frozen=True)
class Operands:
    """Operands of `match_magnitude`: y [T, N, D], x [T, N, D] or [T, 1, D] -> [T, N, D]"""

    y: Type
    x: Type
    _: KW_ONLY
    floor: float


@triton.jit
def match_magnitude_kernel(p, s, N, D, floor, COLUMNS: tl.constexpr):
    """A row of D values, one of N of a token."""
    row = tl.program_id(0).to(tl.int64)
    t, n = row // N, row % N
    c = tl.arange(0, COLUMNS)
    y = tl.load(p.y + t * s.y_token + n * s.y_row + c, mask=c < D, other=0).to(tl.float32)
    x = tl.load(p.x + t * s.x_token + n * s.x_row + c, mask=c < D, other=0).to(tl.float32)
    size = tl.sum(y * y, 0) / D
    size = tl.where(size < floor, floor, size)  # NaN stays
    y *= tl.sqrt(tl.sum(x * x, 0) / D) * tl.rsqrt(size)
    tl.store(p.out + row * D + c, y.to(p.out.dtype.element_ty), mask=c < D)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    for name, type_ in (("y", o.y), ("x", o.x)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
        if len(type_.shape) != 3 or type_.strides[2] != 1:
            return (
                f"{name} {list(type_.shape)} has strides {list(type_.strides)}; the kernel "
                "supports rows of tokens, stride 1 in the last dimension"
            )
    (tokens, rows, width), floor = o.y.shape, o.floor
    after = [n * step for n, step in zip(o.y.shape, o.y.strides, strict=True)][1:]
    steps = zip(o.y.shape, o.y.strides, after, strict=False)
    if any(size > 1 and step < below for size, step, below in steps):
        return f"y has strides {list(o.y.strides)}; the kernel supports rows one after another"
    if o.x.shape[0] != tokens:
        return f"x is {o.x}, y {o.y}; the kernel needs as many tokens"
    if not floor > 0:
        return f"floor {floor}; the kernel needs a positive number"
    if width > WIDEST or tokens * rows >= 2**31:
        return f"{o.y}; the kernel supports below 2^31 rows of up to {WIDEST} values"
    return None


def plan(o: Operands) -> Plan:
    tokens, rows, width = o.y.shape
    columns = power_of_two(max(width, 1))
    scalars: dict[str, int | float] = {
        "N": rows,
        "D": width,
        "floor": float(o.floor),
        "y_token": o.y.strides[0],
        "y_row": o.y.strides[1],
        "x_token": o.x.strides[0],
        "x_row": o.x.strides[1] if o.x.shape[1] == rows else 0,
    }
    count = tokens * rows if width else 0
    call = Call(scalars, {"COLUMNS": columns}, count, 4 if columns <= 4096 else 8, 1)
    out = Type.contiguous(o.y.shape, o.y.dtype)
    return Plan(out, [Launch(match_magnitude_kernel, call, same("y x out"), ("COLUMNS",))])


@case
def problem(
    rng: torch.Generator,
    tokens: int,
    rows: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    each: bool = False,
    spread: bool = False,
    size: float = 1.0,
) -> Problem:
    """Make a problem of so many rows of each token, of `size` about. `each`: there is a row of x
    for each; `spread`: x is a part of rows of which the others hold NaN.
    """
    y = torch.randn(tokens, rows, width, generator=rng).mul_(size).to(dtype)
    of_x = rows if each else 1
    x = torch.full((tokens, of_x + 2, width), torch.nan)
    x[:, 1 : of_x + 1] = torch.randn(tokens, of_x, width, generator=rng).mul_(3)
    x = x.to(dtype)[:, 1 : of_x + 1]
    return given(y, x if spread else x.contiguous(), floor=1e-5)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem(3, 2, 40),
    problem(0, 3, 8),
    problem(1, 1, 1),
    problem(5, 3, 129, _B, spread=True),
    problem(2, 3, 300, _H, each=True, spread=True),
    problem(1, 3, 2048, _B),
    problem(4, 2, 31, size=1e-4),
)
USES = {"streams as large as another, decoding, 3 of 2048 values": problem(1, 3, 2048, _B)}

KERNEL = declared(
    Operands, plan, rejects, what="rows of a size", cases=CASES, uses=USES, limits=NMSE
)
