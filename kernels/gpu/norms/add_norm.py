"""A residual and the norm behind it, for NVIDIA and AMD GPUs: the `add_norm` op in one launch.

    s = x + y, or x + rms_norm(y) w_y          result = s, rms_norm(s) w

One program makes a block of rows, each read once and kept in registers. s is rounded to its type
before its own norm is taken, as it is where both are ops; sums are fp32.
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
def add_norm_kernel(
    x,
    y,
    w,
    y_norm,
    out,
    N,
    D,
    eps,
    y_eps,
    Y_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of N rows of D values. `out` holds N sums and then N norms."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    at = row[:, None] * D + c[None, :]
    there = (row < N)[:, None] & (c < D)[None, :]
    added = tl.load(y + at, mask=there, other=0).to(tl.float32)
    if Y_NORM:
        added *= tl.rsqrt(tl.sum(added * added, 1) / D + y_eps)[:, None]
        added *= tl.load(y_norm + c, mask=c < D, other=0).to(tl.float32)[None, :]
        added = added.to(x.dtype.element_ty).to(tl.float32)
    total = tl.load(x + at, mask=there, other=0).to(tl.float32) + added
    total = total.to(x.dtype.element_ty)
    tl.store(out + at, total, mask=there)
    values = total.to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
    values *= tl.load(w + c, mask=c < D, other=0).to(tl.float32)[None, :]
    after = N.to(tl.int64) * D
    tl.store(out + after + at, values.to(x.dtype.element_ty), mask=there)


def rejects(x: Type, y: Type, w: Type, y_norm: Type | None = None, **options: Any) -> str | None:
    """None if the kernel takes rows of these types, else why not."""
    del options
    return rejects_rows(x, {"x": x, "y": y, "w": w, "y's norm": y_norm})


def plan_call(
    x: Type,
    y: Type,  # noqa: ARG001
    w: Type,  # noqa: ARG001
    y_norm: Type | None = None,
    *,
    eps: float,
    y_eps: float | None = None,
) -> Call:
    scalars = {"eps": float(eps), "y_eps": float(y_eps or 0)}
    return call_of(x, scalars, {"Y_NORM": y_norm is not None})


def add_norm(
    x: Tensor, y: Tensor, w: Tensor, y_norm: Tensor | None = None, **options: Any
) -> Tensor:
    """The `add_norm` op: x, y [..., D], w, y_norm [D] -> [2, ..., D]

    Raises PlacementError with what `rejects` says.
    """
    types = [None if t is None else Type.of(t) for t in (x, y, w, y_norm)]
    reason = rejects(*types)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"residual and norm on the GPU: {reason}")
    out = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
    call = plan_call(*types, **options)  # type: ignore[arg-type]
    if call.programs:
        run_call(add_norm_kernel, call, (x, y, w, w if y_norm is None else y_norm, out))
    return out


def program(x: Type, y: Type, w: Type, y_norm: Type | None = None, **options: Any) -> Program:
    """What a run on these types launches."""
    call = plan_call(x, y, w, y_norm, **options)
    operands = {"x": x, "y": y, "w": w, "y_norm": y_norm or w, "out": fresh(x)}
    return Program(add_norm_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: the shape of x and y. `normed`: y is, too."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    normed: bool = False
    weight: torch.dtype = torch.float32

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} {name_of(self.dtype)} w {name_of(self.weight)}"
        return text + " normed" * self.normed

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": 1e-6, "y_eps": 1e-5 if self.normed else None}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        rng = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(self.shape, generator=rng).to(self.dtype).to(device) for _ in "xy")
        w, other = (
            torch.rand(self.shape[-1], generator=rng).add_(0.5).to(self.weight).to(device)
            for _ in "wy"
        )
        return x, y, w, other if self.normed else None


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case((3, 40)),
    Case((0, 8)),
    Case((1, 1)),
    Case((5, 129), _B, True),
    Case((2, 3, 300), _H, weight=_H),
    Case((1, 2560), _B, True),
    Case((17, 64), _B),
    Case((2, 5000), torch.float32, True),
)
USES = {
    "residual and norm, decoding, 2560 values, both normed": Case((1, 2560), _B, True),
    "residual and norm, 16 rows of 4096": Case((16, 4096), _B),
    "residual and norm, prefill of 512, 4096 values": Case((512, 4096), _B),
    "residual and norm, prefill of 512, 8192 values, both normed": Case((512, 8192), _B, True),
}

KERNEL = TritonKernel(
    run=add_norm, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
