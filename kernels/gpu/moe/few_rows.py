"""Products of few rows an expert, in 16 bits, with quantized tables: operands of matrix
instructions are made of packed codes (`quant_matmul/operands.py`), by which a product takes as long
as its weights are read. Decoding one token has one row for each expert that it chose.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import power_of_two
from mtmd.kernels.gpu.moe.choices import activated, block_of, choice_of
from mtmd.kernels.gpu.quant_matmul.operands import (
    add_product,
    columns_of,
    eights_of,
    product,
    read,
    result_rows,
    units_at_once,
    units_from,
)

MAX_ROWS = 32  # an expert, on average


@triton.jit
def _result(first, end, n, OUTER, MT: tl.constexpr):
    """Return, for each number of a result, [R, 8, 4, MT, 2]: its row among the ordered choices,
    whether the row is there, its column, and whether both are.
    """
    rows = result_rows(first, MT)
    n = tl.reshape(n, [n.shape[0], 8, 1, 1, 1])
    there = rows < end
    return rows, there, n, there & (n < OUTER)


@triton.jit(do_not_specialize=["blocks", "blocks_again"])
def few_gated_kernel(p, s, blocks, blocks_again, E, K, F, C: tl.constexpr):
    """ROWS choices, a multiple of 8, by COLUMNS of F values. Blocks of one expert follow each
    other. Rows of `gate` have so many units, of which COUNT are multiplied at once. blocks_again:
    as many as `blocks`, which the compiler does not know.
    """
    COLUMNS: tl.constexpr = C.COLUMNS
    block = tl.program_id(0) % blocks
    expert, first, end = block_of(p, block, E, C)
    if first < end:
        n = eights_of(tl.program_id(0) // blocks * COLUMNS, COLUMNS)
        row = expert * F + tl.minimum(n, F - 1)  # surplus rows repeat the last one
        m = tl.minimum(eights_of(first, C.ROWS, True), end - 1)
        x_row = p.x + choice_of(p.order, m, m < end, C.SINGLE) // C.TOP * K
        gate_row, up_row = p.gate + row * s.gate_step, p.up + row * s.up_step
        MT: tl.constexpr = m.shape[0]
        R: tl.constexpr = COLUMNS // 8
        if C.GATE == C.UP:  # one loop, in which x is read once
            g = tl.zeros([R, C.COUNT, 8, 4, MT, 2], tl.float32)
            u = tl.zeros([R, C.COUNT, 8, 4, MT, 2], tl.float32)
            for start in range(0, s.units, C.COUNT):
                unit = units_from(start, s.units, C.WHOLE, C.COUNT)
                real = start + tl.arange(0, C.COUNT)[None, :, None, None] < s.units
                gates, ups = read(gate_row, unit, C.GATE), read(up_row, unit, C.UP)
                tl.debug_barrier()  # as `product` has it
                g = add_product(g, x_row, gates, unit, real, R, C.GATE, C.WHOLE, p)
                u = add_product(u, x_row, ups, unit, real, R, C.UP, C.WHOLE, p)
            g, u = tl.sum(g, 1), tl.sum(u, 1)
        else:
            g = product(x_row, gate_row, s.units, C.GATE, C.WHOLE, C.COUNT, p)
            u = product(x_row, up_row, s.up_units, C.UP, C.UP_WHOLE, C.UP_COUNT, p)
        if C.SINGLE:  # found anew: else they are kept from before the loop, some of them in memory
            first = tl.program_id(0) % blocks_again
            end = first + 1
            n = eights_of(tl.program_id(0) // blocks_again * COLUMNS, COLUMNS)
        rows, there, n, inside = _result(first, end, n, F, MT)
        if C.ON_INPUT:  # of what both products read, which is the same
            choice = choice_of(p.order, rows, there, C.SINGLE)
            weight = tl.load(p.weights + choice, mask=there, other=0)
            g *= weight
            u *= weight
        at = rows.to(tl.int64) * F + n
        tl.store(p.out + at, activated(g, u, C.ACT).to(p.out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def few_down_kernel(p, blocks, E, K, D, down_step, units, C: tl.constexpr):
    """ROWS choices, a multiple of 8, by COLUMNS of D values; K values each are in `gated`."""
    block = tl.program_id(0) % blocks
    expert, first, end = block_of(p, block, E, C)
    if first < end:
        n = eights_of(tl.program_id(0) // blocks * C.COLUMNS, C.COLUMNS)
        row = expert * D + tl.minimum(n, D - 1)
        m = tl.minimum(eights_of(first, C.ROWS, True), end - 1)
        x_row = p.gated + m.to(tl.int64) * K
        w = p.down + row * down_step
        total = product(x_row, w, units, C.DOWN, C.WHOLE, C.COUNT, p)
        rows, there, n, inside = _result(first, end, n, D, m.shape[0])
        choice = choice_of(p.order, rows, there, C.SINGLE)
        if not C.ON_INPUT:
            total *= tl.load(p.weights + choice, mask=there, other=0)
        tl.store(p.out + choice * D + n, total, mask=inside)


def takes(dtype: torch.dtype, mean: int, *quants: str | None) -> bool:
    """Return whether tables, multiplied by so many rows an expert on average, are taken."""
    return dtype != torch.float32 and mean <= MAX_ROWS and all(quants)


def rows_of_a_block(mean: int) -> int:
    """8, 16 or 32: for a third more than an expert has on average, as each block reads the expert's
    weights again.
    """
    return 8 * min(4, power_of_two(max(1, -(-mean // 6))))


def tiles(
    width: int, outer: int, rows: int, *quants: str
) -> tuple[list[tuple[int, int]], int, int]:
    """Units of a row of each table and how many of them are multiplied at once; columns and warps
    of a program. outer: rows of a table, of all experts that have choices together.
    """
    eights = rows // 8
    columns = columns_of(outer, eights)
    # Two tables take the registers of twice as many columns, and read x once as those do.
    stored = columns if len(quants) == 1 else 32
    tables = 2 if len(quants) > len(set(quants)) else 1
    warps = min(units_at_once(width, stored, eights, q, tables=tables)[2] for q in quants)
    result = [units_at_once(width, stored, eights, q, warps, tables)[:2] for q in quants]
    return result, columns if len(quants) == 1 else 16, warps


def registers(rows: int, *quants: str) -> int | None:
    """The most of a thread, as `Call` has them: of so many rows of a block. Left to themselves
    these would keep a few of Q2_K's in memory on cuda:90.
    """
    if rows == 8 and quants == ("Q2_K",):
        return 112
    return 248 if rows == 32 and quants == ("Q2_K", "Q2_K") else None
