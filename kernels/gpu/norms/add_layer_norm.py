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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.gpu.norms.residual import NMSE, call_of, rejects_rows
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type


@triton.jit(do_not_specialize=["N"])
def add_layer_norm_kernel(
    x,
    y,
    w,
    b,
    scale,
    out,
    N,
    D,
    eps,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of N rows of D values. `out` holds N sums and then N norms."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    at = row[:, None] * D + c[None, :]
    there = (row < N)[:, None] & (c < D)[None, :]
    added = tl.load(y + at, mask=there, other=0).to(tl.float32)
    if SCALE:
        added *= tl.load(scale + c, mask=c < D, other=0).to(tl.float32)[None, :]
        added = added.to(x.dtype.element_ty).to(tl.float32)
    total = tl.load(x + at, mask=there, other=0).to(tl.float32) + added
    total = total.to(x.dtype.element_ty)
    tl.store(out + at, total, mask=there)
    values = total.to(tl.float32)
    values -= (tl.sum(values, 1) / D)[:, None]
    values = tl.where(there, values, 0)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    values *= tl.load(w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    if BIAS:
        values += tl.load(b + c, mask=c < D, other=0).to(tl.float32)[None, :]
    after = N.to(tl.int64) * D
    tl.store(out + after + at, values.to(x.dtype.element_ty), mask=there)


def rejects(
    x: Type, y: Type, w: Type, b: Type | None = None, scale: Type | None = None, **options: Any
) -> str | None:
    """None if the kernel takes rows of these types, else why not."""
    del options
    return rejects_rows(x, {"x": x, "y": y, "w": w, "b": b, "the scale": scale})


def plan_call(
    x: Type,
    y: Type,  # noqa: ARG001
    w: Type,  # noqa: ARG001
    b: Type | None = None,
    scale: Type | None = None,
    *,
    eps: float,
) -> Call:
    return call_of(x, {"eps": float(eps)}, {"BIAS": b is not None, "SCALE": scale is not None})


def add_layer_norm(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The `add_layer_norm` op: x, y [..., D], w, b, scale [D] -> [2, ..., D]

    Raises PlacementError with what `rejects` says.
    """
    types = [None if t is None else Type.of(t) for t in (x, y, w, b, scale)]
    reason = rejects(*types)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"residual and layer norm on the GPU: {reason}")
    out = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    call = plan_call(*types, **options)  # type: ignore[arg-type]
    if call.programs:
        weights = (w, w if b is None else b, w if scale is None else scale)
        run_call(add_layer_norm_kernel, call, (x, y, *weights, out))
    return out


def program(
    x: Type, y: Type, w: Type, b: Type | None = None, scale: Type | None = None, **options: Any
) -> Program:
    """What a run on these types launches."""
    call = plan_call(x, y, w, b, scale, **options)
    operands = {"x": x, "y": y, "w": w, "b": b or w, "scale": scale or w, "out": fresh(x)}
    return Program(add_layer_norm_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: the shape of x and y. `mean`: of the sums' values, about; `scaled`: y is."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bias: bool = True
    mean: float = 0.0
    scaled: bool = False

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)}"
        text += " no bias" * (not self.bias) + f" mean {self.mean:g}" * bool(self.mean)
        return text + " scaled" * self.scaled

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": 1e-5}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        rng = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(self.shape, generator=rng).to(self.dtype).to(device) for _ in "xy")
        w, b, scale = (
            torch.rand(self.shape[-1], generator=rng).add_(0.5).to(self.dtype).to(device)
            for _ in "wbs"
        )
        x += self.mean
        return x, y, w, b if self.bias else None, scale if self.scaled else None


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case((3, 40)),
    Case((0, 8)),
    Case((1, 1), bias=False),
    Case((5, 129), _B),
    Case((2, 3, 300), _H, bias=False),
    Case((1, 1152), _B, mean=8.0),
    Case((17, 64), _B),
    Case((2, 5000), mean=30.0),
    Case((3, 131), scaled=True),
    Case((2, 2, 1030), _H, False, scaled=True),
    Case((1, 1024), _B, scaled=True),
)
USES = {
    "residual and layer norm, 4096 patches of 1152 values": Case((1, 4096, 1152), _B),
    "residual and layer norm, 1025 patches of 1024 values, scaled": Case(
        (1, 1025, 1024), _B, scaled=True
    ),
    "residual and layer norm, 3200 values": Case((1, 1025, 3200), _B),
    "residual and layer norm, decoding, 8192 values, no bias": Case((1, 8192), _B, bias=False),
}

KERNEL = TritonKernel(
    run=add_layer_norm, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
