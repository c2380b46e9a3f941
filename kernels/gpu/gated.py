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

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits; in fp32 the exponential is not the reference's, and 1 + tanh cancels.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
BLOCK = 1024


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


def _step(x: Type) -> int | None:
    """How far apart rows lie; None where leading dimensions are no rows one after another."""
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


def rejects(gate: Type, up: Type, *, approximate: str | None = None) -> str | None:
    """None if the kernel takes rows of these types, else why not."""
    del approximate
    for name, type_ in (("gate", gate), ("up", up)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (
            type_.dtype != gate.dtype
        ):
            return (
                f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32, both alike"
            )
        step = _step(type_)
        if type_.strides[-1] != 1 or step is None or step < type_.shape[-1]:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel takes rows one after another"
            )
    if prod(gate.shape[:-1]) * -(-gate.shape[-1] // BLOCK) >= 2**31:
        return f"{gate}; a grid has fewer than 2^31 programs"
    return None


def plan_call(gate: Type, up: Type, *, approximate: str | None = None) -> Call:
    width = gate.shape[-1]
    columns = min(BLOCK, power_of_two(max(width, 1)))
    steps = [_step(t) for t in (gate, up)]
    assert steps[0] is not None and steps[1] is not None
    return Call(
        {"D": width, "gate_step": steps[0], "up_step": steps[1]},
        {"ACT": approximate or "silu", "COLUMNS": columns},
        prod(gate.shape[:-1]) * -(-width // columns),
        4,
        1,
    )


def gated(gate: Tensor, up: Tensor, *, approximate: str | None = None) -> Tensor:
    """The `silu_mul` op and, with `approximate`, the `gelu_mul` op: gate, up [..., F] -> contiguous

    Raises PlacementError with what `rejects` says.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _gated(gate, up, out, approximate)


def gated_in_place(gate: Tensor, up: Tensor, *, approximate: str | None = None) -> Tensor:
    """The same into `gate`, which is contiguous and shares no memory with `up`."""
    return _gated(gate, up, gate, approximate)


def _gated(gate: Tensor, up: Tensor, out: Tensor, approximate: str | None) -> Tensor:
    types = Type.of(gate), Type.of(up)
    reason = rejects(*types)
    if reason:
        raise PlacementError(f"gated unit on the GPU: {reason}")
    call = plan_call(*types, approximate=approximate)
    if call.programs:
        run_call(gated_kernel, call, (gate, up, out))
    return out


def program(gate: Type, up: Type, **options: Any) -> Program:
    """What a run on these types launches."""
    operands = {"gate": gate, "up": up, "out": fresh(gate)}
    return Program(gated_kernel, plan_call(gate, up, **options), operands, ("COLUMNS",))


def rejects_gelu(x: Type, *, approximate: str) -> str | None:
    """None if the kernel takes values of this type, else why not."""
    del approximate
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel takes bf16, fp16 or fp32"
    if not x.is_contiguous:
        return f"x has strides {list(x.strides)}; the kernel needs it contiguous"
    if x.count >= 2**40:
        return f"{x.count} values; the kernel takes fewer than 2^40"
    return None


def plan_gelu(x: Type, *, approximate: str) -> Call:
    constants: dict[str, int | bool | str] = {"ACT": approximate, "COLUMNS": BLOCK}
    return Call({"N": x.count}, constants, -(-x.count // BLOCK), 4, 1)


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """The `gelu` op: x [...] -> [...]

    Raises PlacementError with what `rejects_gelu` says.
    """
    return _gelu(x, torch.empty_like(x), approximate)


def gelu_in_place(x: Tensor, *, approximate: str) -> Tensor:
    """The same into x."""
    return _gelu(x, x, approximate)


def _gelu(x: Tensor, out: Tensor, approximate: str) -> Tensor:
    kind = Type.of(x)
    reason = rejects_gelu(kind, approximate=approximate)
    if reason:
        raise PlacementError(f"GELU on the GPU: {reason}")
    call = plan_gelu(kind, approximate=approximate)
    if call.programs:
        run_call(gelu_kernel, call, (x, out))
    return out


def gelu_program(x: Type, *, approximate: str) -> Program:
    """What a run on this type launches."""
    call = plan_gelu(x, approximate=approximate)
    return Program(gelu_kernel, call, {"x": x, "out": fresh(x)}, ("COLUMNS",))


@dataclass(frozen=True)
class Case:
    """One problem. `fused`: both are columns of one buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    approximate: str | None = None
    fused: bool = False

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)} {self.approximate or ''}"
        return text.rstrip() + " fused" * self.fused

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.approximate is None else {"approximate": self.approximate}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        rng = torch.Generator().manual_seed(seed)
        width = self.shape[-1]
        both = torch.randn(*self.shape[:-1], 2 * width, generator=rng).to(self.dtype).to(device)
        halves = both[..., :width], both[..., width:]
        return halves if self.fused else tuple(t.contiguous() for t in halves)


_B, _H = torch.bfloat16, torch.float16
SHAPES = (
    ((3, 40), torch.float32, False),
    ((0, 8), torch.float32, False),
    ((1, 1), _H, False),
    ((5, 1030), _B, True),
    ((2, 3, 24), _B, True),
    ((17, 129), _H, True),
)
SILU = tuple(Case(s, d, None, fused) for s, d, fused in SHAPES)
GELU = tuple(
    Case(s, d, kind, fused)
    for i, (s, d, fused) in enumerate(SHAPES)
    for kind in (("tanh", "none", "quick") if i == 3 else ("tanh",) if i % 2 else ("none", "quick"))
)


def _kernel(cases: tuple[Case, ...], uses: dict[str, Case]) -> TritonKernel:
    return TritonKernel(
        run=gated,
        in_place=gated_in_place,
        rejects=rejects,
        program=program,
        cases=cases,
        uses=uses,
        limits=NMSE,
    )


SILU_MUL = _kernel(SILU, {"SwiGLU's gate, decoding, 14336": Case((1, 14336), _B, fused=True)})
GELU_MUL = _kernel(
    GELU,
    {
        "GELU gate, decoding, 10240": Case((1, 10240), _B, "tanh", True),
        "GELU gate, prefill of 512, 10240": Case((512, 10240), _B, "tanh", True),
    },
)


@dataclass(frozen=True)
class Values:
    """One problem of `gelu`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)} quick"

    @property
    def options(self) -> dict[str, Any]:
        return {"approximate": "quick"}

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(seed)
        return (torch.randn(self.shape, generator=rng).mul_(3).to(self.dtype).to(device),)


GELU_KERNEL = TritonKernel(
    run=gelu,
    in_place=gelu_in_place,
    rejects=rejects_gelu,
    program=gelu_program,
    cases=(
        Values((3, 40)),
        Values((0, 8)),
        Values((1, 1), _H),
        Values((2, 3, 1030), _B),
        Values((1025,), _B),
        Values((5, 7, 129), _H),
    ),
    uses={"quick GELU, 577 patches of 4096 values": Values((1, 577, 4096), _B)},
    limits=NMSE,
)
