"""Blocks of weights as 16-bit integers, each type as its layout has them.

`UNPACK[kind]` has the layout of x and `terms(e, chunk)`, which writes the code for the blocks of
one chunk: the integers q, vector by vector, a scale and perhaps a minimum, so that with x = s n

    w . x = sum over lanes of  scale s (start + sum of q n)  +  minimum extra

The layouts of the blocks are ggml's (ggml-common.h); kernels/quantization/ is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mtmd.kernels.cpu.native.emit import I8, I16, I32, I64, Emitter, Value, scalar_of, vec
from mtmd.kernels.cpu.native.layouts import LANES, SUMS, Layout, Piece
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES


@dataclass(frozen=True)
class Terms:
    """`vectors` writes the code of each as it is asked for. `scales` and `minima` are fp32 [16],
    one for each part of a chunk.
    """

    vectors: Iterator[Value]
    scales: Sequence[Value]
    minima: Sequence[Value] = ()


@dataclass(frozen=True)
class Unpack:
    kind: str
    layout: Layout
    terms: Callable[[Emitter, Value], Terms]

    @property
    def chunk_bytes(self) -> int:
        block = BLOCKS[self.kind]
        return self.layout.values // block.values * block.bytes


# Small blocks: four of 32 values, or two where a code is a byte -----------------------------------

# The 16 bytes of codes of a block fill 128 bits: lower nibbles are its first run of values, upper
# nibbles its second; even bytes come before odd ones.
_NIBBLES = tuple(
    tuple((2 * block + high, odd, 2) for block in range(4)) for high in range(2) for odd in range(2)
)
# Whole bytes are widened in their order: first runs of both blocks, then second ones.
_BYTES = tuple(
    tuple((2 * block + half, start, 1) for block in range(2) for start in (0, 8))
    for half in range(2)
)


def _side_by_side(e: Emitter, chunk: Value, stride: int, at: int, count: int = 4) -> Value:
    """16 bytes of every block as int16."""
    parts = [e.load(chunk.at(block * stride + at), vec(I64, 2), align=1) for block in range(count)]
    while len(parts) > 1:
        parts = [a.concat(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].bits(vec(I16, 8 * count))


def _words(e: Emitter, chunk: Value) -> Value:
    """The first 64 bytes as 16-bit words. To be loaded after the codes: LLVM would take smaller
    loads that follow out of this vector, by many instructions.
    """
    return e.load(chunk, vec(I16, LANES), align=1)


def _each(words: Sequence[int]) -> list[int]:
    """The lanes of the sums that belong to so many blocks."""
    return [word for word in words for _ in range(SUMS // len(words))]


def _nibbles(codes: Value) -> Iterator[Value]:
    yield codes & 15
    yield (codes >> 8) & 15
    yield (codes >> 4) & 15
    yield codes >> 12


def _with_fifth(codes: Value, low: Value, high: Value) -> Iterator[Value]:
    """`low` and `high` are words of fifth bits as `_spread` gives them."""
    e = codes.e
    for index, nibble in enumerate(_nibbles(codes)):
        bits = e.const(vec(I16, LANES), [4 + (2 * lane + index % 2) % 8 for lane in range(LANES)])
        yield nibble | (((low if index < 2 else high) >> bits) & 16)


def _q8_0(e: Emitter, chunk: Value) -> Terms:
    codes = [_side_by_side(e, chunk, 34, 2 + 16 * half, 2) for half in range(2)]
    vectors = (half.bits(vec(I8, LANES)).sext(I16) for half in codes)
    return Terms(vectors, [_words(e, chunk).shuffle(_each((0, 17))).half_to_f32()])


def _q4_0(e: Emitter, chunk: Value) -> Terms:
    codes = _side_by_side(e, chunk, 18, 2)
    return Terms(_nibbles(codes), [_words(e, chunk).shuffle(_each((0, 9, 18, 27))).half_to_f32()])


def _q4_1(e: Emitter, chunk: Value) -> Terms:
    codes, words = _side_by_side(e, chunk, 20, 4), _words(e, chunk)
    scale, minimum = (
        words.shuffle(_each([10 * block + word for block in range(4)])).half_to_f32()
        for word in range(2)
    )
    return Terms(_nibbles(codes), [scale], [minimum])


def _heads(words: Value, word: int) -> Value:
    """A word of the 8 of each block, as a number of the sum's lanes."""
    return words.shuffle(_each([8 * block + word for block in range(4)])).half_to_f32()


def _spread(words: Value, word: int) -> Value:
    """A word of the 8 of each block, in the upper bytes of its lanes: the first byte for four of
    them, then the second.
    """
    order = [byte for lane in range(8) for byte in (-1, 2 * word + lane // 4)]
    return words.e.bytes_of_lanes(words.bits(vec(I8, 64)), order).bits(words.type)


def _q5_0(e: Emitter, chunk: Value) -> Terms:
    head, codes = _side_by_side(e, chunk, 22, 0), _side_by_side(e, chunk, 22, 6)
    return Terms(_with_fifth(codes, _spread(head, 1), _spread(head, 2)), [_heads(head, 0)])


def _q5_1(e: Emitter, chunk: Value) -> Terms:
    head, codes = _side_by_side(e, chunk, 24, 0), _side_by_side(e, chunk, 24, 8)
    vectors = _with_fifth(codes, _spread(head, 2), _spread(head, 3))
    return Terms(vectors, [_heads(head, 0)], [_heads(head, 1)])


def _iq4(e: Emitter, codes: Value) -> Iterator[Value]:
    """The numbers that nibbles stand for."""
    whole = codes.bits(vec(I8, 2 * codes.lanes))
    for nibbles in (whole & 15, whole >> 4):
        numbers = e.lookup16(IQ4_VALUES, nibbles).bits(codes.type)
        yield (numbers << 8).ashr(8)
        yield numbers.ashr(8)


def _iq4_nl(e: Emitter, chunk: Value) -> Terms:
    codes = _side_by_side(e, chunk, 18, 2)
    scale = _words(e, chunk).shuffle(_each((0, 9, 18, 27))).half_to_f32()
    return Terms(_iq4(e, codes), [scale])


# Blocks of 256 values with a small integer for each group, which is multiplied in -----------------


def _runs(parts: Sequence[int], odd: int) -> tuple[Piece, ...]:
    """Even or odd values of runs."""
    return tuple((run, odd, 2) for run in parts)


# 64 bytes of codes hold two groups of 32 values in lower nibbles and two in upper ones.
_K4 = tuple(
    _runs([8 * side + 2 * high + run for run in (0, 1, 4, 5)], odd)
    for side in range(2)
    for high in range(2)
    for odd in range(2)
)
# The lower nibbles of 64 bytes are two groups side by side, the upper ones two more.
_K6 = tuple(
    _runs([8 * side + 4 * high + run for run in range(4)], odd)
    for side in range(2)
    for high in range(2)
    for odd in range(2)
)
# 32 bytes hold four groups of 32 values, two bits each.
_K2 = tuple(
    _runs([2 * part + run for run in (0, 1, 8, 9)], odd) for part in range(4) for odd in range(2)
)
# 16 bytes hold 16 values in lower nibbles and 16 in upper ones.
_X4 = tuple(
    _runs([8 * side + high + run for run in (0, 2, 4, 6)], odd)
    for side in range(2)
    for high in range(2)
    for odd in range(2)
)


def _half(e: Emitter, chunk: Value, at: int) -> Value:
    """The fp16 number at a byte, in every lane."""
    return e.load(chunk.at(at), I16, align=1).half_to_f32().splat(SUMS)


def _bytes(e: Emitter, *words: Value) -> Value:
    """64-bit words as bytes."""
    if len(words) == 1:
        return words[0].bits(vec(I8, 8))
    vector = e.const(vec(I64, len(words)), 0)
    for index, word in enumerate(words):
        vector = vector.insert(index, word)
    return vector.bits(vec(I8, 8 * len(words)))


def _filled(numbers: Value) -> Value:
    """Small integers as fp32 [16], zeros after the last."""
    if numbers.lanes < SUMS:
        numbers = numbers.concat(numbers.e.const(numbers.type, 0))
    return numbers.sitofp()


def _times(
    vectors: Iterator[Value], factors: Value, pieces: Sequence[tuple[Piece, ...]], group: int
) -> Iterator[Value]:
    """Each integer times the one of its group: int16 [groups], or bytes without a sign."""
    e = factors.e
    if scalar_of(factors.type) == I8:  # in all four quarters, to be spread by byte shuffles
        factors = factors.shuffle([i % factors.lanes for i in range(2 * LANES)])
    for vector, parts in zip(vectors, pieces, strict=True):
        lanes = [parts[lane // 8][0] * 16 // group for lane in range(LANES)]
        if factors.lanes == 2 * LANES:
            order = [at for lane in lanes for at in (lane, -1)]
            yield vector * e.bytes_of_lanes(factors, order).bits(vector.type)
        else:
            yield vector * factors.shuffle(lanes)


def _moved(bits: Value, to: int, mask: int, at: Sequence[int]) -> Value:
    """Fields of some bits, in the first and second half of the lanes `at` those places, to a place
    of all.
    """
    e = bits.e
    right = [location - to for location in at for _ in range(LANES // 2)]
    if all(shift == 0 for shift in right):
        moved = bits
    elif min(right) >= 0:
        moved = bits >> e.const(bits.type, right)
    else:
        assert max(right) <= 0
        moved = bits << e.const(bits.type, [-shift for shift in right])
    return moved & (mask << to)


def _twice(e: Emitter, ptr: Value) -> Value:
    """32 bytes in both halves of a vector."""
    once = e.load(ptr, vec(I8, 32), align=1)
    return once.concat(once).bits(vec(I16, LANES))


def factors4(e: Emitter, chunk: Value) -> tuple[Value, Value]:
    """6-bit factors of scales and minima, from 12 bytes at 4: int8 [8] each.

    Bytes 0-3 hold the factors of scales 0-3 and bytes 4-7 those of minima 0-3; their upper 2 bits
    are the upper bits of factors 4-7, whose lower 4 bits share bytes 8-11.
    """
    first, second, low = (e.load(chunk.at(at), I32, align=1).zext(I64) for at in (4, 8, 12))
    upper, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    scales = (low & four) | ((first >> 2) & two)
    minima = ((low >> 4) & four) | ((second >> 2) & two)
    return (
        _bytes(e, (first & upper) | (scales << 32)),
        _bytes(e, (second & upper) | (minima << 32)),
    )


def _codes4(e: Emitter, chunk: Value, at: int) -> Iterator[Value]:
    for side in range(2):
        yield from _nibbles(e.load(chunk.at(at + 64 * side), vec(I16, LANES), align=1))


def _q4_k(e: Emitter, chunk: Value) -> Terms:
    scales, minima = factors4(e, chunk)
    vectors = _times(_codes4(e, chunk, 16), scales, _K4, 32)
    minimum = _filled(minima.zext(I32)) * -_half(e, chunk, 2)
    return Terms(vectors, [_half(e, chunk, 0)], [minimum])


def _q5_k(e: Emitter, chunk: Value) -> Terms:
    scales, minima = factors4(e, chunk)

    def vectors() -> Iterator[Value]:
        fifth = _twice(e, chunk.at(16))
        for index, codes in enumerate(_codes4(e, chunk, 48)):
            side, high, odd = index // 4, index // 2 % 2, index % 2
            group = 4 * side + high + 8 * odd
            yield codes | _moved(fifth, 4, 1, (group, group + 2))

    minimum = _filled(minima.zext(I32)) * -_half(e, chunk, 2)
    return Terms(_times(vectors(), scales, _K4, 32), [_half(e, chunk, 0)], [minimum])


def _q6_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for side in range(2):
            upper = _twice(e, chunk.at(128 + 32 * side))
            codes = e.load(chunk.at(64 * side), vec(I16, LANES), align=1)
            for index, nibbles in enumerate(_nibbles(codes)):
                at = 4 * (index // 2) + 8 * (index % 2)
                yield nibbles | _moved(upper, 4, 3, (at, at + 2))

    scales, d = e.load(chunk.at(192), vec(I8, 16), align=1), _half(e, chunk, 208)
    minimum = scales.sext(I32).sitofp() * (d * -32.0)
    return Terms(_times(vectors(), scales.sext(I16), _K6, 16), [d], [minimum])


def _codes2(e: Emitter, chunk: Value, at: int) -> Iterator[Value]:
    codes = e.load(chunk.at(at), vec(I16, LANES), align=1)
    for part in range(4):
        for odd in range(2):
            yield (codes >> 2 * part + 8 * odd) & 3


def _q2_k(e: Emitter, chunk: Value) -> Terms:
    factors = e.load(chunk, vec(I8, 16), align=1)
    minimum = (factors >> 4).zext(I32).sitofp() * -_half(e, chunk, 82)
    vectors = _times(_codes2(e, chunk, 16), factors & 15, _K2, 16)
    return Terms(vectors, [_half(e, chunk, 80)], [minimum])


def _q3_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        third = _twice(e, chunk)
        for index, codes in enumerate(_codes2(e, chunk, 32)):
            at = index // 2 + 8 * (index % 2)
            picked = e.const(vec(I16, LANES), [1 << at] * 16 + [1 << at + 4] * 16)
            yield e.select((third & picked).ne(0), codes | 4, codes)

    low = e.load(chunk.at(96), I64, align=1)
    two = e.load(chunk.at(104), I32, align=1).zext(I64)
    four, upper = 0x0F0F0F0F0F0F0F0F, 0x03030303
    pairs = [((two >> 4 * i) & upper) | (((two >> 4 * i + 2) & upper) << 32) for i in range(2)]
    factors = _bytes(e, (low & four) | (pairs[0] << 4), ((low >> 4) & four) | (pairs[1] << 4)) - 32
    d = _half(e, chunk, 108)
    minimum = factors.sext(I32).sitofp() * (d * -4.0)
    return Terms(_times(vectors(), factors.sext(I16), _K2, 16), [d], [minimum])


def _iq4_xs(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for side in range(2):
            yield from _iq4(e, e.load(chunk.at(8 + 64 * side), vec(I16, LANES), align=1))

    eight = vec(I32, 8)
    low = e.load(chunk.at(4), I32, align=1).splat(8) >> e.const(eight, range(0, 32, 4))
    high = e.load(chunk.at(2), I16, align=1).zext(I32).splat(8) >> e.const(eight, range(0, 16, 2))
    factors = ((low & 15) | ((high & 3) << 4)) - 32
    return Terms(_times(vectors(), factors.trunc(I16), _X4, 32), [_half(e, chunk, 0)])


_ALL = (
    Unpack("Q8_0", Layout("bytes", _BYTES, 32), _q8_0),
    Unpack("Q4_0", Layout("nibbles-8", _NIBBLES, 32, zero=-8), _q4_0),
    Unpack("Q4_1", Layout("nibbles+m", _NIBBLES, 32, lane=True), _q4_1),
    Unpack("Q5_0", Layout("nibbles-16", _NIBBLES, 32, zero=-16), _q5_0),
    Unpack("Q5_1", Layout("nibbles+m", _NIBBLES, 32, lane=True), _q5_1),
    Unpack("IQ4_NL", Layout("nibbles", _NIBBLES, 32), _iq4_nl),
    # A lane adds up 16 products of all 256, which have to stay below 2^31: 16 * 63 * 128 * 16383 in
    # Q6_K, 16 * 127 * 32 * 32767 in IQ4_XS, less in the others
    Unpack("Q2_K", Layout("k2", _K2, 256, run=16), _q2_k),
    Unpack("Q3_K", Layout("k2", _K2, 256, run=16), _q3_k),
    Unpack("Q4_K", Layout("k4", _K4, 256, run=32), _q4_k),
    Unpack("Q5_K", Layout("k4", _K4, 256, run=32), _q5_k),
    Unpack("Q6_K", Layout("k6", _K6, 256, limit=16383, run=16), _q6_k),
    Unpack("IQ4_XS", Layout("x4", _X4, 256), _iq4_xs),
)
UNPACK = MappingProxyType({unpack.kind: unpack for unpack in _ALL})
