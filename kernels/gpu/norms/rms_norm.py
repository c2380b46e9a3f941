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

from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import prod

import torch

from mtmd.kernels import ops
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, same
from mtmd.kernels.graph import Node, Type

# Largest mean square error against the reference in fp32, relative to the result's: the square
# of one rounding of the result, in 16 bits; not a third of it, the mean over many values, as a
# result may be one value.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
WIDEST = 8192  # values of a row in registers: 32 for each thread of 8 warps
TILE = 1024  # values of a program where rows are short: 8 for each thread of 4 warps


@dataclass(frozen=True)
class Operands:
    """Operands of `rms_norm`: x [..., D], w [D] -> [..., D] in x's type. `mean`: of squares, else
    their sum, as `l2_norm` has it.
    """

    x: Type
    w: Type | None = None
    _: KW_ONLY
    eps: float
    mean: bool = True


@triton.jit(do_not_specialize=["R", "middle", "inner"])
def rms_norm_kernel(p, s, R, middle, inner, C: tl.constexpr):
    """ROWS of the R rows, which lie along DIMS dimensions. WHOLE: a row fits into COLUMNS. MEAN: of
    squares, in place of their sum.
    """
    D = s.D
    over = D if C.MEAN else 1
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    there = (row < R)[:, None]
    x_at = _offset(row, middle, inner, s.x_outer, s.x_middle, s.x_inner, C.DIMS)
    out_at = _offset(row, middle, inner, s.out_outer, s.out_middle, s.out_inner, C.DIMS)
    from_row, to_row = p.x + x_at[:, None], p.out + out_at[:, None]
    columns = tl.arange(0, C.COLUMNS).to(tl.int64)
    if C.WHOLE:
        c = columns[None, :]
        values = tl.load(from_row + c * s.x_column, mask=there & (c < D), other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 1) / over + s.eps)[:, None]
        _store(values * scale, to_row, p.w, c, there, s, C.WEIGHT)
    else:
        squares = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
        for start in range(0, D, C.COLUMNS):
            c = (start + columns)[None, :]
            inside = there & (c < D)
            values = tl.load(from_row + c * s.x_column, mask=inside, other=0).to(tl.float32)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares, 1) / over + s.eps)[:, None]
        for start in range(0, D, C.COLUMNS):
            c = (start + columns)[None, :]
            inside = there & (c < D)
            values = tl.load(from_row + c * s.x_column, mask=inside, other=0).to(tl.float32)
            _store(values * scale, to_row, p.w, c, there, s, C.WEIGHT)


@triton.jit
def _offset(row, middle, inner, outer_step, middle_step, inner_step, DIMS: tl.constexpr):
    """Return where rows begin."""
    if DIMS == 1:
        return row * inner_step
    offset = row % inner * inner_step
    if DIMS == 2:
        return offset + row // inner * middle_step
    rest = row // inner
    return offset + rest % middle * middle_step + rest // middle * outer_step


@triton.jit
def _store(values, to_row, w, c, there, s, WEIGHT: tl.constexpr):
    if WEIGHT:
        values *= tl.load(w + c * s.w_column, mask=c < s.D, other=0).to(tl.float32)
    to = to_row + c * s.out_column
    tl.store(to, values.to(to_row.dtype.element_ty), mask=there & (c < s.D))


def _result(o: Operands) -> Type:
    """Return what the op promises. Where x is not contiguous only torch can tell; the op keeps its
    answers.
    """
    if not o.mean:
        return Type.contiguous(o.x.shape, o.x.dtype)
    leaves = [None if t is None else Node("input", (), t) for t in (o.x, o.w)]
    return ops.rms_norm(*leaves, eps=o.eps).type


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


def rejects(o: Operands) -> str | None:
    """None if the kernel normalises rows of these types, else why not. Any strides but those that
    leave rows along more than three dimensions.
    """
    for name, type_ in (("x", o.x), ("the weight", o.w)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    if o.x.shape[-1] >= 2**30 or prod(o.x.shape[:-1]) >= 2**31:
        return (
            f"{prod(o.x.shape[:-1])} rows of {o.x.shape[-1]} values; the kernel supports "
            "below 2^31 "
            "rows and 2^30 values"
        )
    dimensions = len(_rows(o.x, _result(o)))
    if dimensions > 3:
        return (
            f"rows of x lie along {dimensions} dimensions, with strides {list(o.x.strides)}; the "
            "kernel takes up to 3"
        )
    return None


def plan(o: Operands) -> Plan:
    x, result = o.x, _result(o)
    rows = _rows(x, result)
    outer, middle, inner = [(1, 0, 0)] * (3 - len(rows)) + rows
    count, width = prod(x.shape[:-1]), x.shape[-1]
    whole = width <= WIDEST
    columns = power_of_two(width) if whole else WIDEST // 2
    block = max(1, TILE // columns)
    call = Call(
        {
            "R": count,
            "middle": middle[0],
            "inner": inner[0],
            "D": width,
            "eps": float(o.eps),
            "x_outer": outer[1],
            "x_middle": middle[1],
            "x_inner": inner[1],
            "x_column": x.strides[-1],
            "w_column": 1 if o.w is None else o.w.strides[0],
            "out_outer": outer[2],
            "out_middle": middle[2],
            "out_inner": inner[2],
            "out_column": result.strides[-1],
        },
        {
            "DIMS": len(rows),
            "MEAN": o.mean,
            "WEIGHT": o.w is not None,
            "WHOLE": whole,
            "ROWS": block,
            "COLUMNS": columns,
        },
        -(-count // block) if width else 0,
        4 if columns <= 2048 else 8,
        1,
    )
    tile = "ROWS", "COLUMNS"
    return Plan(result, [Launch(rms_norm_kernel, call, same("x w out"), tile)])


def _drawn(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: tuple[int, ...],
    unused: int,
    step: int,
) -> torch.Tensor:
    """x of this shape, its dimensions in memory in the order `order`, the last of them followed by
    `unused` values that are not x's and `step` values apart; what is not x's holds NaN.
    """
    last = shape[order[-1]]
    sizes = [shape[d] for d in order[:-1]]
    values = torch.full((*sizes, (last + unused) * step), torch.nan)
    values[..., : last * step : step] = torch.randn(*sizes, last, generator=rng)
    x = values.to(dtype)[..., : last * step : step]
    return x.permute([order.index(d) for d in range(len(order))])


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    weight: torch.dtype | None = None,
    order: tuple[int, ...] | None = None,
    unused: int = 0,
    step: int = 1,
    eps: float = 1e-6,
) -> Problem:
    """x as `_drawn` has it, and the weight."""
    x = _drawn(rng, shape, dtype, order or tuple(range(len(shape))), unused, step)
    if weight is None:
        return given(x, None, eps=eps)
    w = torch.full((shape[-1], step), torch.nan)
    w[:, 0] = torch.randn(shape[-1], generator=rng)
    return given(x, w.to(weight)[:, 0], eps=eps)


@case
def rows(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    order: tuple[int, ...] | None = None,
    unused: int = 0,
    step: int = 1,
    eps: float = 1e-6,
) -> Problem:
    """The same without a weight, which `l2_norm` does not take."""
    x = _drawn(rng, shape, dtype, order or tuple(range(len(shape))), unused, step)
    return given(x, eps=eps)


_B, _H, _F = torch.bfloat16, torch.float16, torch.float32

CASES = (
    problem((3, 40), weight=_F),
    problem((0, 5)),
    problem((5, 0), weight=_F),
    problem((1,), eps=0.5),
    problem((7,), _H),
    problem((1, 1), _B, _F),
    problem((17, 1), weight=_F),
    problem((2, 13, 31), _B, _F),
    problem((9, 129), _B, _B),
    problem((5, 300), _H, _F),
    problem((65, 16), _H, _H),
    problem((2, 1025), _B),
    problem((3, 2049), weight=_F),
    problem((2, 8192), _B, _F),
    problem((2, 8193), _B, _F),
    problem((3, 12289), weight=_F),
    problem((5, 3, 24), _B, _F, unused=8),
    problem((5, 3, 24), _B, _F, order=(1, 0, 2), unused=8),
    problem((5, 3, 24), weight=_F, order=(2, 0, 1)),
    problem((5, 24, 3), weight=_F, step=2),
    problem((2, 3, 5, 16), _B, _F, order=(0, 2, 1, 3)),
    problem((2, 3, 5, 16), _B, order=(2, 1, 0, 3), unused=8),
    problem((2, 3, 5, 16), _H, _F, order=(3, 1, 0, 2), step=2),
    problem((3, 9000), weight=_F, order=(1, 0)),
)

USES = {
    "RMS norm, decoding": problem((16, 4096), _B, _F),
    "RMS norm, prefill": problem((2048, 4096), _B, _F),
    "RMS norm, heads of 128": problem((2048, 32, 128), _B, _F),
    "RMS norm, 1152 values, no weight": problem((4096, 1152), _B),
    "RMS norm, 8192 values, fp32": problem((512, 8192), _F, _F),
    "RMS norm, 16384 values": problem((512, 16384), _B, _F),
}

KERNEL = declared(Operands, plan, rejects, what="RMS norm", cases=CASES, uses=USES, limits=NMSE)
L2_NORM = declared(
    partial(Operands, mean=False),
    plan,
    rejects,
    what="L2 norm",
    cases=(
        rows((3, 40)),
        rows((0, 5)),
        rows((1,), eps=0.5),
        rows((2, 13, 31), _B),
        rows((5, 3, 24), _B, unused=8),
        rows((5, 3, 24), _H, order=(1, 0, 2), unused=8),
        rows((5, 24, 3), step=2),
        rows((2, 8193), _B),
        rows((65, 16), _H),
    ),
    uses={"L2 norm, heads of 128, prefill of 512": rows((512, 16, 128), _B)},
    limits=NMSE,
)
