"""Products with block-quantized weights on NVIDIA and AMD GPUs: the `matmul` op, x [M, K] times the
values of w [N, row bytes], and `matmul_gelu` and `matmul_gated`, which make more of a product.

Weights stay as they are in memory; each program decodes the blocks it needs in registers, with
fp32 sums. The forms:

* **Few rows** (`operand_kernel`), for decoding up to 32 sequences in 16 bits: the time goes to
  reading weights, so operands of matrix instructions are made of packed codes, two at once, which
  nothing rounds (`operands`).
* **Tiles** (`tile_kernel`), of more rows: ROWS rows of x by COLUMNS rows of w, COUNT groups of 32
  values at a time, decoded (`blocks`), rounded to x's type and multiplied by matrix instructions.
* **Few rows in fp32**, whose products matrix instructions would round: packed codes four at a time
  (`word_kernel`, `words`); one row of the types that it does not have value by value
  (`row_kernel`).

The first two apply an activation to what they have summed, before it is rounded. Of a gated unit a
program multiplies as many rows of gate as of up, in turn, so that the two numbers of a result are
registers of one thread: eight rows of each where a thread has the same row of every eight, one of
each where a thread has columns next to each other.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.gated import activation
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import MAX_REGISTERS, Call, power_of_two
from mtmd.kernels.gpu.quant_matmul.blocks import add_product, decode, decoded, read, units_from
from mtmd.kernels.gpu.quant_matmul.cases import (
    ACTIVATED_NMSE,
    CASES,
    GATED_CASES,
    GATED_USES,
    GELU_CASES,
    GELU_USES,
    KINDS,
    NMSE,
    USES,
    product_error,
)
from mtmd.kernels.gpu.quant_matmul.grids import grids_of
from mtmd.kernels.gpu.quant_matmul.operands import (
    columns_of,
    eights_of,
    max_warps,
    product,
    result_rows,
    units_at_once,
)
from mtmd.kernels.gpu.quant_matmul.words import MAX_ROWS, UNIT_VALUES, UNROLLED, dot
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, declared, relative_error, same
from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.blocks import BLOCKS

MAX_EIGHTS = 4  # of rows of x by operands of packed codes
GROUP = 32  # values that are decoded together: no block is smaller


@dataclass(frozen=True)
class Operands:
    """Operands of `matmul`, of `matmul_gelu` with `act`, and of `matmul_gated` with both: x [...,
    K], w u8 [N, bytes of K values], bias [N] -> [..., N], of gated units [..., N / 2], in x's type
    """

    x: Type
    w: Type
    bias: Type | None = None
    _: KW_ONLY
    quant: str
    act: str = ""
    gated: bool = False


def of_gelu(*types: Any, approximate: str, quant: str) -> Operands:
    return Operands(*types, quant=quant, act=approximate)


def of_gate(*types: Any, act: str, quant: str) -> Operands:
    return Operands(*types, quant=quant, act=act, gated=True)


@triton.jit
def tile_kernel(p, M, N, K, row_bytes, C: tl.constexpr):
    """WHOLE: K is a multiple of 32 COUNT. Programs that share rows of w follow each other, so that
    its bytes stay in the second cache. ACT: of the result, nothing of none.
    """
    VALUES: tl.constexpr = 32 * C.COUNT
    QUANT: tl.constexpr = C.QUANT
    blocks = tl.cdiv(M, C.ROWS)
    m = tl.program_id(0) % blocks * C.ROWS + tl.arange(0, C.ROWS)
    first = tl.program_id(0) // blocks * C.COLUMNS
    n = tl.minimum(first + tl.arange(0, C.COLUMNS), N - 1)  # surplus rows repeat the last one
    if C.GATED:
        n = n // 2 + n % 2 * (N // 2)
    row = n.to(tl.int64) * row_bytes
    x_row = p.x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K
    # The sum stays in fp32 over all of K; only decoded values are rounded, once, to x's type.
    total = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
    words = read(p.w, row, units_from(0, K, QUANT, C.WHOLE, VALUES), QUANT)
    for start in range(0, K, VALUES):
        value = decoded(words, row, start, K, QUANT, C.WHOLE, VALUES, p.x.dtype.element_ty, p)
        # What the next step takes is under way while this one is multiplied.
        words = read(p.w, row, units_from(start + VALUES, K, QUANT, False, VALUES), QUANT)
        total = add_product(total, x_row, None, start, K, value, C.WHOLE)
    if C.BIAS:
        total += tl.load(p.bias + n).to(tl.float32)[None, :]
    if C.GATED:
        gate, up = tl.split(tl.reshape(total, [C.ROWS, C.COLUMNS // 2, 2]))
        result = activation(gate, C.ACT) * up
        n = first // 2 + tl.arange(0, C.COLUMNS // 2)
        outer = N // 2
    else:
        result = activation(total, C.ACT) if C.ACT != "" else total
        n = first + tl.arange(0, C.COLUMNS)
        outer = N
    at = m.to(tl.int64)[:, None] * outer + n[None, :]
    inside = (m < M)[:, None] & (n < outer)[None, :]
    tl.store(p.out + at, result.to(p.out.dtype.element_ty), mask=inside)


@triton.jit
def row_kernel(p, N, K, row_bytes, C: tl.constexpr):
    """M = 1, value by value. The sums of a row's 32 COUNT lanes are added at the end."""
    VALUES: tl.constexpr = 32 * C.COUNT
    n = tl.program_id(0) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    row = tl.minimum(n, N - 1).to(tl.int64) * row_bytes
    # A sum for each lane: lanes are added up, which takes shuffles, once and not in every step.
    total = tl.zeros([C.COLUMNS, VALUES], tl.float32)
    for start in range(0, K, VALUES):
        k = start + tl.arange(0, VALUES)
        part = tl.load(p.x + k) if C.WHOLE else tl.load(p.x + k, mask=k < K, other=0)
        value = decode(p.w, row, start, K, C.QUANT, C.WHOLE, VALUES, tl.float32, p)
        total += value * part.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if C.BIAS:
        result += tl.load(p.bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(p.out + n, result.to(p.out.dtype.element_ty), mask=n < N)


@triton.jit
def word_kernel(p, M, N, K, row_bytes, units, C: tl.constexpr):
    """Multiply at most FEW rows of x, four codes at a time, by rows of w of so many units
    (`words`).
    """
    m, n = tl.arange(0, C.FEW), tl.program_id(0) * C.COLUMNS + tl.arange(0, C.COLUMNS)
    row = tl.minimum(n, N - 1).to(tl.int64) * row_bytes  # surplus rows repeat the last one
    x_row = p.x + tl.minimum(m, M - 1).to(tl.int64) * K
    total = tl.zeros([C.FEW, C.COLUMNS, C.COUNT, C.LANES], tl.float32)
    # Loads of the next units are under way while these are multiplied, where registers are left.
    for start in tl.range(0, units, C.COUNT, loop_unroll_factor=C.STEPS):
        unit = start + tl.arange(0, C.COUNT)
        real = (unit < units)[:, None]
        if not C.WHOLE:
            unit = tl.where(unit < units, unit, 0)  # which is there, times zeros
        total += dot(x_row, p.w, row, unit, real, C.QUANT, C.WHOLE)
    result = tl.sum(tl.sum(total, 3), 2)
    if C.BIAS:
        result += tl.load(p.bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(p.out + at, result.to(p.out.dtype.element_ty), mask=inside)


@triton.jit
def operand_kernel(p, M, N, K, row_bytes, units, C: tl.constexpr):
    """Multiply at most 8 EIGHTS rows of x by rows of w of so many units (`operands`). Warps share
    out the units of a row. ACT: as `tile_kernel` has it.
    """
    R: tl.constexpr = C.COLUMNS // 8
    n = eights_of(tl.program_id(0) * C.COLUMNS, C.COLUMNS)
    if C.GATED:  # eights of gate and of up in turn
        outer = N // 2
        n = n // 16 * 8 + n % 8
        row = tl.minimum(n, outer - 1) + tl.arange(0, R)[:, None, None, None] % 2 * outer
    else:
        outer = N
        row = tl.minimum(n, N - 1)  # surplus rows repeat the last one
    m = eights_of(0, 8 * C.EIGHTS, True)
    x_row = p.x + tl.minimum(m, M - 1).to(tl.int64) * K
    w = p.w + row.to(tl.int64) * row_bytes
    result = product(x_row, w, units, C.QUANT, C.WHOLE, C.COUNT, p)
    m = result_rows(0, m.shape[0])
    if C.BIAS:
        result += tl.load(p.bias + tl.reshape(row, [R, 8, 1, 1, 1])).to(tl.float32)
    if C.GATED:
        MT: tl.constexpr = result.shape[3]
        pairs = tl.permute(tl.reshape(result, [R // 2, 2, 8, 4, MT, 2]), (0, 2, 3, 4, 5, 1))
        gate, up = tl.split(pairs)
        result = activation(gate, C.ACT) * up
        n = eights_of(tl.program_id(0) * (C.COLUMNS // 2), C.COLUMNS // 2)
    elif C.ACT != "":
        result = activation(result, C.ACT)
    n = tl.reshape(n, [result.shape[0], 8, 1, 1, 1])
    at = m.to(tl.int64) * outer + n
    tl.store(p.out + at, result.to(p.out.dtype.element_ty), mask=(m < M) & (n < outer))


def rejects(o: Operands) -> str | None:
    """None if a kernel multiplies tensors of these types, else why not. Sizes of M, N and K never
    matter short of the limits of a grid and of 32-bit numbers, which are named.
    """
    x, w = o.x, o.w
    if o.quant not in KINDS:
        return f"weights are {o.quant}; the kernel supports {', '.join(KINDS)}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {name_of(x.dtype)}; the kernel supports bf16, fp16 or fp32"
    if o.act and x.dtype == torch.float32:
        return "x is fp32; the kernel applies an activation to products in bf16 or fp16"
    for name, type_ in (("x", x), ("w", w), ("bias", o.bias)):
        if type_ is not None and not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    rows = x.count // x.shape[-1]
    if max(rows, w.shape[0], x.shape[-1], -(-rows // 16) * -(-w.shape[0] // 4)) >= 2**30:
        return (
            f"{rows} rows x {w.shape[0]} x {x.shape[-1]}; the kernel supports fewer than 2^30 of "
            "each, and of tiles"
        )
    return None


def plan_call(o: Operands) -> Call:
    """Tiles are chosen from the compiler's report alone, not by a GPU's clock."""
    x, quant = o.x, o.quant
    width, outer = x.shape[-1], o.w.shape[0]
    rows, groups = x.count // width, width // GROUP
    scalars: dict[str, int | float] = {"N": outer, "K": width, "row_bytes": o.w.shape[1]}
    constants: dict[str, int | bool | str] = {"QUANT": quant, "BIAS": o.bias is not None}
    if x.dtype != torch.float32 and rows <= 8 * MAX_EIGHTS:
        eights = power_of_two(-(-rows // 8))
        columns = columns_of(outer, eights)
        maximum = max_warps(-(-outer // columns), eights, quant)
        units, count, warps = units_at_once(width, columns, eights, quant, maximum)
        constants |= {"ACT": o.act, "GATED": o.gated, "WHOLE": units % count == 0}
        constants |= {"EIGHTS": eights, "COLUMNS": columns, "COUNT": count}
        scalars |= {"M": rows, "units": units}
        # Left to itself the compiler spills here, Q6_K with Triton 3.6, for a program more.
        spills = eights == 2 and quant in ("Q6_K", "IQ3_XXS")
        registers = MAX_REGISTERS if spills else None
        programs = -(-outer // columns)
        return Call(scalars, constants, programs, warps, 1, registers=registers)
    if rows <= MAX_ROWS.get(quant, 0):
        few = power_of_two(rows)
        units, (columns, count, lanes, warps) = _word_tile(width, quant)
        constants |= {"WHOLE": units % count == 0, "FEW": few}
        constants |= {"COLUMNS": columns, "COUNT": count}
        # Of two steps at once Q5_1 would spill on cuda:90, for 1 % more instructions.
        steps = 1 if quant == "Q5_1" and few == 4 else UNROLLED // lanes
        constants |= {"LANES": lanes, "STEPS": steps}
        scalars |= {"M": rows, "units": units}
        return Call(scalars, constants, -(-outer // columns), warps, 1)
    if rows == 1:
        columns, count = 16, 8  # a block of 256 values from each of 16 rows
        constants |= {"WHOLE": groups % count == 0, "COLUMNS": columns, "COUNT": count}
        return Call(scalars, constants, -(-outer // columns), 4, 1)
    block, columns, count, warps = _tile(rows, x.dtype)
    constants |= {"ACT": o.act, "GATED": o.gated, "WHOLE": groups % count == 0}
    constants |= {"ROWS": block, "COLUMNS": columns, "COUNT": count}
    programs = -(-rows // block) * -(-outer // columns) if rows else 0
    # Left to itself NVIDIA's compiler spills in six types, for a program more on cuda:90.
    registers = MAX_REGISTERS if x.dtype == torch.float32 and block == 32 else None
    return Call({"M": rows, **scalars}, constants, programs, warps, 2, columns * count, registers)


def plan(o: Operands) -> Plan:
    outer = o.w.shape[0] // 2 if o.gated else o.w.shape[0]
    out = Type.contiguous((*o.x.shape[:-1], outer), o.x.dtype)
    if not out.count:
        return Plan(out, [])
    call = plan_call(o)
    tile = [name for name in ("ROWS", "FEW", "COLUMNS", "COUNT") if name in call.constants]
    title = f"{o.quant} matmul{f' and {o.act}' * bool(o.act)}{' gate' * o.gated}"
    grids = grids_of(o.quant)
    pointers = same("x w bias out") | same(" ".join(grids))
    return Plan(out, [Launch(kernel_of(call), call, pointers, tile, title)], constants=grids)


def _word_tile(width: int, quant: str) -> tuple[int, tuple[int, int, int, int]]:
    """Units of a row; and rows of w, units at a time, lanes of a unit, warps: the units that four
    warps take, or fewer where more than a quarter of all would be past the end.
    """
    values = UNIT_VALUES[quant]
    units = width // values
    # threads of a unit: of those of 64 values, two with 16 bytes each, for two halves of the rows
    columns, lanes, threads = {32: (4, 4, 4), 64: (8, 8, 4), 128: (4, 8, 8)}[values]
    warps = 4
    while warps > 1 and -units % (warps * 32 // threads) * 4 > units:
        warps //= 2
    return units, (columns, warps * 32 // threads, lanes, warps)


def _tile(rows: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows of x, rows of w, groups of 32 values, warps."""
    if dtype == torch.float32:
        # Exact fp32 runs on plain multiply-adds on NVIDIA, whose operands take many registers.
        return (16, 32, 4, 4) if rows <= 16 else (32, 32, 4, 4)
    return (64, 64, 4, 4) if rows <= 64 else (128, 64, 4, 8)


def kernel_of(call: Call) -> object:
    """The kernel that a call is for."""
    if "LANES" in call.constants:
        return word_kernel
    if "EIGHTS" in call.constants:
        return operand_kernel
    return tile_kernel if "ROWS" in call.constants else row_kernel


KERNEL, GELU_KERNEL, GATED_KERNEL = (
    declared(
        operands,
        plan,
        rejects,
        what="quantized matmul",
        aligned=lambda o: {"w": math.gcd(BLOCKS[o.quant].bytes, 4)},
        cases=cases,
        uses=uses,
        error=error,
        limits=limits,
    )
    for operands, cases, uses, error, limits in (
        (Operands, CASES, USES, product_error, NMSE),
        (of_gelu, GELU_CASES, GELU_USES, relative_error, ACTIVATED_NMSE),
        (of_gate, GATED_CASES, GATED_USES, relative_error, ACTIVATED_NMSE),
    )
)
