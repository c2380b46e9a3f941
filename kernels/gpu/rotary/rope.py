"""Rotary position embedding (arXiv:2104.09864), for NVIDIA and AMD GPUs: the `rope` op in one
launch, and `rope_columns`, which turns heads where they lie in a product.

    y_i = x_i cos - x_j sin          y_j = x_j cos + x_i sin          for each pair (i, j)

One program makes a block of rows (a head of a token each). A value's partner is loaded beside it:
the cache has the row. Products are fp32 and the result is rounded once.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from math import prod

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.rotary.turn import turn
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
MAXIMUM = 1024  # values of a head
TILE = 1024  # values of a program


@dataclass(frozen=True)
class Operands:
    """Operands of `rope`: x [..., T, H, K], table [T, 2, R] -> x's shape, contiguous"""

    x: Type
    table: Type
    _: KW_ONLY
    pairs: str = "half"
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Columns(Operands):
    """Columns of `rope_columns`: x [..., T, D], table [T, 2, R] -> [..., T, D]"""

    start: int
    stop: int
    head: int

    @property
    def heads(self) -> Operands:
        """Return the heads of all tokens of x, whichever batch entry they are of."""
        shape = prod(self.x.shape[:-1]), (self.stop - self.start) // self.head, self.head
        kind = Type(shape, self.x.dtype, (self.x.shape[-1], self.head, 1))
        return Operands(kind, self.table, pairs=self.pairs, parts=self.parts)


@triton.jit(do_not_specialize=["N", "T"])
def rope_kernel(x, table, out, N, T, H, x_batch, x_step, x_head, C: tl.constexpr):
    """ROWS of the N rows, each a head of a token of a batch entry."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    there = row < N
    h, t = row % H, row // H % T
    rows = row // H // T * x_batch + t * x_step + h * x_head
    c = tl.arange(0, C.COLUMNS)
    values = turn(x, rows, there, c, table + t * (2 * C.R), x, rows, C)
    tl.store(
        out + row[:, None] * C.K + c[None, :],
        values.to(out.dtype.element_ty),
        mask=there[:, None] & (c < C.K)[None, :],
    )


@triton.jit(do_not_specialize=["N", "T"])
def rope_columns_kernel(x, table, out, N, T, H, D, first, C: tl.constexpr):
    """ROWS of the N heads, H of each token from column `first` of D on. `out` may be x."""
    row = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    there = row < N
    token = row // H
    rows = token * D + first + row % H * C.K
    c = tl.arange(0, C.COLUMNS)
    values = turn(x, rows, there, c, table + token % T * (2 * C.R), x, rows, C)
    tl.debug_barrier()  # other warps have read a value's partner before it is overwritten
    at = rows[:, None] + c[None, :]
    mask = there[:, None] & (c < C.K)[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


def rejects(o: Operands) -> str | None:
    """None if the kernel turns heads of these types, else why not."""
    x, table = o.x, o.table
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel supports bf16, fp16 or fp32"
    if table.dtype != torch.float32 or not table.is_contiguous:
        return (
            f"table is {table}, strides {list(table.strides)}; the kernel supports fp32, contiguous"
        )
    if len(x.shape) > 4 or x.strides[-1] != 1:
        return (
            f"x {list(x.shape)} has strides {list(x.strides)}; the kernel supports up to 4 "
            "dimensions, stride 1 in the last"
        )
    if x.shape[-1] > MAXIMUM or prod(x.shape[:-1]) >= 2**31:
        return (
            f"{prod(x.shape[:-1])} heads of {x.shape[-1]} values; the kernel supports "
            "below 2^31 of "
            f"up to {MAXIMUM}"
        )
    return None


def _call(o: Operands) -> Call:
    *_, tokens, heads, width = o.x.shape
    count = prod(o.x.shape[:-1])
    columns = power_of_two(width)
    rows = max(1, TILE // columns)
    return Call(
        {
            "N": count,
            "T": tokens,
            "H": heads,
            "x_batch": o.x.strides[0] if len(o.x.shape) == 4 else 0,
            "x_step": o.x.strides[-3],
            "x_head": o.x.strides[-2],
        },
        {
            "K": width,
            "R": o.table.shape[2],
            "PARTS": o.parts,
            "ADJACENT": o.pairs == "adjacent",
            "NORM": False,
            "WEIGHT": False,
            "ROWS": rows,
            "COLUMNS": columns,
        },
        -(-count // rows) if width else 0,
        4,
        1,
    )


def plan(o: Operands) -> Plan:
    out = Type.contiguous(o.x.shape, o.x.dtype)
    return Plan(out, [Launch(rope_kernel, _call(o), tile=("ROWS", "COLUMNS"))])


def rejects_columns(o: Columns) -> str | None:
    """None if the kernel turns heads in a product of this type, else why not."""
    if not o.x.is_contiguous:
        return f"x has strides {list(o.x.strides)}; the kernel needs it contiguous"
    return rejects(o.heads)


def plan_columns(o: Columns) -> Plan:
    call = _call(o.heads)
    sizes = {"T": o.x.shape[-2], "H": (o.stop - o.start) // o.head, "D": o.x.shape[-1]}
    call = replace(call, scalars={"N": call.scalars["N"], **sizes, "first": o.start})
    out = Type.contiguous(o.x.shape, o.x.dtype)
    return Plan(out, [Launch(rope_columns_kernel, call, tile=("ROWS", "COLUMNS"))])


def _table(rng: torch.Generator, tokens: int, turned: int) -> torch.Tensor:
    angles = torch.rand(tokens, turned, generator=rng) * 100
    return torch.stack((angles.cos(), angles.sin()), 1)


@case
def problem(
    rng: torch.Generator,
    shape: tuple[int, ...],
    turned: int,
    dtype: torch.dtype = torch.float32,
    pairs: str = "half",
    parts: int = 1,
    fused: bool = False,
) -> Problem:
    """The shape of x, and its pairs. `fused`: x is some heads of more, which hold NaN."""
    *lead, heads, width = shape
    x = torch.full((*lead, heads + 2 * fused, width), torch.nan)
    x[..., :heads, :] = torch.randn(*lead, heads, width, generator=rng)
    table = _table(rng, lead[-1], turned)
    return given(x.to(dtype)[..., :heads, :], table, pairs=pairs, parts=parts)


_B, _H = torch.bfloat16, torch.float16

CASES = (
    problem((1, 1, 8), 4),
    problem((0, 2, 8), 4),
    problem((5, 3, 24), 12, _B),
    problem((7, 2, 40), 12, _H, "adjacent"),
    problem((2, 9, 3, 72), 36, _B, fused=True),
    problem((3, 5, 2, 80), 40, parts=2),
    problem((17, 5, 128), 64, _B, "adjacent", fused=True),
    problem((3, 2, 64), 32, _B, "adjacent", 2),
    problem((2, 1, 256), 128, parts=4),
)
USES = {
    "rope, decoding, 40 heads of 128": problem((1, 40, 128), 64, _B),
    "rope, 4096 patches, 16 heads of 80": problem((1, 4096, 16, 80), 40, _B, fused=True),
    "rope, prefill of 512, 12 heads of 256": problem((512, 12, 256), 128, _B),
}

KERNEL = declared(Operands, plan, rejects, what="rope", cases=CASES, uses=USES, limits=NMSE)


@case
def product(
    rng: torch.Generator,
    shape: tuple[int, ...],
    turned: int,
    dtype: torch.dtype = torch.float32,
    pairs: str = "half",
    parts: int = 1,
    before: int = 0,
) -> Problem:
    """Tokens of some batch entries with so many heads, of which `before` are not turned, nor are as
    many columns as one has behind them.
    """
    *lead, heads, head = shape
    x = torch.randn(*lead, (before + heads + 1) * head, generator=rng).to(dtype)
    span = {"start": before * head, "stop": (before + heads) * head, "head": head}
    return given(x, _table(rng, lead[-1], turned), **span, pairs=pairs, parts=parts)


ROPE_COLUMNS = declared(
    Columns,
    plan_columns,
    rejects_columns,
    what="rope of columns",
    overwrites=True,
    copies=True,
    cases=(
        product((3, 2, 8), 4),
        product((0, 2, 8), 4),
        product((5, 3, 24), 12, _B, before=1),
        product((7, 2, 40), 12, _H, "adjacent"),
        product((2, 9, 3, 72), 36, _B),
        product((3, 5, 2, 80), 40, parts=2, before=2),
        product((17, 5, 128), 64, _B, "adjacent", 2),
    ),
    uses={
        "rope of a product, 4096 patches, 32 heads of 80": product((1, 4096, 32, 80), 40, _B),
        "rope of a product, 784 patches, 32 heads of 64": product((1, 784, 32, 64), 32, _B),
    },
    limits=NMSE,
)
