"""Gated units, for NVIDIA and AMD GPUs: the ops `silu_mul` and `gelu_mul` in one launch each
(arXiv:2002.05202), and the `gelu` op.

    y = act(gate) * up                  y = act(x)

One program makes a block of columns of one row, of `gelu` a block of values. Rows of `gate` and
`up` may lie apart, as halves of one product do. act and the product are fp32, the result is rounded
once. Each result can lie where the first input does.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, columns_of_row
from mtmd.kernels.gpu.triton_kernel import (
    Case,
    Launch,
    Plan,
    Problem,
    TritonKernel,
    case,
    declared,
    given,
)
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits; in fp32 the exponential is not the reference's, and 1 + tanh cancels.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
BLOCK = 1024


@dataclass(frozen=True)
class Operands:
    """Operands of `silu_mul` and, with `approximate`, of `gelu_mul`: gate, up [..., F] ->
    contiguous
    """

    gate: Type
    up: Type
    _: KW_ONLY
    approximate: str | None = None


@dataclass(frozen=True)
class Values:
    """Values of `gelu`: x [...] -> [...]"""

    x: Type
    _: KW_ONLY
    approximate: str


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), whose exponential stays finite: below -80 it is nothing beside 1. On a GPU
    a NaN goes the same way, for who multiplies by it; others ask `nan_or` for it.
    """
    return tl.sigmoid(tl.maximum(x, -80.0))


@triton.jit
def nan_or(x, y):
    """y, or NaN where x is."""
    return tl.where(x == x, y, x)


@triton.jit
def activation(x, ACT: tl.constexpr):
    """SiLU of fp32, or GELU by its approximations or as it is (`kernels/ops/elementwise.py`)."""
    if ACT == "silu":
        x *= sigmoid(x)
    elif ACT == "quick":
        x *= sigmoid(1.702 * x)
    elif ACT == "tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        x *= sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACT == "none")
        x *= 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def gated_kernel(gate, up, out, D, gate_step, up_step, ACT: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of a row of D."""
    blocks = tl.cdiv(D, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(gate + row * gate_step + c, mask=c < D, other=0).to(tl.float32)
    y = tl.load(up + row * up_step + c, mask=c < D, other=0).to(tl.float32)
    x = activation(x, ACT) * y
    tl.store(out + row * D + c, x.to(out.dtype.element_ty), mask=c < D)


@triton.jit
def gelu_kernel(x, out, N, ACT: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS of N values."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(x + at, mask=at < N, other=0).to(tl.float32)
    tl.store(out + at, activation(value, ACT).to(out.dtype.element_ty), mask=at < N)


def row_step(x: Type) -> int | None:
    """Return how far apart rows lie; None where leading dimensions are no rows one after
    another.
    """
    step: int | None = None
    size = 1
    for length, stride in zip(x.shape[-2::-1], x.strides[-2::-1], strict=True):
        if length == 1:
            continue
        if step is None:
            step = stride
        elif stride != step * size:
            return None
        size *= length
    return x.shape[-1] if step is None else step


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    for name, type_ in (("gate", o.gate), ("up", o.up)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (
            type_.dtype != o.gate.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or "
                "fp32, both alike"
            )
        step = row_step(type_)
        if type_.strides[-1] != 1 or step is None or step < type_.shape[-1]:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel supports rows one "
                "after another"
            )
    if prod(o.gate.shape[:-1]) * -(-o.gate.shape[-1] // BLOCK) >= 2**31:
        return f"{o.gate}; a grid has fewer than 2^31 programs"
    return None


def plan(o: Operands) -> Plan:
    width = o.gate.shape[-1]
    columns = columns_of_row(width, BLOCK)
    gate_step, up_step = row_step(o.gate), row_step(o.up)
    assert gate_step is not None and up_step is not None
    call = Call(
        {"D": width, "gate_step": gate_step, "up_step": up_step},
        {"ACT": o.approximate or "silu", "COLUMNS": columns},
        prod(o.gate.shape[:-1]) * -(-width // columns),
        4,
        1,
        max_threads=columns,
    )
    out = Type.contiguous(o.gate.shape, o.gate.dtype)
    return Plan(out, [Launch(gated_kernel, call, tile=("COLUMNS",))])


def rejects_gelu(o: Values) -> str | None:
    """None if the kernel supports values of this type, else why not."""
    x = o.x
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel supports bf16, fp16 or fp32"
    if not x.is_contiguous:
        return f"x has strides {list(x.strides)}; the kernel needs it contiguous"
    if x.count >= 2**40:
        return f"{x.count} values; the kernel supports fewer than 2^40"
    return None


def plan_gelu(o: Values) -> Plan:
    constants: dict[str, int | bool | str] = {"ACT": o.approximate, "COLUMNS": BLOCK}
    call = Call({"N": o.x.count}, constants, -(-o.x.count // BLOCK), 4, 1)
    out = Type.contiguous(o.x.shape, o.x.dtype)
    return Plan(out, [Launch(gelu_kernel, call, tile=("COLUMNS",))])


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    approximate: str | None = None,
    fused: bool = False,
) -> Problem:
    """`fused`: both are columns of one buffer."""
    width = shape[-1]
    both = torch.randn(*shape[:-1], 2 * width, generator=rng).to(dtype)
    gate, up = both[..., :width], both[..., width:]
    if not fused:
        gate, up = gate.contiguous(), up.contiguous()
    return given(gate, up, **({} if approximate is None else {"approximate": approximate}))


@case
def values(
    rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Problem:
    x = torch.randn(shape, generator=rng).mul_(3).to(dtype)
    return given(x, approximate="quick")


_B, _H = torch.bfloat16, torch.float16
SHAPES = (
    ((3, 40), torch.float32, False),
    ((0, 8), torch.float32, False),
    ((1, 1), _H, False),
    ((5, 1030), _B, True),
    ((2, 3, 24), _B, True),
    ((17, 129), _H, True),
)
SILU = tuple(problem(s, d, None, fused) for s, d, fused in SHAPES)
GELU = tuple(
    problem(s, d, kind, fused)
    for i, (s, d, fused) in enumerate(SHAPES)
    for kind in (("tanh", "none", "quick") if i == 3 else ("tanh",) if i % 2 else ("none", "quick"))
)


def _kernel(cases: Sequence[Case], uses: Mapping[str, Case]) -> TritonKernel:
    return declared(
        Operands,
        plan,
        rejects,
        what="gated unit",
        overwrites=True,
        cases=cases,
        uses=uses,
        limits=NMSE,
    )


SILU_MUL = _kernel(SILU, {"SwiGLU's gate, decoding, 14336": problem((1, 14336), _B, fused=True)})
GELU_MUL = _kernel(
    GELU,
    {
        "GELU gate, decoding, 10240": problem((1, 10240), _B, "tanh", True),
        "GELU gate, prefill of 512, 10240": problem((512, 10240), _B, "tanh", True),
    },
)
GELU_KERNEL = declared(
    Values,
    plan_gelu,
    rejects_gelu,
    what="GELU",
    overwrites=True,
    cases=(
        values((3, 40)),
        values((0, 8)),
        values((1, 1), _H),
        values((2, 3, 1030), _B),
        values((1025,), _B),
        values((5, 7, 129), _H),
    ),
    uses={"quick GELU, 577 patches of 4096 values": values((1, 577, 4096), _B)},
    limits=NMSE,
)
