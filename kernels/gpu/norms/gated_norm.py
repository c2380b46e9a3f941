"""The RMS norm of heads times their gates, for NVIDIA and AMD GPUs: the `gated_norm` op in one
launch.

    y = silu(gate) * x rsqrt(mean(x^2) + eps) w

One program makes a block of heads, each read once and kept in registers. The norm is rounded to the
gate's type before it is multiplied, as it is where all are ops; sums and the product are fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import activation
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: a rounding of
# the norm and one of the product, in 16 bits.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15}
WIDEST = 1024  # values of a head
TILE = 1024  # values of a program where heads are narrow


@dataclass(frozen=True)
class Operands:
    """Operands of `gated_norm`: x, gate [T, H, D], w [D] -> [T, H, D] in gate's type"""

    x: Type
    w: Type
    gate: Type
    _: KW_ONLY
    eps: float


@triton.jit(do_not_specialize=["N"])
def gated_norm_kernel(x, w, gate, out, N, H, D, eps, gate_step, C: tl.constexpr):
    """ROWS of N heads of D values, H of each token, whose gates begin gate_step apart."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    c = tl.arange(0, C.COLUMNS)
    there = (row < N)[:, None] & (c < D)[None, :]
    at = row[:, None] * D + c[None, :]
    value = tl.load(x + at, mask=there, other=0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value *= tl.load(w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    value = value.to(out.dtype.element_ty).to(tl.float32)
    gate_at = (row // H * gate_step + row % H * D)[:, None] + c[None, :]
    g = tl.load(gate + gate_at, mask=there, other=0).to(tl.float32)
    value *= activation(g, "silu")
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


def rejects(o: Operands) -> str | None:
    """None if the kernel supports heads of these types, else why not."""
    for name, type_ in (("x", o.x), ("w", o.w), ("gate", o.gate)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    for name, type_ in (("x", o.x), ("w", o.w)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    tokens, heads, width = o.x.shape
    if tokens and heads and o.gate.strides[1:] != (width, 1):
        return f"gate has strides {list(o.gate.strides)}; the kernel needs a token's heads in order"
    if width > WIDEST or tokens * heads >= 2**31:
        return (
            f"{tokens * heads} heads of {width} values; the kernel supports below 2^31 "
            "heads of up to "
            f"{WIDEST}"
        )
    return None


def plan(o: Operands) -> Plan:
    tokens, heads, width = o.x.shape
    columns = power_of_two(max(width, 1))
    rows = max(1, TILE // columns)
    call = Call(
        {
            "N": tokens * heads,
            "H": heads,
            "D": width,
            "eps": float(o.eps),
            "gate_step": o.gate.strides[0],
        },
        {"ROWS": rows, "COLUMNS": columns},
        -(-tokens * heads // rows) if width else 0,
        4,
        1,
    )
    out = Type.contiguous(o.x.shape, o.gate.dtype)
    return Plan(out, [Launch(gated_norm_kernel, call, tile=("ROWS", "COLUMNS"))])


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    unused: int = 0,
) -> Problem:
    """x in fp32, a gate of `dtype`; `unused` values lie between a token's gates and the next
    one's.
    """
    tokens, heads, width = shape
    x = torch.randn(shape, generator=rng)
    w = torch.rand(width, generator=rng).add_(0.5)
    gate = torch.full((tokens, heads * width + unused), torch.nan)
    gate[:, : heads * width] = torch.randn(tokens, heads * width, generator=rng)
    gate = gate.to(dtype)[:, : heads * width].unflatten(1, (heads, width))
    return given(x, w, gate, eps=1e-6)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((3, 2, 40)),
    problem((0, 2, 8)),
    problem((1, 1, 1)),
    problem((5, 3, 129), _B, 7),
    problem((1, 33, 16), _H, 24),
    problem((2, 4, 1000), _B),
    problem((17, 2, 64), _B, 8),
)
USES = {"gated norm, prefill of 512, 32 heads of 128": problem((512, 32, 128), _B, 8192)}

KERNEL = declared(Operands, plan, rejects, what="gated norm", cases=CASES, uses=USES, limits=NMSE)
