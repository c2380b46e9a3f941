"""Blocks whose codes choose rows of a grid (grids.py), as bytes without a sign.

A vector is a group of 32 values: four rows of 8 numbers of the grid, or eight of 4. Indices are
computed one by one, outside of vectors, from which they would have to be taken out; and the words
that they come from are read anew for each group, as there are too few registers for those of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from mtmd.kernels.cpu.native.emit import I8, I16, I32, I64, Emitter, Value, vec
from mtmd.kernels.cpu.native.grids import (
    GROUPS,
    IQ1_EIGHTHS,
    SHIFT,
    eighth,
    grid_table,
    iq1_m_scales,
    packed_signs,
    signed8,
)
from mtmd.kernels.cpu.native.layouts import LANES
from mtmd.kernels.cpu.native.unpack import Terms, Unpack
from mtmd.kernels.cpu.native.unpack_bytes import half, of_256, spread
from mtmd.kernels.quantization import iq_grids, iq_quants

MORE = 64  # than IQ2's and IQ3's numbers stand for
MORE_EIGHTHS = 9  # than IQ1_M's do
BYTES = vec(I8, LANES)


@dataclass(frozen=True)
class Index:
    """Describes where a row's index lies: its lower bits at byte `at` of a block, in a number for
    each row, `step` bytes from a group's to the next; the others at `high`, in one number for each
    group, `bits` bits for each row.
    """

    at: int
    scalar: ir.Type
    step: int
    high: int = 0
    word: ir.Type = I8
    bits: int = 0
    every: int = 0  # bits from a row's to the next one's

    def read(self, e: Emitter, chunk: Value, group: int, row: int) -> Value:
        location = chunk.at(self.at + self.step * group)
        index = e.load(location, self.scalar, row, align=1).zext(I64)
        if not self.bits:
            return index
        word = e.load(chunk.at(self.high), self.word, group, align=1).zext(I64)
        left = 8 - self.every * row
        moved = word << left if left >= 0 else word >> -left
        return index | (moved & ((1 << self.bits) - 1 << 8))


def _rows(
    e: Emitter, chunk: Value, table: Value, where: Index, width: int = 8, mask: int = -1
) -> Iterator[Value]:
    """The rows of each group, of `width` numbers."""
    count, scalar = LANES // width, I64 if width == 8 else I32
    for group in range(GROUPS):
        e.read_anew()
        rows = e.const(vec(scalar, count), 0)
        for row in range(count):
            index = where.read(e, chunk, group, row) & mask
            rows = rows.insert(row, e.load(table, scalar, index))
        yield rows.bits(BYTES)


def _set(bits: Value, bytes_: Sequence[int], at: Sequence[int]) -> Value:
    """Return whether a bit is set: for each of 32 bytes the byte of `bits` and its bit; all of them
    in one half of int8 [32], or in int8 [16].
    """
    e, begin = bits.e, bytes_[0] // 16 * 16
    twice = bits.shuffle([begin + i % 16 for i in range(LANES)])
    near = e.bytes_of_lanes(twice, [byte - begin for byte in bytes_])
    bit = e.const(BYTES, [signed8(1 << i) for i in at])
    return (near & bit).eq(bit)


def _signed(rows: Iterator[Value], signs: Value) -> Iterator[Value]:
    """Numbers, negative where a bit of int8 [32] says so, and `MORE`."""
    for group, row in enumerate(rows):
        bytes_ = [4 * group + i // 8 for i in range(LANES)]
        negative = _set(signs, bytes_, [i % 8 for i in range(LANES)])
        yield row.e.select(negative, 2 * MORE - row, row)


def _terms(vectors: Iterator[Value], d: Value, factors: Value, less: float) -> Terms:
    """Vectors with whole numbers as factors, 8 of groups or 16 of runs; their bytes are `less` more
    than what they stand for.
    """
    minima = factors if factors.type == vec(I32, GROUPS) else factors.zext(I32)
    return Terms(vectors, [d], [minima.sitofp()], _spread(factors), d * -less)


def _spread(factors: Value) -> Iterator[Value]:
    as_bytes = factors if factors.type == vec(I8, factors.lanes) else factors.trunc(I8)
    runs = 2 * GROUPS
    return spread(as_bytes, [run * factors.lanes // runs for run in range(runs)])


def _nibbles(e: Emitter, chunk: Value, at: int, count: int) -> Value:
    """Odd factors from 4 bits each, of so many bytes, lower ones first: int8 [2 count]."""
    packed = e.load(chunk.at(at), vec(I8, count), align=1)
    order = [i // 2 + count * (i % 2) for i in range(2 * count)]
    return (packed & 15).shuffle(order, packed >> 4) * 2 + 1


def _numbers(e: Emitter, packed: str, values: tuple[int, ...], width: int = 8) -> Value:
    return grid_table(e, packed, values, width, MORE)


def _iq2_xxs(e: Emitter, chunk: Value) -> Terms:
    words = e.load(chunk.at(2), vec(I32, 2 * GROUPS), align=1).shuffle(range(1, 2 * GROUPS, 2))
    signs = packed_signs(e, words).bits(BYTES)
    table = _numbers(e, iq_grids.IQ2_XXS, iq_quants.IQ2_VALUES)
    rows = _rows(e, chunk, table, Index(2, I8, 8))
    return _terms(_signed(rows, signs), half(e, chunk, 0) * 0.125, (words >> 28) * 2 + 1, MORE)


def _iq2_xs(e: Emitter, chunk: Value) -> Terms:
    words = e.load(chunk.at(2), vec(I16, LANES), align=1)
    signs = eighth(e, (words >> 9).trunc(I8))
    table = _numbers(e, iq_grids.IQ2_XS, iq_quants.IQ2_VALUES)
    rows = _rows(e, chunk, table, Index(2, I16, 8), mask=511)
    factors = _nibbles(e, chunk, 66, 8)
    return _terms(_signed(rows, signs), half(e, chunk, 0) * 0.125, factors, MORE)


def _iq2_s(e: Emitter, chunk: Value) -> Terms:
    signs = e.load(chunk.at(34), BYTES, align=1)
    table = _numbers(e, iq_grids.IQ2_S, iq_quants.IQ2_VALUES)
    rows = _rows(e, chunk, table, Index(2, I8, 4, 66, I8, 2, 2))
    factors = _nibbles(e, chunk, 74, 8)
    return _terms(_signed(rows, signs), half(e, chunk, 0) * 0.125, factors, MORE)


def _iq3_xxs(e: Emitter, chunk: Value) -> Terms:
    words = e.load(chunk.at(66), vec(I32, GROUPS), align=1)
    signs = packed_signs(e, words).bits(BYTES)
    table = _numbers(e, iq_grids.IQ3_XXS, iq_quants.IQ3_XXS_VALUES, 4)
    rows = _rows(e, chunk, table, Index(2, I8, 8), 4)
    return _terms(_signed(rows, signs), half(e, chunk, 0) * 0.25, (words >> 28) * 2 + 1, MORE)


def _iq3_s(e: Emitter, chunk: Value) -> Terms:
    signs = e.load(chunk.at(74), BYTES, align=1)
    table = _numbers(e, iq_grids.IQ3_S, iq_quants.IQ3_S_VALUES, 4)
    rows = _rows(e, chunk, table, Index(2, I8, 8, 66, I8, 1, 1), 4)
    return _terms(_signed(rows, signs), half(e, chunk, 0), _nibbles(e, chunk, 106, 4), MORE)


def _iq1_s(e: Emitter, chunk: Value) -> Terms:
    """Numbers of the grid and 1; the shift of a group is part of what all of it is less."""
    table = grid_table(e, iq_grids.IQ1, iq_quants.IQ1_VALUES, more=1)
    rows = _rows(e, chunk, table, Index(2, I8, 4, 34, I16, 3, 3))
    words, d = e.load(chunk.at(34), vec(I16, GROUPS), align=1), half(e, chunk, 0)
    factors = ((words >> 12) & 7) * 2 + 1
    eighths = factors * (words.ashr(15) * 2 - 7)  # -7 or -9
    return Terms(rows, [d], [eighths.sext(I32).sitofp()], _spread(factors), d * 0.125)


def _iq1_m(e: Emitter, chunk: Value) -> Terms:
    table = grid_table(e, iq_grids.IQ1, IQ1_EIGHTHS, more=MORE_EIGHTHS + SHIFT)
    rows = _rows(e, chunk, table, Index(0, I8, 4, 32, I16, 3, 4))
    numbers, d = iq1_m_scales(e, chunk)

    def vectors() -> Iterator[Value]:
        shifts = e.load(chunk.at(32), vec(I8, 16), align=1)
        for group, row in enumerate(rows):
            bytes_ = [2 * group + i // 16 for i in range(LANES)]
            negative = _set(shifts, bytes_, [3 + 4 * (i // 8 % 2) for i in range(LANES)])
            yield row - e.select(negative, e.const(BYTES, 2 * SHIFT), e.const(BYTES, 0))

    return _terms(vectors(), (d * 0.125).splat(8), numbers * 2 + 1, MORE_EIGHTHS)


BLOCKS = (
    Unpack("IQ1_S", of_256("k32", run=32), _iq1_s, 2),
    Unpack("IQ1_M", of_256("k16", run=16), _iq1_m, 18),
    Unpack("IQ2_XXS", of_256("k32", run=32), _iq2_xxs, 107),
    Unpack("IQ2_XS", of_256("k16", run=16), _iq2_xs, 107),
    Unpack("IQ2_S", of_256("k16", run=16), _iq2_s, 107),
    Unpack("IQ3_XXS", of_256("k32", run=32), _iq3_xxs, 126),
    Unpack("IQ3_S", of_256("k32", run=32), _iq3_s, 79),
)
