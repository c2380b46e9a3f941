"""Describes what a sigmoid lets through, for NVIDIA and AMD GPUs: the `sigmoid_gate` op in one
launch.

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

import torch

from mtmd.kernels.gpu.gated import nan_or, sigmoid
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, columns_of_row
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, not_dense
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: three roundings
# in 16 bits; in fp32 the exponential is not the reference's.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-20, torch.bfloat16: 2.0**-14}
BLOCK = 1024


@dataclass(frozen=True)
class Operands:
    """Operands of `sigmoid_gate`: x, y [..., D], gate [..., D] or [..., 1] -> [..., D]"""

    x: Type
    gate: Type
    y: Type | None = None


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


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of these types, else why not."""
    if reason := not_dense({"x": o.x, "gate": o.gate, "y": o.y}):
        return reason
    if prod(o.x.shape[:-1]) * -(-o.x.shape[-1] // BLOCK) >= 2**31:
        return f"{o.x}; a grid has fewer than 2^31 programs"
    return None


def plan(o: Operands) -> Plan:
    width = o.x.shape[-1]
    columns = columns_of_row(width, BLOCK)
    constants: dict[str, int | bool | str] = {
        "EACH": o.gate.shape[-1] == width,
        "ADD": o.y is not None,
        "COLUMNS": columns,
    }
    programs = prod(o.x.shape[:-1]) * -(-width // columns)
    call = Call({"D": width}, constants, programs, 4, 1, max_threads=columns)
    out = Type.contiguous(o.x.shape, o.x.dtype)
    return Plan(out, [Launch(sigmoid_gate_kernel, call, tile=("COLUMNS",))])


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    each: bool = False,
    added: bool = False,
) -> Problem:
    """`each`: every value has a gate; `added`: there is a y."""
    gates = shape if each else (*shape[:-1], 1)
    x, gate, y = (torch.randn(size, generator=rng).to(dtype) for size in (shape, gates, shape))
    return given(x, gate, y if added else None)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 40), added=True),
    problem((0, 8)),
    problem((1, 1), _H, added=True),
    problem((5, 1030), _B),
    problem((2, 3, 24), _H, True),
    problem((17, 129), each=True),
    problem((1, 2048), _B, added=True),
    problem((3, 7), _B, True, True),
)
USES = {
    "gate of a shared expert, decoding, 2048 values": problem((1, 2048), _B, added=True),
    "gate of attention, prefill of 512, 4096 values": problem((512, 4096), _B, True),
}

KERNEL = declared(
    Operands,
    plan,
    rejects,
    what="sigmoid gate",
    overwrites=True,
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
