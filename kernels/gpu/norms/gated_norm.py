"""The RMS norm of heads times their gates, for NVIDIA and AMD GPUs: the `gated_norm` op in one
launch.

    y = silu(gate) * x rsqrt(mean(x^2) + eps) w

One program makes a block of heads, each read once and kept in registers. The norm is rounded to the
gate's type before it is multiplied, as it is where all are ops; sums and the product are fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import activation
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: a rounding of
# the norm and one of the product, in 16 bits.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15}
WIDEST = 1024  # values of a head
TILE = 1024  # values of a program where heads are narrow


@triton.jit(do_not_specialize=["N"])
def gated_norm_kernel(
    x, w, gate, out, N, H, D, eps, gate_step, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS of N heads of D values, H of each token, whose gates begin gate_step apart."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
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


def rejects(x: Type, w: Type, gate: Type, **options: Any) -> str | None:
    """None if the kernel takes heads of these types, else why not."""
    del options
    for name, type_ in (("x", x), ("w", w), ("gate", gate)):
        if type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
    for name, type_ in (("x", x), ("w", w)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    tokens, heads, width = x.shape
    if tokens and heads and gate.strides[1:] != (width, 1):
        return f"gate has strides {list(gate.strides)}; the kernel needs a token's heads in order"
    if width > WIDEST or tokens * heads >= 2**31:
        return (
            f"{tokens * heads} heads of {width} values; the kernel takes below 2^31 heads of up to "
            f"{WIDEST}"
        )
    return None


def plan_call(x: Type, w: Type, gate: Type, *, eps: float) -> Call:
    del w
    tokens, heads, width = x.shape
    columns = power_of_two(max(width, 1))
    rows = max(1, TILE // columns)
    scalars: dict[str, int | float] = {
        "N": tokens * heads,
        "H": heads,
        "D": width,
        "eps": float(eps),
        "gate_step": gate.strides[0],
    }
    constants: dict[str, int | bool | str] = {"ROWS": rows, "COLUMNS": columns}
    return Call(scalars, constants, -(-tokens * heads // rows) if width else 0, 4, 1)


def gated_norm(x: Tensor, w: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """The `gated_norm` op: x, gate [T, H, D], w [D] -> [T, H, D] in gate's type

    Raises PlacementError with what `rejects` says.
    """
    types = tuple(Type.of(t) for t in (x, w, gate))
    reason = rejects(*types)
    if reason:
        raise PlacementError(f"gated norm on the GPU: {reason}")
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    call = plan_call(*types, eps=eps)
    if call.programs:
        run_call(gated_norm_kernel, call, (x, w, gate, out))
    return out


def program(x: Type, w: Type, gate: Type, *, eps: float) -> Program:
    """What a run on these types launches."""
    operands = {"x": x, "w": w, "gate": gate, "out": Type.contiguous(x.shape, gate.dtype)}
    call = plan_call(x, w, gate, eps=eps)
    return Program(gated_norm_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: x in fp32, a gate of `dtype`; `unused` values lie between a token's gates and
    the next one's.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    unused: int = 0

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)}"
        return text + f" unused {self.unused}" * bool(self.unused)

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": 1e-6}

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(seed)
        tokens, heads, width = self.shape
        x = torch.randn(self.shape, generator=rng).to(device)
        w = torch.rand(width, generator=rng).add_(0.5).to(device)
        gate = torch.full((tokens, heads * width + self.unused), torch.nan)
        gate[:, : heads * width] = torch.randn(tokens, heads * width, generator=rng)
        gate = gate.to(self.dtype).to(device)
        return x, w, gate[:, : heads * width].unflatten(1, (heads, width))


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case((3, 2, 40)),
    Case((0, 2, 8)),
    Case((1, 1, 1)),
    Case((5, 3, 129), _B, 7),
    Case((1, 33, 16), _H, 24),
    Case((2, 4, 1000), _B),
    Case((17, 2, 64), _B, 8),
)
USES = {"gated norm, prefill of 512, 32 heads of 128": Case((512, 32, 128), _B, 8192)}

KERNEL = TritonKernel(
    run=gated_norm, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
