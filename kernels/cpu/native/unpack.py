"""Blocks of weights as 16-bit integers, each type as its layout has them.

`UNPACK[kind]` has the layout of x and `terms(e, chunk)`, which writes the code for the blocks of
one chunk: the integers q, vector by vector, a scale and perhaps a minimum, so that with x = s n

    w . x = sum over lanes of  scale s (start + sum of q n)  +  minimum extra

The layouts of the blocks are ggml's (ggml-common.h) or our own; kernels/quantization/ is the
reference. Types whose codes choose rows of a grid are in grids.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mtmd.kernels.cpu.native.emit import F32, I1, I8, I16, I32, I64, Emitter, Value, scalar_of, vec
from mtmd.kernels.cpu.native.grids import GRIDS, GROUPS, MORE
from mtmd.kernels.cpu.native.layouts import LANES, SUMS, Layout, Piece
from mtmd.kernels.quantization.blocks import BLOCKS
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import BNB_FP4_VALUES, NF4_VALUES


@dataclass(frozen=True)
class Terms:
    """`vectors` writes the code of each as it is asked for. `scales` and `minima` are fp32 [16],
    one for each part of a chunk.
    """

    vectors: Iterator[Value]
    scales: Sequence[Value]
    minima: Sequence[Value] = ()
    factors: Iterator[Value] | None = None
    """Of bytes (planes.py): what pairs of each vector are multiplied with, int16 [16]."""
    minimum: Value | None = None
    """Of bytes: what all minima are multiplied with, fp32 [8]."""


@dataclass(frozen=True)
class Unpack:
    kind: str
    layout: Layout
    terms: Callable[[Emitter, Value], Terms]
    largest: int = 0  # of bytes

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
    return _joined(e, chunk, [block * stride + at for block in range(count)])


def _joined(e: Emitter, chunk: Value, locations: Sequence[int]) -> Value:
    """16 bytes at each place as int16."""
    parts = [e.load(chunk.at(at), vec(I64, 2), align=1) for at in locations]
    while len(parts) > 1:
        parts = [a.concat(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].bits(vec(I16, 8 * len(locations)))


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


def _looked_up(e: Emitter, values: Sequence[int], codes: Value) -> Iterator[Value]:
    """The numbers that nibbles stand for."""
    whole = codes.bits(vec(I8, 2 * codes.lanes))
    for nibbles in (whole & 15, whole >> 4):
        numbers = e.lookup16(values, nibbles).bits(codes.type)
        yield (numbers << 8).ashr(8)
        yield numbers.ashr(8)


def _iq4_nl(e: Emitter, chunk: Value) -> Terms:
    codes = _side_by_side(e, chunk, 18, 2)
    scale = _words(e, chunk).shuffle(_each((0, 9, 18, 27))).half_to_f32()
    return Terms(_looked_up(e, IQ4_VALUES, codes), [scale])


def _mxfp4(e: Emitter, chunk: Value) -> Terms:
    codes = _joined(e, chunk, [17 * block + 1 for block in range(4)])
    exponents = e.load(chunk, vec(I8, 64), align=1).shuffle((0, 17, 34, 51)).zext(I32)
    scales = half_of_power(exponents).shuffle(_each(range(4)))
    return Terms(_looked_up(e, FP4_VALUES, codes), [scales])


def half_of_power(exponents: Value) -> Value:
    """Half of 2^(exponent - 127), for numbers that are doubled: int32 -> fp32."""
    # The two least have no exponent of their own
    bits = exponents.e.select(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)
    return bits.bits(vec(F32, bits.lanes))


def fp4_scale(codes: Value) -> Value:
    """Half of 8-bit floats without sign, for numbers that are doubled: int8 -> fp32. 0x7F is 0."""
    e, numbers = codes.e, codes.zext(I16)
    bits = e.select(numbers.eq(0x7F), e.const(numbers.type, 0), (numbers & 0x7F) << 7)
    return bits.half_to_f32() * (HALVES_LESS / 2)


def _fp4_scales(codes: Value) -> Value:
    """Scales of 8 groups, for the sum's lanes."""
    return fp4_scale(codes).shuffle([lane // 2 for lane in range(SUMS)])


def _nvfp4(e: Emitter, chunk: Value) -> Terms:
    codes = _joined(e, chunk, (4, 20, 40, 56))
    words = e.load(chunk, vec(I32, 10), align=1).shuffle((0, 9)).bits(vec(I8, 8))
    return Terms(_looked_up(e, FP4_VALUES, codes), [_fp4_scales(words)])


def _nv4_128(e: Emitter, chunk: Value) -> Terms:
    codes = e.load(chunk.at(12), vec(I16, LANES), align=1)
    scales = _fp4_scales(e.load(chunk.at(4), vec(I8, 8), align=1))
    return Terms(_looked_up(e, FP4_VALUES, codes), [scales * e.load(chunk, F32, align=1)])


def _q1_0(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for at in range(2, 18, 4):
            bits = e.load(chunk.at(at), I32, align=1).bits(vec(I1, LANES))
            yield e.select(bits, e.const(vec(I16, LANES), 2), e.const(vec(I16, LANES), 0))

    return Terms(vectors(), [_half(e, chunk, 0)])


def header(word: Value) -> tuple[Value, Value]:
    """The scale and what a zero point adds, of header words of our own types."""
    scale = (word & -256).bits(vec(F32, word.lanes))
    return scale, (word & 255).sitofp() * -scale


def _u4_32(e: Emitter, chunk: Value) -> Terms:
    codes = _side_by_side(e, chunk, 20, 4)
    scale, minimum = header(_words(e, chunk).bits(vec(I32, 16)).shuffle(_each((0, 5, 10, 15))))
    return Terms(_nibbles(codes), [scale], [minimum])


def _two_heads(e: Emitter, chunk: Value) -> Value:
    """The first words of two blocks of 36 bytes, for the sum's lanes."""
    return e.load(chunk, vec(I32, 10), align=1).shuffle(_each((0, 9)))


def two_halves(words: Value) -> tuple[Value, Value]:
    """The fp16 numbers that are the halves of words."""
    return words.trunc(I16).half_to_f32(), (words >> 16).trunc(I16).half_to_f32()


def _u4_64(e: Emitter, chunk: Value) -> Terms:
    codes = _joined(e, chunk, (4, 20, 40, 56))
    scale, minimum = header(_two_heads(e, chunk))
    return Terms(_nibbles(codes), [scale], [minimum])


def _a4_64(e: Emitter, chunk: Value) -> Terms:
    codes = _joined(e, chunk, (4, 20, 40, 56))
    scale, minimum = two_halves(_two_heads(e, chunk))
    return Terms(_nibbles(codes), [scale], [minimum])


def _a8_32(e: Emitter, chunk: Value) -> Terms:
    codes = [_joined(e, chunk, (4 + 16 * half, 40 + 16 * half)) for half in range(2)]
    scale, minimum = two_halves(_two_heads(e, chunk))
    vectors = (half.bits(vec(I8, LANES)).zext(I16) for half in codes)
    return Terms(vectors, [scale], [minimum])


def _u8_64(e: Emitter, chunk: Value) -> Terms:
    codes = (e.load(chunk.at(at), vec(I8, LANES), align=1).zext(I16) for at in (4, 36))
    scale, minimum = header(e.load(chunk, I32, align=1))
    return Terms(codes, [scale.splat(SUMS)], [minimum.splat(SUMS)])


# Blocks of floating-point numbers -----------------------------------------------------------------


HALVES_LESS = 2.0**8  # what 8-bit floats are more than the halves that they are widened to


def e4m3(codes: Value) -> Value:
    """8-bit floats, whose bits are int16 with the sign, as the bits of halves."""
    halves = ((codes & 0x7F) << 7) | (codes & -0x8000)
    return codes.e.select((codes & 0x7F).eq(0x7F), halves | 0x7FFF, halves)


def _f8_64(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for at in range(4, 68, SUMS):
            yield e4m3(e.load(chunk.at(at), vec(I8, SUMS), align=1).sext(I16)).half_to_f32()

    scale = header(e.load(chunk, I32, align=1))[0] * HALVES_LESS
    return Terms(vectors(), [scale.splat(SUMS)])


def _table4(values: Sequence[float]) -> Callable[[Emitter, Value], Terms]:
    """Codes of 4 bits for numbers of a table."""

    def terms(e: Emitter, chunk: Value) -> Terms:
        def vectors() -> Iterator[Value]:
            for at in (4, 20):
                codes = e.load(chunk.at(at), vec(I8, SUMS), align=1).zext(I32)
                for shift in (0, 4):
                    yield e.lookup16_f32(values, codes >> shift)

        scale, _ = header(e.load(chunk, I32, align=1))
        return Terms(vectors(), [scale.splat(SUMS)])

    return terms


def _halves(floats: Callable[[Value], Value]) -> Callable[[Emitter, Value], Terms]:
    """Plain numbers of 16 bits."""

    def terms(e: Emitter, chunk: Value) -> Terms:
        def vectors() -> Iterator[Value]:
            for at in range(0, 128, 2 * SUMS):
                yield floats(e.load(chunk.at(at), vec(I16, SUMS), align=1))

        return Terms(vectors(), [e.f32(1.0, SUMS)])

    return terms


def bf16_to_f32(bits: Value) -> Value:
    """Numbers of which bfloat16 has the upper half."""
    return (bits.zext(I32) << 16).bits(vec(F32, bits.lanes))


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
    """Each integer times the one of its group: int16 [groups], or bytes without a sign. Integers
    are below 128.
    """
    e = factors.e
    if scalar_of(factors.type) == I16 and not e.has("avx512bw"):
        yield from _times_signed(vectors, factors, pieces, group)
        return
    if scalar_of(factors.type) == I8:  # in all four quarters, to be spread by byte shuffles
        factors = factors.shuffle([i % factors.lanes for i in range(2 * LANES)])
    for vector, parts in zip(vectors, pieces, strict=True):
        lanes = [parts[lane // 8][0] * 16 // group for lane in range(LANES)]
        if factors.lanes == 2 * LANES:
            order = [at for lane in lanes for at in (lane, -1)]
            yield vector * e.bytes_of_lanes(factors, order).bits(vector.type)
        else:
            yield vector * factors.shuffle(lanes)


def _times_signed(
    vectors: Iterator[Value], factors: Value, pieces: Sequence[tuple[Piece, ...]], group: int
) -> Iterator[Value]:
    """Do what `_times` does with factors of 8 bits. Shuffles do not leave a quarter of a vector:
    both numbers are in upper bytes, and their product in the upper half of what it is then.
    """
    e, count = factors.e, factors.lanes
    spread = factors.trunc(I8).shuffle([i % count for i in range(2 * LANES)])
    for vector, parts in zip(vectors, pieces, strict=True):
        order = [at for lane in range(LANES) for at in (-1, parts[lane // 8][0] * 16 // group)]
        upper = e.bytes_of_lanes(spread, order).bits(vector.type)
        yield (((vector << 8).sext(I32) * upper.sext(I32)) >> 16).trunc(I16)


def _moved(bits: Value, to: int, mask: int, at: Sequence[int]) -> Value:
    """Fields of some bits, in the first and second half of the lanes `at` those locations, to a
    location of all.
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


def factors3(e: Emitter, chunk: Value) -> Value:
    """6-bit factors less 32: int8 [16]. Their lower 4 bits are in 8 bytes, the upper 2 in 4."""
    low = e.load(chunk.at(96), I64, align=1)
    two = e.load(chunk.at(104), I32, align=1).zext(I64)
    four, upper = 0x0F0F0F0F0F0F0F0F, 0x03030303
    pairs = [((two >> 4 * i) & upper) | (((two >> 4 * i + 2) & upper) << 32) for i in range(2)]
    return _bytes(e, (low & four) | (pairs[0] << 4), ((low >> 4) & four) | (pairs[1] << 4)) - 32


def _q3_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        third = _twice(e, chunk)
        for index, codes in enumerate(_codes2(e, chunk, 32)):
            at = index // 2 + 8 * (index % 2)
            bits, more = (third << 2, 2) if at < 2 else (third, 0)  # moved in one direction
            yield codes | _moved(bits, 2, 1, (at + more, at + 4 + more))

    factors = factors3(e, chunk)
    d = _half(e, chunk, 108)
    minimum = factors.sext(I32).sitofp() * (d * -4.0)
    return Terms(_times(vectors(), factors.sext(I16), _K2, 16), [d], [minimum])


def factors_x4(e: Emitter, chunk: Value) -> Value:
    """6-bit factors less 32: int32 [8]."""
    eight = vec(I32, 8)
    low = e.load(chunk.at(4), I32, align=1).splat(8) >> e.const(eight, range(0, 32, 4))
    high = e.load(chunk.at(2), I16, align=1).zext(I32).splat(8) >> e.const(eight, range(0, 16, 2))
    return ((low & 15) | ((high & 3) << 4)) - 32


def _iq4_xs(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for side in range(2):
            codes = e.load(chunk.at(8 + 64 * side), vec(I16, LANES), align=1)
            yield from _looked_up(e, IQ4_VALUES, codes)

    factors = factors_x4(e, chunk)
    return Terms(_times(vectors(), factors.trunc(I16), _X4, 32), [_half(e, chunk, 0)])


# Ternary digits, and rows of grids: no integers to multiply in -----------------------------------


def _natural(vectors: int) -> tuple[tuple[Piece, ...], ...]:
    """All values in their order."""
    return tuple(
        tuple((2 * v + half, start, 1) for half in range(2) for start in (0, 8))
        for v in range(vectors)
    )


# 64 bytes of rows are one of each of 8 groups of 32 values; even bytes come before odd ones.
_ROWS = tuple(
    tuple((2 * group + j // 2, 8 * (j % 2) + odd, 2) for group in range(GROUPS))
    for j in range(4)
    for odd in range(2)
)
# 8 bytes hold 8 values in lower nibbles and 8 in upper ones.
_EIGHTS = tuple(
    tuple((group, 8 * high + odd, 2) for group in range(8)) for high in range(2) for odd in range(2)
)


def _tq2_0(e: Emitter, chunk: Value) -> Terms:
    return Terms(_codes2(e, chunk, 0), [_half(e, chunk, 64)])


def _tq1_0(e: Emitter, chunk: Value) -> Terms:
    """A byte is a fraction of 256 in base 3: what multiplying by 3 carries is its next digit."""

    def vectors() -> Iterator[Value]:
        first = e.load(chunk, vec(I8, LANES), align=1).zext(I16)
        second = e.load(chunk.at(32), vec(I8, 16), align=1)
        second = second.concat(second).zext(I16)
        last = e.load(chunk.at(48), vec(I8, 4), align=1).shuffle([i % 4 for i in range(16)])
        third = second.bits(second.type).shuffle(range(16)).concat(last.zext(I16))
        for codes, powers in (
            *((first, [power] * LANES) for power in range(5)),
            *((second, [power] * 16 + [power + 1] * 16) for power in (0, 2)),
            (third, [4] * 16 + [i // 4 for i in range(16)]),
        ):
            # The fraction's bits in the upper byte, those before them cut off
            factors = [signed16(256 * 3**power) for power in powers]
            yield carried(codes * e.const(codes.type, factors))

    return Terms(vectors(), [_half(e, chunk, 52)])


def carried(fractions: Value) -> Value:
    """Return what multiplying fractions of 2^16 by 3 carries."""
    return ((fractions.zext(I32) * 3) >> 16).trunc(I16)


def signed16(number: int) -> int:
    """A number's lower 16 bits, with a sign."""
    return (number + 0x8000) % 0x10000 - 0x8000


def _grid(kind: str) -> Callable[[Emitter, Value], Terms]:
    own = GRIDS[kind]

    def terms(e: Emitter, chunk: Value) -> Terms:
        def vectors() -> Iterator[Value]:
            for row in own.rows(e, chunk, e.i64(0), GROUPS):
                words = row.bits(vec(I16, LANES))
                yield words & 255
                yield words >> 8

        scales = own.scales(e, chunk)
        return Terms(
            vectors(),
            [
                scales.shuffle([lane // 2 * own.halves + half for lane in range(SUMS)])
                for half in range(own.halves)
            ],
        )

    return terms


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
    Unpack("TQ1_0", Layout("natural-1", _natural(8), 256, zero=-1), _tq1_0),
    Unpack("TQ2_0", Layout("k2-1", _K2, 256, zero=-1), _tq2_0),
    Unpack("Q1_0", Layout("bits-1", _natural(4), 128, zero=-1), _q1_0),
    Unpack("MXFP4", Layout("nibbles", _NIBBLES, 32), _mxfp4),
    Unpack("NVFP4", Layout("eights", _EIGHTS, 16), _nvfp4),
    Unpack("NV4_128", Layout("eights", _EIGHTS, 16), _nv4_128),
    Unpack("U4_32", Layout("nibbles+m", _NIBBLES, 32, lane=True), _u4_32),
    Unpack("U4_64", Layout("nibbles+m", _NIBBLES, 32, lane=True), _u4_64),
    Unpack("A4_64", Layout("nibbles+m", _NIBBLES, 32, lane=True), _a4_64),
    Unpack("A8_32", Layout("bytes+m", _BYTES, 32, lane=True), _a8_32),
    Unpack("U8_64", Layout("bytes of 64+m", _natural(2), 64, lane=True), _u8_64),
    Unpack("F8_64", Layout("real", _natural(4), 64, real=True), _f8_64),
    Unpack("NF4_64", Layout("real", _natural(4), 64, real=True), _table4(NF4_VALUES)),
    Unpack("FP4_64", Layout("real", _natural(4), 64, real=True), _table4(BNB_FP4_VALUES)),
    Unpack("BF16_32", Layout("real", _natural(4), 64, real=True), _halves(bf16_to_f32)),
    Unpack("F16_32", Layout("real", _natural(4), 64, real=True), _halves(Value.half_to_f32)),
    *(
        Unpack(
            kind, Layout(f"rows {own.halves}", _ROWS, 32, zero=-MORE, parts=own.halves), _grid(kind)
        )
        for kind, own in GRIDS.items()
    ),
)
UNPACK = MappingProxyType({unpack.kind: unpack for unpack in _ALL})
