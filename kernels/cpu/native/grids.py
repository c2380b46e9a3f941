"""Blocks whose codes choose rows of a grid: IQ1, IQ2 and IQ3.

All of them have 8 groups of 32 values, each four times 8 values: a row of 8 numbers, or two of 4,
with a sign for each value, or a shift for all 8. `Grid.rows` gives what the codes of some groups
stand for, 128 more, as bytes, so that a sign is a byte subtracted from 256. Groups lie side by
side, so that a lane of the products' sums belongs to one of them.

kernels/quantization/iq_quants.py is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from llvmlite import ir

from mtmd.kernels.cpu.native.emit import I1, I8, I16, I32, I64, Emitter, Value, size_of, vec
from mtmd.kernels.quantization import iq_grids, iq_quants
from mtmd.kernels.quantization.bits import grid

GROUPS = 8  # of a block
MORE = 128  # than numbers stand for
# IQ1's numbers are -1, 0 and 1, an eighth more or less: in eighths, of which the grid has one more
EIGHTHS, SHIFT = 8, 1


@dataclass(frozen=True)
class Grid:
    """Describes how a type is read.

    `rows(e, block, first, groups)`: int8 [8 * groups] for each of the four times 8 values of each
    group of 32; `groups` is 8 or 1. `scales(e, block)`: fp32 [8 * halves], for groups of 32 or 16.
    """

    rows: Callable[[Emitter, Value, Value, int], list[Value]]
    scales: Callable[[Emitter, Value], Value]
    halves: int = 1


@lru_cache(maxsize=8)
def _numbers(packed: str, values: tuple[int, ...], width: int, more: int) -> tuple[int, ...]:
    """A grid's rows as whole numbers, a byte each."""
    rows = grid(packed, values, width, torch.device("cpu")).int().tolist()
    return tuple(int.from_bytes(bytes(number + more for number in row), "little") for row in rows)


def grid_table(
    e: Emitter, packed: str, values: tuple[int, ...], width: int = 8, more: int = MORE
) -> Value:
    """A grid's rows, whose numbers are `more` than what they stand for."""
    return e.table(I64 if width == 8 else I32, _numbers(packed, values, width, more))


def _wide(e: Emitter, ptr: Value, scalar: ir.Type, first: Value, groups: int) -> Value:
    """A number of each group, int64 [groups]."""
    numbers = e.load(ptr, vec(scalar, groups), first, align=1)
    return numbers if scalar == I64 else numbers.zext(I64)


def _signed(e: Emitter, row: Value, signs: Value) -> Value:
    """Bytes of rows, negative where the lower 8 bits of a group's signs say so."""
    numbers = row.bits(vec(I8, 8 * signs.lanes))
    if signs.lanes > 1 and not e.has("avx512bw"):  # bits are no masks there: spread to bytes
        order = [0] * 8 + [8] * 8
        spread = e.bytes_of_lanes(signs.bits(numbers.type), order)
        bit = e.const(numbers.type, [signed8(1 << i % 8) for i in range(numbers.lanes)])
        return e.select((spread & bit).eq(bit), 0 - numbers, numbers)
    mask = signs.trunc(I8)
    if signs.lanes > 1:
        mask = mask.bits(ir.IntType(8 * signs.lanes))
    return e.select(mask.bits(vec(I1, numbers.lanes)), 0 - numbers, numbers)


def signed8(number: int) -> int:
    """A number's lower 8 bits, with a sign."""
    return (number + 0x80) % 0x100 - 0x80


def eighth(e: Emitter, signs: Value) -> Value:
    """Bytes of signs with an eighth bit, which makes the number of set ones even."""
    bits = vec(I8, size_of(signs.type) * signs.lanes)
    parity = e.call(f"llvm.ctpop.v{bits.count}i8", bits, signs.bits(bits))
    return signs | (parity << 7).bits(signs.type)


def packed_signs(e: Emitter, word: Value) -> Value:
    """Four times 7 bits as bytes."""
    spread = word & 0x7F
    for byte in range(1, 4):
        spread = spread | ((word << byte) & (0x7F << 8 * byte))
    return eighth(e, spread)


def _iq2_xxs(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = grid_table(e, iq_grids.IQ2_XXS, iq_quants.IQ2_VALUES)
    words = _wide(e, block.at(2), I64, first, groups)
    signs = packed_signs(e, words >> 32)
    return [_signed(e, e.gather(table, (words >> 8 * j) & 255), signs >> 8 * j) for j in range(4)]


def _iq2_xs(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = grid_table(e, iq_grids.IQ2_XS, iq_quants.IQ2_VALUES)
    words = _wide(e, block.at(2), I64, first, groups)
    signs = eighth(e, (words >> 9) & 0x007F007F007F007F)
    return [_signed(e, e.gather(table, (words >> 16 * j) & 511), signs >> 16 * j) for j in range(4)]


def _iq2_s(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = grid_table(e, iq_grids.IQ2_S, iq_quants.IQ2_VALUES)
    low, signs = (_wide(e, block.at(at), I32, first, groups) for at in (2, 34))
    high = _wide(e, block.at(66), I8, first, groups)
    result = []
    for j in range(4):
        index = ((low >> 8 * j) & 255) | ((high << (8 - 2 * j)) & 0x300)
        result.append(_signed(e, e.gather(table, index), signs >> 8 * j))
    return result


def _pairs(low: Value, j: int) -> Value:
    """Bytes 2j and 2j + 1 of each group, as 32-bit numbers side by side."""
    both = low >> 16 * j
    return (both & 255) | ((both << 24) & (255 << 32))


def _looked_up(e: Emitter, table: Value, pairs: Value) -> Value:
    """Rows of 4 for both numbers of each group, int64 [groups]."""
    return e.gather(table, pairs.bits(vec(I32, 2 * pairs.lanes))).bits(pairs.type)


def _iq3_xxs(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = grid_table(e, iq_grids.IQ3_XXS, iq_quants.IQ3_XXS_VALUES, 4)
    low = _wide(e, block.at(2), I64, first, groups)
    signs = packed_signs(e, _wide(e, block.at(66), I32, first, groups))
    return [_signed(e, _looked_up(e, table, _pairs(low, j)), signs >> 8 * j) for j in range(4)]


def _iq3_s(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = grid_table(e, iq_grids.IQ3_S, iq_quants.IQ3_S_VALUES, 4)
    low = _wide(e, block.at(2), I64, first, groups)
    high = _wide(e, block.at(66), I8, first, groups)
    signs = _wide(e, block.at(74), I32, first, groups)
    result = []
    for j in range(4):
        ninth = ((high << (8 - 2 * j)) & 256) | ((high << (39 - 2 * j)) & (256 << 32))
        row = _looked_up(e, table, _pairs(low, j) | ninth)
        result.append(_signed(e, row, signs >> 8 * j))
    return result


def _shifted(row: Value, negative: Value) -> Value:
    """A row of IQ1's grid with its shift, which is negative where the lowest bit says so."""
    less = (0 - (negative & 1)) & int.from_bytes(bytes([2 * SHIFT] * 8), "little")
    bits = vec(I8, 8 * row.lanes)
    return row.bits(bits) - less.bits(bits)


IQ1_EIGHTHS = tuple(EIGHTHS * number for number in iq_quants.IQ1_VALUES)


def _iq1_table(e: Emitter) -> Value:
    return grid_table(e, iq_grids.IQ1, IQ1_EIGHTHS, more=MORE + SHIFT)


def _iq1_s(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = _iq1_table(e)
    low = _wide(e, block.at(2), I32, first, groups)
    high = _wide(e, block.at(34), I16, first, groups)
    result = []
    for j in range(4):
        upper = high << 8 - 3 * j if j < 3 else high >> 1
        index = ((low >> 8 * j) & 255) | (upper & 0x700)
        result.append(_shifted(e.gather(table, index), high >> 15))
    return result


def _iq1_m(e: Emitter, block: Value, first: Value, groups: int) -> list[Value]:
    table = _iq1_table(e)
    low = _wide(e, block, I32, first, groups)
    high = _wide(e, block.at(32), I16, first, groups)
    result = []
    for j in range(4):
        upper = high << 8 - 4 * j if j < 3 else high >> 4
        index = ((low >> 8 * j) & 255) | (upper & 0x700)
        result.append(_shifted(e.gather(table, index), high >> 4 * j + 3))
    return result


# Scales -------------------------------------------------------------------------------------------


def _scaled(e: Emitter, block: Value, numbers: Value, more: float, factor: float) -> Value:
    """d (number + more) factor, with the block's d in its first bytes."""
    d = e.load(block, I16, align=1).half_to_f32()
    return (numbers.sitofp() + more) * (d * factor).splat(numbers.lanes)


def _nibbles(e: Emitter, block: Value, at: int, count: int) -> Value:
    """Bytes as twice as many numbers of 4 bits, the lower ones first: int32."""
    packed = e.load(block.at(at), vec(I8, count), align=1)
    order = [i // 2 + count * (i % 2) for i in range(2 * count)]
    return (packed & 15).shuffle(order, packed >> 4).zext(I32)


def _scales_iq2_xxs(e: Emitter, block: Value) -> Value:
    words = e.load(block.at(2), vec(I64, GROUPS), align=1)
    return _scaled(e, block, (words >> 60).trunc(I32), 0.5, 0.25)


def _scales_iq3_xxs(e: Emitter, block: Value) -> Value:
    words = e.load(block.at(66), vec(I32, GROUPS), align=1)
    return _scaled(e, block, words >> 28, 0.5, 0.5)


def _scales_iq1_s(e: Emitter, block: Value) -> Value:
    numbers = (e.load(block.at(34), vec(I16, GROUPS), align=1) >> 12) & 7
    return _scaled(e, block, numbers.zext(I32), 0.5, 2 / EIGHTHS)


def iq1_m_scales(e: Emitter, block: Value) -> tuple[Value, Value]:
    """3 bits for each group of 16, int16 [16], from the low bits of four words; the upper four bits
    of each are those of d, fp32.
    """
    words = e.load(block.at(48), vec(I16, 4), align=1)
    shifts = e.const(vec(I16, 2 * GROUPS), [3 * (i % 4) for i in range(2 * GROUPS)])
    numbers = (words.shuffle([i // 4 for i in range(2 * GROUPS)]) >> shifts) & 7
    whole = e.load(block.at(48), I64, align=1)
    d = (whole >> 12) & 0xF
    for shift, mask in ((24, 0xF0), (36, 0xF00), (48, 0xF000)):
        d = d | ((whole >> shift) & mask)
    return numbers, d.trunc(I16).half_to_f32()


def _scales_iq1_m(e: Emitter, block: Value) -> Value:
    numbers, d = iq1_m_scales(e, block)
    return (numbers.zext(I32).sitofp() + 0.5) * (d * (2 / EIGHTHS)).splat(2 * GROUPS)


GRIDS = MappingProxyType(
    {
        "IQ1_S": Grid(_iq1_s, _scales_iq1_s),
        "IQ1_M": Grid(_iq1_m, _scales_iq1_m, 2),
        "IQ2_XXS": Grid(_iq2_xxs, _scales_iq2_xxs),
        "IQ2_XS": Grid(_iq2_xs, lambda e, b: _scaled(e, b, _nibbles(e, b, 66, 8), 0.5, 0.25), 2),
        "IQ2_S": Grid(_iq2_s, lambda e, b: _scaled(e, b, _nibbles(e, b, 74, 8), 0.5, 0.25), 2),
        "IQ3_XXS": Grid(_iq3_xxs, _scales_iq3_xxs),
        "IQ3_S": Grid(_iq3_s, lambda e, b: _scaled(e, b, _nibbles(e, b, 106, 4), 0.5, 2.0)),
    }
)
