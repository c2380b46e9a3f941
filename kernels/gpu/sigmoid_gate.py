"""What a sigmoid lets through, for NVIDIA and AMD GPUs: the `sigmoid_gate` op in one launch.

    out = x sigmoid(gate)          or x sigmoid(gate) + y

One program makes a block of columns of one row. A row has a gate for all of it, as that of a shared
expert, or one for each value, as that of attention. The sigmoid and the product are rounded to x's
type, as they are where all are ops.
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
from mtmd.kernels.gpu.gated import nan_or, sigmoid
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh, not_dense
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: three roundings
# in 16 bits; in fp32 the exponential is not the reference's.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14}
BLOCK = 1024


@triton.jit
def sigmoid_gate_kernel(
    x, gate, y, out, D, EACH: tl.constexpr, ADD: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of a row of D. EACH: every value has a gate."""
    blocks = tl.cdiv(D, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    at = row * D + c
    value = tl.load(x + at, mask=c < D, other=0)
    if EACH:
        g = tl.load(gate + at, mask=c < D, other=0).to(tl.float32)
    else:
        g = tl.load(gate + row + tl.zeros([COLUMNS], tl.int32)).to(tl.float32)
    part = nan_or(g, sigmoid(g)).to(x.dtype.element_ty).to(tl.float32)
    value = (value.to(tl.float32) * part).to(x.dtype.element_ty)
    if ADD:
        added = tl.load(y + at, mask=c < D, other=0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(x.dtype.element_ty)
    tl.store(out + at, value, mask=c < D)


def rejects(x: Type, gate: Type, y: Type | None = None) -> str | None:
    """None if the kernel takes rows of these types, else why not."""
    if reason := not_dense({"x": x, "gate": gate, "y": y}):
        return reason
    if prod(x.shape[:-1]) * -(-x.shape[-1] // BLOCK) >= 2**31:
        return f"{x}; a grid has fewer than 2^31 programs"
    return None


def plan_call(x: Type, gate: Type, y: Type | None = None) -> Call:
    width = x.shape[-1]
    columns = min(BLOCK, power_of_two(max(width, 1)))
    constants: dict[str, int | bool | str] = {
        "EACH": gate.shape[-1] == width,
        "ADD": y is not None,
        "COLUMNS": columns,
    }
    return Call({"D": width}, constants, prod(x.shape[:-1]) * -(-width // columns), 4, 1)


def sigmoid_gate(x: Tensor, gate: Tensor, y: Tensor | None = None) -> Tensor:
    """The `sigmoid_gate` op: x, y [..., D], gate [..., D] or [..., 1] -> [..., D]

    Raises PlacementError with what `rejects` says.
    """
    return _gate(x, gate, y, torch.empty_like(x))


def sigmoid_gate_in_place(x: Tensor, gate: Tensor, y: Tensor | None = None) -> Tensor:
    """The same into x."""
    return _gate(x, gate, y, x)


def _gate(x: Tensor, gate: Tensor, y: Tensor | None, out: Tensor) -> Tensor:
    types = Type.of(x), Type.of(gate), None if y is None else Type.of(y)
    reason = rejects(*types)
    if reason:
        raise PlacementError(f"sigmoid gate on the GPU: {reason}")
    call = plan_call(*types)
    if call.programs:
        run_call(sigmoid_gate_kernel, call, (x, gate, x if y is None else y, out))
    return out


def program(x: Type, gate: Type, y: Type | None = None) -> Program:
    """What a run on these types launches."""
    operands = {"x": x, "gate": gate, "y": y or x, "out": fresh(x)}
    return Program(sigmoid_gate_kernel, plan_call(x, gate, y), operands, ("COLUMNS",))


@dataclass(frozen=True)
class Case:
    """One problem. `each`: every value has a gate; `added`: there is a y."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    each: bool = False
    added: bool = False

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)}"
        return text + " each" * self.each + " added" * self.added

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        rng = torch.Generator().manual_seed(seed)
        gates = self.shape if self.each else (*self.shape[:-1], 1)
        x, gate, y = (
            torch.randn(shape, generator=rng).to(self.dtype).to(device)
            for shape in (self.shape, gates, self.shape)
        )
        return x, gate, y if self.added else None


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case((3, 40), added=True),
    Case((0, 8)),
    Case((1, 1), _H, added=True),
    Case((5, 1030), _B),
    Case((2, 3, 24), _H, True),
    Case((17, 129), each=True),
    Case((1, 2048), _B, added=True),
    Case((3, 7), _B, True, True),
)
USES = {
    "gate of a shared expert, decoding, 2048 values": Case((1, 2048), _B, added=True),
    "gate of attention, prefill of 512, 4096 values": Case((512, 4096), _B, True),
}

KERNEL = TritonKernel(
    run=sigmoid_gate,
    in_place=sigmoid_gate_in_place,
    rejects=rejects,
    program=program,
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
