"""Normalisation by the root mean square of the last dimension, for NVIDIA and AMD GPUs: the
`rms_norm` op in one launch, and `l2_norm`, by the sum of squares.

    y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]^2) + eps) * w[c]
    y[r, c] = x[r, c] / sqrt(sum_c(x[r, c]^2) + eps)

One program makes a block of rows. A row of up to WIDEST values is read once and stays in registers;
a wider one is read twice, block by block, the second time out of the cache where it fits. Squares
are summed in fp32 and the result is rounded once.

Rows may lie in memory in any order and so may the columns: leading dimensions that follow each
other in memory, both in x and in the result, count as one, and up to three are left.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels import ops
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Node, Type

# Largest mean square error against the reference in fp32, relative to the result's: the square
# of one rounding of the result, in 16 bits; not a third of it, the mean over many values, as a
# result may be one value.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
WIDEST = 8192  # values of a row in registers: 32 for each thread of 8 warps
TILE = 1024  # values of a program where rows are short: 8 for each thread of 4 warps


@triton.jit(do_not_specialize=["R", "middle", "inner"])
def rms_norm_kernel(
    x,
    w,
    out,
    R,
    middle,
    inner,
    D,
    eps,
    x_outer,
    x_middle,
    x_inner,
    x_column,
    w_column,
    out_outer,
    out_middle,
    out_inner,
    out_column,
    DIMS: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of the R rows, which lie along DIMS dimensions. WHOLE: a row fits into COLUMNS. MEAN: of
    squares, in place of their sum.
    """
    over = D if MEAN else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < R)[:, None]
    from_row = x + _offset(row, middle, inner, x_outer, x_middle, x_inner, DIMS)[:, None]
    to_row = out + _offset(row, middle, inner, out_outer, out_middle, out_inner, DIMS)[:, None]
    columns = tl.arange(0, COLUMNS).to(tl.int64)
    if WHOLE:
        c = columns[None, :]
        values = tl.load(from_row + c * x_column, mask=there & (c < D), other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 1) / over + eps)[:, None]
        _store(values * scale, to_row, w, c, there, D, w_column, out_column, WEIGHT)
    else:
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, D, COLUMNS):
            c = (start + columns)[None, :]
            values = tl.load(from_row + c * x_column, mask=there & (c < D), other=0).to(tl.float32)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares, 1) / over + eps)[:, None]
        for start in range(0, D, COLUMNS):
            c = (start + columns)[None, :]
            values = tl.load(from_row + c * x_column, mask=there & (c < D), other=0).to(tl.float32)
            _store(values * scale, to_row, w, c, there, D, w_column, out_column, WEIGHT)


@triton.jit
def _offset(row, middle, inner, outer_step, middle_step, inner_step, DIMS: tl.constexpr):
    """Where rows begin."""
    if DIMS == 1:
        return row * inner_step
    offset = row % inner * inner_step
    if DIMS == 2:
        return offset + row // inner * middle_step
    rest = row // inner
    return offset + rest % middle * middle_step + rest // middle * outer_step


@triton.jit
def _store(values, to_row, w, c, there, D, w_column, out_column, WEIGHT: tl.constexpr):
    if WEIGHT:
        values *= tl.load(w + c * w_column, mask=c < D, other=0).to(tl.float32)
    tl.store(to_row + c * out_column, values.to(to_row.dtype.element_ty), mask=there & (c < D))


def _result(x: Type, w: Type | None, eps: float, mean: bool) -> Type:
    """What the op promises. Where x is not contiguous only torch can tell; the op keeps its
    answers.
    """
    if not mean:
        return Type.contiguous(x.shape, x.dtype)
    leaves = [None if t is None else Node("input", (), t) for t in (x, w)]
    return ops.rms_norm(*leaves, eps=eps).type


def _rows(x: Type, result: Type) -> list[tuple[int, int, int]]:
    """The dimensions along which rows lie, outermost in memory first: size, and steps in x and in
    the result.
    """
    leading = zip(x.shape[:-1], x.strides[:-1], result.strides[:-1], strict=True)
    rows: list[tuple[int, int, int]] = []
    for size, step, out_step in sorted(leading, key=lambda row: row[1:], reverse=True):
        if size == 1:
            continue
        if rows and rows[-1][1:] == (size * step, size * out_step):
            size *= rows.pop()[0]
        rows.append((size, step, out_step))
    return rows or [(1, 0, 0)]


def rejects(x: Type, w: Type | None = None, *, eps: float, mean: bool = True) -> str | None:
    """None if the kernel normalises rows of these types, else why not. Any strides but those that
    leave rows along more than three dimensions.
    """
    for name, type_ in (("x", x), ("the weight", w)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
    if x.shape[-1] >= 2**30 or prod(x.shape[:-1]) >= 2**31:
        return (
            f"{prod(x.shape[:-1])} rows of {x.shape[-1]} values; the kernel takes below 2^31 rows "
            "and 2^30 values"
        )
    dimensions = len(_rows(x, _result(x, w, eps, mean)))
    if dimensions > 3:
        return (
            f"rows of x lie along {dimensions} dimensions, with strides {list(x.strides)}; the "
            "kernel takes up to 3"
        )
    return None


def plan_call(x: Type, w: Type | None = None, *, eps: float, mean: bool = True) -> Call:
    result = _result(x, w, eps, mean)
    rows = _rows(x, result)
    outer, middle, inner = [(1, 0, 0)] * (3 - len(rows)) + rows
    count, width = prod(x.shape[:-1]), x.shape[-1]
    whole = width <= WIDEST
    columns = power_of_two(width) if whole else WIDEST // 2
    block = max(1, TILE // columns)
    scalars: dict[str, int | float] = {
        "R": count,
        "middle": middle[0],
        "inner": inner[0],
        "D": width,
        "eps": float(eps),
        "x_outer": outer[1],
        "x_middle": middle[1],
        "x_inner": inner[1],
        "x_column": x.strides[-1],
        "w_column": 1 if w is None else w.strides[0],
        "out_outer": outer[2],
        "out_middle": middle[2],
        "out_inner": inner[2],
        "out_column": result.strides[-1],
    }
    constants: dict[str, int | bool | str] = {
        "DIMS": len(rows),
        "MEAN": mean,
        "WEIGHT": w is not None,
        "WHOLE": whole,
        "ROWS": block,
        "COLUMNS": columns,
    }
    programs = -(-count // block) if width else 0
    return Call(scalars, constants, programs, 4 if columns <= 2048 else 8, 1)


def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float) -> Tensor:
    """The `rms_norm` op: x [..., D], w [D] -> [..., D] in x's type

    Raises PlacementError with what `rejects` says.
    """
    return _normalised(x, w, eps, True)


def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    """The `l2_norm` op: x [..., D] -> contiguous, as `rms_norm`"""
    return _normalised(x, None, eps, False)


def _normalised(x: Tensor, w: Tensor | None, eps: float, mean: bool) -> Tensor:
    types = Type.of(x), None if w is None else Type.of(w)
    reason = rejects(*types, eps=eps, mean=mean)
    if reason:
        raise PlacementError(f"{'RMS' if mean else 'L2'} norm on the GPU: {reason}")
    result = _result(*types, eps, mean)
    out = torch.empty(result.count, dtype=x.dtype, device=x.device)
    out = out.as_strided(result.shape, result.strides)
    call = plan_call(*types, eps=eps, mean=mean)
    if call.programs:
        run_call(rms_norm_kernel, call, (x, x if w is None else w, out))
    return out


def program(x: Type, w: Type | None = None, *, eps: float, mean: bool = True) -> Program:
    """What a run on these types launches."""
    operands = {"x": x, "w": w or x, "out": fresh(x)}
    call = plan_call(x, w, eps=eps, mean=mean)
    return Program(rms_norm_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: x of this shape, its dimensions in memory in the order `order`, the last of them
    followed by `unused` values that are not x's and `step` values apart.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight: torch.dtype | None = None
    order: tuple[int, ...] | None = None
    unused: int = 0
    step: int = 1
    eps: float = 1e-6

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)}"
        text += f" weight {name_of(self.weight)}" if self.weight else ""
        text += f" order {''.join(map(str, self.order))}" if self.order else ""
        text += f" unused {self.unused}" * bool(self.unused)
        return text + f" step {self.step}" * (self.step > 1) + f" eps {self.eps}" * (self.eps > 0.1)

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """x, and the weight; what is not x's holds NaN."""
        rng = torch.Generator().manual_seed(seed)
        order = self.order or tuple(range(len(self.shape)))
        last = self.shape[order[-1]]
        sizes = [self.shape[d] for d in order[:-1]]
        values = torch.full((*sizes, (last + self.unused) * self.step), torch.nan)
        values[..., : last * self.step : self.step] = torch.randn(*sizes, last, generator=rng)
        memory = values.to(self.dtype).to(device)
        x = memory[..., : last * self.step : self.step].permute(
            [order.index(d) for d in range(len(order))]
        )
        if self.weight is None:
            return x, None
        w = torch.full((self.shape[-1], self.step), torch.nan)
        w[:, 0] = torch.randn(self.shape[-1], generator=rng)
        return x, w.to(self.weight).to(device)[:, 0]


_B, _H, _F = torch.bfloat16, torch.float16, torch.float32

CASES = (
    Case((3, 40), weight=_F),
    Case((0, 5)),
    Case((5, 0), weight=_F),
    Case((1,), eps=0.5),
    Case((7,), _H),
    Case((1, 1), _B, _F),
    Case((17, 1), weight=_F),
    Case((2, 13, 31), _B, _F),
    Case((9, 129), _B, _B),
    Case((5, 300), _H, _F),
    Case((65, 16), _H, _H),
    Case((2, 1025), _B),
    Case((3, 2049), weight=_F),
    Case((2, 8192), _B, _F),
    Case((2, 8193), _B, _F),
    Case((3, 12289), weight=_F),
    Case((5, 3, 24), _B, _F, unused=8),
    Case((5, 3, 24), _B, _F, order=(1, 0, 2), unused=8),
    Case((5, 3, 24), weight=_F, order=(2, 0, 1)),
    Case((5, 24, 3), weight=_F, step=2),
    Case((2, 3, 5, 16), _B, _F, order=(0, 2, 1, 3)),
    Case((2, 3, 5, 16), _B, order=(2, 1, 0, 3), unused=8),
    Case((2, 3, 5, 16), _H, _F, order=(3, 1, 0, 2), step=2),
    Case((3, 9000), weight=_F, order=(1, 0)),
)

USES = {
    "RMS norm, decoding": Case((16, 4096), _B, _F),
    "RMS norm, prefill": Case((2048, 4096), _B, _F),
    "RMS norm, heads of 128": Case((2048, 32, 128), _B, _F),
    "RMS norm, 1152 values, no weight": Case((4096, 1152), _B),
    "RMS norm, 8192 values, fp32": Case((512, 8192), _F, _F),
    "RMS norm, 16384 values": Case((512, 16384), _B, _F),
}

KERNEL = TritonKernel(
    run=rms_norm, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)


@dataclass(frozen=True)
class Rows(Case):
    """The same without a weight, which `l2_norm` does not take."""

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        x = super().inputs(device, seed)[0]
        assert x is not None
        return (x,)


L2_NORM = TritonKernel(
    run=l2_norm,
    rejects=lambda x, *, eps: rejects(x, eps=eps, mean=False),
    program=lambda x, *, eps: program(x, eps=eps, mean=False),
    cases=(
        Rows((3, 40)),
        Rows((0, 5)),
        Rows((1,), eps=0.5),
        Rows((2, 13, 31), _B),
        Rows((5, 3, 24), _B, unused=8),
        Rows((5, 3, 24), _H, order=(1, 0, 2), unused=8),
        Rows((5, 24, 3), step=2),
        Rows((2, 8193), _B),
        Rows((65, 16), _H),
    ),
    uses={"L2 norm, heads of 128, prefill of 512": Rows((512, 16, 128), _B)},
    limits=NMSE,
)
