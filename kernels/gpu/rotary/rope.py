"""Rotary position embedding (arXiv:2104.09864), for NVIDIA and AMD GPUs: the `rope` op in one
launch, and `rope_columns`, which turns heads where they lie in a product.

    y_i = x_i cos - x_j sin          y_j = x_j cos + x_i sin          for each pair (i, j)

One program makes a block of rows (a head of a token each). A value's partner is loaded beside it:
the cache has the row. Products are fp32 and the result is rounded once.
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
from mtmd.kernels.gpu.rotary.turn import turn
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel, fresh
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
MOST = 1024  # values of a head
TILE = 1024  # values of a program


@triton.jit(do_not_specialize=["N", "T"])
def rope_kernel(
    x,
    table,
    out,
    N,
    T,
    H,
    x_batch,
    x_step,
    x_head,
    K: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of the N rows, each a head of a token of a batch entry."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < N
    h, t = row % H, row // H % T
    rows = row // H // T * x_batch + t * x_step + h * x_head
    c = tl.arange(0, COLUMNS)
    values = turn(
        x, rows, there, c, table + t * (2 * R), x, rows, K, R, PARTS, ADJACENT, False, False
    )
    tl.store(
        out + row[:, None] * K + c[None, :],
        values.to(out.dtype.element_ty),
        mask=there[:, None] & (c < K)[None, :],
    )


@triton.jit(do_not_specialize=["N", "T"])
def rope_columns_kernel(
    x,
    table,
    out,
    N,
    T,
    H,
    D,
    first,
    K: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of the N heads, H of each token from column `first` of D on. `out` may be x."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < N
    token = row // H
    rows = token * D + first + row % H * K
    c = tl.arange(0, COLUMNS)
    values = turn(
        x, rows, there, c, table + token % T * (2 * R), x, rows, K, R, PARTS, ADJACENT, False, False
    )
    tl.debug_barrier()  # other warps have read a value's partner before it is overwritten
    at = rows[:, None] + c[None, :]
    mask = there[:, None] & (c < K)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


def rejects(x: Type, table: Type, *, pairs: str = "half", parts: int = 1) -> str | None:
    """None if the kernel turns heads of these types, else why not."""
    del pairs, parts
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel takes bf16, fp16 or fp32"
    if table.dtype != torch.float32 or not table.is_contiguous:
        return f"table is {table}, strides {list(table.strides)}; the kernel takes fp32, contiguous"
    if len(x.shape) > 4 or x.strides[-1] != 1:
        return (
            f"x {list(x.shape)} has strides {list(x.strides)}; the kernel takes up to 4 "
            "dimensions, stride 1 in the last"
        )
    if x.shape[-1] > MOST or prod(x.shape[:-1]) >= 2**31:
        return (
            f"{prod(x.shape[:-1])} heads of {x.shape[-1]} values; the kernel takes below 2^31 of "
            f"up to {MOST}"
        )
    return None


def plan_call(x: Type, table: Type, *, pairs: str = "half", parts: int = 1) -> Call:
    *_, tokens, heads, width = x.shape
    count = prod(x.shape[:-1])
    columns = power_of_two(width)
    rows = max(1, TILE // columns)
    scalars: dict[str, int | float] = {
        "N": count,
        "T": tokens,
        "H": heads,
        "x_batch": x.strides[0] if len(x.shape) == 4 else 0,
        "x_step": x.strides[-3],
        "x_head": x.strides[-2],
    }
    constants: dict[str, int | bool | str] = {
        "K": width,
        "R": table.shape[2],
        "PARTS": parts,
        "ADJACENT": pairs == "adjacent",
        "ROWS": rows,
        "COLUMNS": columns,
    }
    return Call(scalars, constants, -(-count // rows) if width else 0, 4, 1)


def rope(x: Tensor, table: Tensor, *, pairs: str = "half", parts: int = 1) -> Tensor:
    """The `rope` op: x [..., T, H, K], table [T, 2, R] -> x's shape, contiguous

    Raises PlacementError with what `rejects` says.
    """
    types = Type.of(x), Type.of(table)
    reason = rejects(*types)
    if reason:
        raise PlacementError(f"rope on the GPU: {reason}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call = plan_call(*types, pairs=pairs, parts=parts)
    if call.programs:
        run_call(rope_kernel, call, (x, table, out))
    return out


def program(x: Type, table: Type, **options: Any) -> Program:
    """What a run on these types launches."""
    operands = {"x": x, "table": table, "out": fresh(x)}
    return Program(rope_kernel, plan_call(x, table, **options), operands, ("ROWS", "COLUMNS"))


def rejects_columns(
    x: Type, table: Type, *, start: int, stop: int, head: int, **how: Any
) -> str | None:
    """None if the kernel turns heads in a product of this type, else why not."""
    if not x.is_contiguous:
        return f"x has strides {list(x.strides)}; the kernel needs it contiguous"
    return rejects(_heads(x, start, stop, head), table, **how)


def _heads(x: Type, start: int, stop: int, head: int) -> Type:
    """Of all tokens of x, whichever batch entry they are of."""
    count = (stop - start) // head
    shape, width = (prod(x.shape[:-1]), count, head), x.shape[-1]
    return Type(shape, x.dtype, (width, head, 1))


def plan_columns(x: Type, table: Type, *, start: int, stop: int, head: int, **how: Any) -> Call:
    call = plan_call(_heads(x, start, stop, head), table, **how)
    scalars: dict[str, int | float] = {
        "N": call.scalars["N"],
        "T": x.shape[-2],
        "H": (stop - start) // head,
        "D": x.shape[-1],
        "first": start,
    }
    return Call(scalars, call.constants, call.programs, call.warps, call.stages)


def rope_columns(x: Tensor, table: Tensor, **options: Any) -> Tensor:
    """The `rope_columns` op: x [..., T, D], table [T, 2, R] -> [..., T, D]

    Raises PlacementError with what `rejects_columns` says.
    """
    return rope_columns_in_place(x.clone(), table, **options)


def rope_columns_in_place(x: Tensor, table: Tensor, **options: Any) -> Tensor:
    """The same into x."""
    types = Type.of(x), Type.of(table)
    reason = rejects_columns(*types, **options)
    if reason:
        raise PlacementError(f"rope of columns on the GPU: {reason}")
    call = plan_columns(*types, **options)
    if call.programs:
        run_call(rope_columns_kernel, call, (x, table, x))
    return x


def columns_program(x: Type, table: Type, **options: Any) -> Program:
    """What a run on these types launches."""
    operands = {"x": x, "table": table, "out": fresh(x)}
    call = plan_columns(x, table, **options)
    return Program(rope_columns_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: the shape of x, and its pairs. `fused`: x is some heads of more."""

    shape: tuple[int, ...]
    turned: int
    dtype: torch.dtype = torch.float32
    pairs: str = "half"
    parts: int = 1
    fused: bool = False

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} R{self.turned} {name_of(self.dtype)} {self.pairs}"
        return text + f" parts {self.parts}" * (self.parts > 1) + " fused" * self.fused

    @property
    def options(self) -> dict[str, Any]:
        return {"pairs": self.pairs, "parts": self.parts}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """x, table; heads that are not x's hold NaN."""
        rng = torch.Generator().manual_seed(seed)
        *lead, heads, width = self.shape
        x = torch.full((*lead, heads + 2 * self.fused, width), torch.nan)
        x[..., :heads, :] = torch.randn(*lead, heads, width, generator=rng)
        angles = torch.rand(lead[-1], self.turned, generator=rng) * 100
        table = torch.stack((angles.cos(), angles.sin()), 1)
        return x.to(self.dtype).to(device)[..., :heads, :], table.to(device)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    Case((1, 1, 8), 4),
    Case((0, 2, 8), 4),
    Case((5, 3, 24), 12, _B),
    Case((7, 2, 40), 12, _H, "adjacent"),
    Case((2, 9, 3, 72), 36, _B, fused=True),
    Case((3, 5, 2, 80), 40, parts=2),
    Case((17, 5, 128), 64, _B, "adjacent", fused=True),
    Case((3, 2, 64), 32, _B, "adjacent", 2),
    Case((2, 1, 256), 128, parts=4),
)
USES = {
    "rope, decoding, 40 heads of 128": Case((1, 40, 128), 64, _B),
    "rope, 4096 patches, 16 heads of 80": Case((1, 4096, 16, 80), 40, _B, fused=True),
    "rope, prefill of 512, 12 heads of 256": Case((512, 12, 256), 128, _B),
}

KERNEL = TritonKernel(
    run=rope, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)


@dataclass(frozen=True)
class Product:
    """One problem of `rope_columns`: tokens of some batch entries with so many heads, of which
    `before` are not turned, nor are as many columns as one has behind them.
    """

    shape: tuple[int, ...]
    turned: int
    dtype: torch.dtype = torch.float32
    pairs: str = "half"
    parts: int = 1
    before: int = 0

    def __str__(self) -> str:
        text = f"{'x'.join(map(str, self.shape))} R{self.turned} {name_of(self.dtype)} {self.pairs}"
        return text + f" parts {self.parts}" * (self.parts > 1) + f" before {self.before}"

    @property
    def options(self) -> dict[str, Any]:
        *_, heads, head = self.shape
        start = self.before * head
        how = {"pairs": self.pairs, "parts": self.parts}
        return {"start": start, "stop": start + heads * head, "head": head, **how}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        rng = torch.Generator().manual_seed(seed)
        *lead, heads, head = self.shape
        x = torch.randn(*lead, (self.before + heads + 1) * head, generator=rng)
        angles = torch.rand(lead[-1], self.turned, generator=rng) * 100
        table = torch.stack((angles.cos(), angles.sin()), 1)
        return x.to(self.dtype).to(device), table.to(device)


ROPE_COLUMNS = TritonKernel(
    run=rope_columns,
    in_place=rope_columns_in_place,
    rejects=rejects_columns,
    program=columns_program,
    cases=(
        Product((3, 2, 8), 4),
        Product((0, 2, 8), 4),
        Product((5, 3, 24), 12, _B, before=1),
        Product((7, 2, 40), 12, _H, "adjacent"),
        Product((2, 9, 3, 72), 36, _B),
        Product((3, 5, 2, 80), 40, parts=2, before=2),
        Product((17, 5, 128), 64, _B, "adjacent", 2),
    ),
    uses={
        "rope of a product, 4096 patches, 32 heads of 80": Product((1, 4096, 32, 80), 40, _B),
        "rope of a product, 784 patches, 32 heads of 64": Product((1, 784, 32, 64), 32, _B),
    },
    limits=NMSE,
)
