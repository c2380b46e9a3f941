"""Blocks as bytes without a sign, in vectors of 32, for products as `planes` makes them.

A vector is two runs of 16 values, so that a block's 32 bytes of codes are used as they lie. The
layouts of the blocks are those of unpack.py; grids are in unpack_grids.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, I64, Emitter, Value, vec
from mtmd.kernels.cpu.native.layouts import LANES, UPPER, Layout
from mtmd.kernels.cpu.native.unpack import Terms, Unpack, factors3, factors4
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES

LIMIT = 32639  # 127 * 256 + 127
WORDS = vec(I16, LANES // 2)

Vectors = tuple[tuple[tuple[int, int, int], ...], ...]


def _vectors(*runs: tuple[int, int]) -> Vectors:
    return tuple(tuple((run, 0, 1) for run in pair) for pair in runs)


def _natural(vectors: int) -> Vectors:
    return _vectors(*((2 * v, 2 * v + 1) for v in range(vectors)))


def _bytes(e: Emitter, chunk: Value, at: int) -> Value:
    """32 bytes, as words: there are no shifts of bytes."""
    return e.load(chunk.at(at), vec(I8, LANES), align=1).bits(WORDS)


def _moved(words: Value, right: int, mask: int) -> Value:
    """Fields of bytes, shifted to the right, or to the left where that is negative."""
    shifted = words >> right if right > 0 else words << -right if right else words
    return shifted & (mask * 257)


def half(e: Emitter, chunk: Value, at: int) -> Value:
    """The fp16 number at a byte, in every lane."""
    return e.load(chunk.at(at), I16, align=1).splat(8).half_to_f32()


def _halves(e: Emitter, chunk: Value, at: int) -> tuple[Value, Value]:
    """Two fp16 numbers, in every lane."""
    both = e.load(chunk.at(at), I32, align=1).splat(4).bits(vec(I16, 8)).half_to_f32()
    first, second = ([lane // 2 * 2 + i for lane in range(8)] for i in range(2))
    return both.shuffle(first), both.shuffle(second)


def spread(factors: Value, at: Sequence[int], upper: bool = False) -> Iterator[Value]:
    """The factors of the two runs of each vector as 16-bit words, int16 [16], or as the upper bytes
    of words; of int8 [8 or 16], `at` the location of each run's.
    """
    e, twice = factors.e, factors.shuffle([i % factors.lanes for i in range(LANES)])
    for pair in zip(at[::2], at[1::2], strict=True):
        words = ((-1, here) if upper else (here, -1) for here in pair for _ in range(8))
        yield e.bytes_of_lanes(twice, [byte for word in words for byte in word]).bits(WORDS)


def _twos(e: Emitter, chunk: Value, at: int) -> Iterator[Value]:
    """Codes of 2 bits: four runs of 32 values in each 32 bytes."""
    for side in range(2):
        codes = _bytes(e, chunk, at + 32 * side)
        for part in range(4):
            yield _moved(codes, 2 * part, 3)


def _of_bytes(words: Iterator[Value]) -> Iterator[Value]:
    for word in words:
        yield word.bits(vec(I8, LANES))


def _q2_k(e: Emitter, chunk: Value) -> Terms:
    factors, (d, dmin) = e.load(chunk, vec(I8, 16), align=1), _halves(e, chunk, 80)
    minima, vectors = (factors >> 4).zext(I32).sitofp(), _of_bytes(_twos(e, chunk, 16))
    return Terms(vectors, [d], [minima], spread(factors & 15, range(16)), -dmin)


def _q3_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        third = _bytes(e, chunk, 0)
        for index, codes in enumerate(_twos(e, chunk, 32)):
            yield codes | _moved(third, index - 2, 4)

    factors, d = factors3(e, chunk), half(e, chunk, 108)
    minima = factors.sext(I32).sitofp()
    own = spread(factors, range(16), upper=True)  # signed, and `UPPER` times as large
    return Terms(_of_bytes(vectors()), [d * (1 / UPPER)], [minima], own, d * -4.0)


def _fours(e: Emitter, chunk: Value, at: int) -> Iterator[Value]:
    """Codes of 4 bits: two groups of 32 values in each 32 bytes."""
    for pair in range(4):
        codes = _bytes(e, chunk, at + 32 * pair)
        for high in range(2):
            yield _moved(codes, 4 * high, 15)


def _q45_k(e: Emitter, chunk: Value, vectors: Iterator[Value]) -> Terms:
    (scales, minima), (d, dmin) = factors4(e, chunk), _halves(e, chunk, 0)
    factors = spread(scales, [vector for vector in range(8) for _ in range(2)])
    return Terms(_of_bytes(vectors), [d], [minima.zext(I32).sitofp()], factors, -dmin)


def _q4_k(e: Emitter, chunk: Value) -> Terms:
    return _q45_k(e, chunk, _fours(e, chunk, 16))


def _q5_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        fifth = _bytes(e, chunk, 16)
        for index, codes in enumerate(_fours(e, chunk, 48)):
            yield codes | _moved(fifth, index - 4, 16)

    return _q45_k(e, chunk, vectors())


_K6 = [
    (first, first + 1)
    for side in range(2)
    for pair in range(2)
    for high in range(2)
    for first in [8 * side + 4 * high + 2 * pair]
]


def _q6_k(e: Emitter, chunk: Value) -> Terms:
    def vectors() -> Iterator[Value]:
        for side in range(2):
            upper = _bytes(e, chunk, 128 + 32 * side)
            for pair in range(2):
                codes = _bytes(e, chunk, 64 * side + 32 * pair)
                for high in range(2):
                    bits = _moved(upper, 4 * high + 2 * pair - 4, 48)
                    yield _moved(codes, 4 * high, 15) | bits

    factors, d = e.load(chunk.at(192), vec(I8, 16), align=1), half(e, chunk, 208)
    minima = factors.sext(I32).sitofp()
    groups = [run for pair in _K6 for run in pair]
    own = (words.ashr(8) for words in spread(factors, groups, upper=True))
    return Terms(_of_bytes(vectors()), [d], [minima], own, d * -32.0)


def _tq2_0(e: Emitter, chunk: Value) -> Terms:
    return Terms(_of_bytes(_twos(e, chunk, 0)), [half(e, chunk, 64)])


def _q1_0(e: Emitter, chunk: Value) -> Terms:
    """Bits as 0 and 2."""

    def vectors() -> Iterator[Value]:
        kind = vec(I8, LANES)
        bit = e.const(kind, [(1 << i % 8) - 256 * (i % 8 == 7) for i in range(LANES)])
        bits = e.load(chunk.at(2), vec(I8, LANES // 2), align=1)
        twice = bits.concat(bits)
        for vector in range(4):
            order = [4 * vector + i // 8 for i in range(LANES)]
            own = e.bytes_of_lanes(twice, order)
            yield e.select((own & bit).eq(bit), e.const(kind, 2), e.const(kind, 0))

    return Terms(vectors(), [half(e, chunk, 0)])


def _mxfp4(e: Emitter, chunk: Value) -> Terms:
    """Numbers of the table and 12. A vector has 16 values of one block and 16 of the next."""
    numbers = [number + 12 for number in FP4_VALUES]

    def vectors() -> Iterator[Value]:
        for pair in range(2):
            first, second = (
                e.load(chunk.at(34 * pair + 17 * i + 1), vec(I64, 2), align=1) for i in range(2)
            )
            codes = first.concat(second).bits(WORDS)
            for high in range(2):
                yield e.lookup16(numbers, _moved(codes, 4 * high, 15).bits(vec(I8, LANES)))

    table = e.table(F32, [2.0 ** (exponent - 128) for exponent in range(256)])
    scales = []
    for block in range(4):
        exponent = e.load(chunk.at(17 * block), I8, align=1).zext(I64)
        scales.append(e.load(table, F32, exponent).splat(4))
    return Terms(vectors(), [scales[0].concat(scales[1]), scales[2].concat(scales[3])])


def of_256(name: str, run: int = 0, zero: int = 0) -> Layout:
    """The layout of x for blocks of 256 values in their order."""
    vectors = _natural(8)
    return Layout(f"{name} planes", vectors, 256, LIMIT, zero=zero, run=run, planes=True)


BLOCKS = (
    Unpack("Q2_K", of_256("k16", run=16), _q2_k, 3),
    Unpack("Q3_K", of_256("k16", run=16), _q3_k, 7),
    Unpack("Q4_K", of_256("k32", run=32), _q4_k, 15),
    Unpack("Q5_K", of_256("k32", run=32), _q5_k, 31),
    Unpack(
        "Q6_K",
        Layout("k6 planes", _vectors(*_K6), 256, limit=LIMIT, run=16, planes=True),
        _q6_k,
        63,
    ),
    Unpack("TQ2_0", of_256("k-1", zero=-1), _tq2_0, 3),
    Unpack(
        "Q1_0",
        Layout("bits-1 planes", _natural(4), 128, limit=LIMIT, zero=-1, planes=True),
        _q1_0,
        2,
    ),
    Unpack(
        "MXFP4",
        Layout(
            "blocks-12 planes",
            _vectors((0, 2), (1, 3), (4, 6), (5, 7)),
            32,
            limit=LIMIT,
            zero=-12,
            parts=2,
            planes=True,
        ),
        _mxfp4,
        24,
    ),
)
