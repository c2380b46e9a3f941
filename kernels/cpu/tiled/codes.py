"""Blocks of weights as bfloat16: the integers of every type, which bfloat16 holds exactly, and the
scales and minima of their groups apart.

0x4300 | q is 128 + q in bfloat16 for q below 128, so that codes of up to seven bits are made by a
few operations on bits; signed bytes are rounded, which changes none of them. 8-bit floats are exact
in bfloat16, too. A number is

    scale (q - zero) + minimum

Read by `few_rows`, which multiplies the integers, and by `panel`, which multiplies by the scales
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mtmd.kernels.cpu.native.emit import F32, I1, I8, I16, I32, Emitter, Value, vec
from mtmd.kernels.cpu.native.grids import GRIDS, MORE
from mtmd.kernels.cpu.native.unpack import (
    HALVES_LESS,
    carried,
    e4m3,
    factors3,
    factors4,
    factors_x4,
    fp4_scale,
    half_of_power,
    header,
    signed16,
    two_halves,
)
from mtmd.kernels.quantization.blocks import Block
from mtmd.kernels.quantization.blocks_of_32 import FP4_VALUES, IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import BNB_FP4_VALUES, NF4_VALUES

ROWS = 16  # of the weight, read together
RUN = 32  # numbers of a row
EXACT = 0x4300  # the bits of 128 in bfloat16
TURN = 8  # runs whose scales are read at once: those of a block of 256 numbers


@dataclass(frozen=True)
class Form:
    """Describes how a type is read. `codes(e, block, run)`: the bits of 32 numbers in bfloat16
    [32], which are more by `zero` than what they stand for; `run` of the block at a pointer.
    Blocks of 256 have `scales(e, block)`: float32 [8 * groups], and minima. Small ones have
    `head(e, block, run, group)`, an int32, and `numbers`, which makes float32 of many of them: a
    scale, and a minimum. `floats`: the numbers themselves, float32 [16] twice, where bfloat16 does
    not hold them. `octets`: the codes as int8 [32], where they are signed bytes. `integers`:
    numbers without their scale are whole ones.
    """

    codes: Callable[[Emitter, Value, Value], Value]
    zero: float
    scales: Callable[[Emitter, Value], Sequence[Value]] | None = None
    head: Callable[[Emitter, Value, Value, int], Value] | None = None
    numbers: Callable[[Value], Sequence[Value]] = lambda heads: [heads.bits(vec(F32, heads.lanes))]
    minimum: bool = False
    groups: int = 1  # of a run
    floats: Callable[[Emitter, Value, Value], Sequence[Value]] | None = None
    octets: Callable[[Emitter, Value, Value], Value] | None = None
    integers: bool = True

    def whole(self, e: Emitter, block: Value, run: Value, less: int = 0) -> Value:
        """Return 32 numbers without their scale, less `less`, as int16 [32]; of types whose numbers
        are integers.
        """
        taken = int(self.zero) + less
        if self.octets is not None:
            numbers = self.octets(e, block, run).sext(I16)
        else:
            numbers, taken = self.codes(e, block, run), taken + EXACT - 128
        return numbers - taken if taken else numbers


def read_scales(
    e: Emitter,
    form: Form,
    rows: list[Value],
    turn: Value,
    stop: Value,
    block: Block,
    tables: list[Value],
    heads: Value,
) -> None:
    """Read the scales of some runs: of blocks of 256 [row, run, group], of small ones [run, group,
    row].
    """
    if form.scales is not None:
        for n, row in enumerate(rows):
            result = form.scales(e, row.at(turn // TURN * block.bytes))
            for table, values in zip(tables, result, strict=True):
                e.store(table, values, n * TURN * form.groups)
        return
    assert form.head is not None
    runs = block.values // RUN
    with e.loop(turn, stop) as run:
        for n, row in enumerate(rows):
            here = row.at(run // runs * block.bytes)
            for group in range(form.groups):
                head = form.head(e, here, run % runs, group)
                e.store(heads, head, ((run - turn) * form.groups + group) * ROWS + n)
    for i in range(TURN * form.groups):
        numbers = form.numbers(e.load(heads, vec(I32, ROWS), i * ROWS))
        for table, values in zip(tables, numbers, strict=True):
            e.store(table, values, i * ROWS)


def _exact(words: Value, mask: int) -> Value:
    """128 + q in bfloat16."""
    return (words & mask) | EXACT


def _nibbles(e: Emitter, source: Value) -> Value:
    """Return the nibbles of 16 bytes the lower halves, then the upper ones: int16 [32], other bits
    above them.
    """
    four = e.load(source, vec(I8, 16), align=1).shuffle([i % 16 for i in range(64)])
    words = e.bytes_of_lanes(four, [at for lane in range(RUN) for at in (lane % 16, -1)])
    words = words.bits(vec(I16, RUN))
    return words >> e.const(words.type, [4 * (lane // 16) for lane in range(RUN)])


def _bytes(e: Emitter, source: Value) -> Value:
    """32 bytes as int16 [32]."""
    return e.load(source, vec(I8, RUN), align=1).zext(I16)


def _shifted(words: Value, count: Value) -> Value:
    return words >> count.trunc(I16).splat(RUN)


def _signed(numbers: Value) -> Value:
    """Signed bytes in bfloat16."""
    e = numbers.e
    halves = [numbers.shuffle(range(i, i + 16)).sext(I32).sitofp() for i in (0, 16)]
    return e.pairs_of_bf16(*halves)


def _q8(e: Emitter, block: Value, codes: int) -> Value:
    return e.load(block.at(codes), vec(I8, RUN), align=1)


def _u8(e: Emitter, block: Value, codes: int) -> Value:
    """Bytes without a sign, less 128."""
    return e.load(block.at(codes), vec(I8, RUN), align=1) ^ -128


def _q4(e: Emitter, block: Value, codes: int) -> Value:
    return _exact(_nibbles(e, block.at(codes)), 15)


def _q5(e: Emitter, block: Value, fifth: int) -> Value:
    low = _q4(e, block, fifth + 4)
    bits = e.load(block.at(fifth), I32, align=1).bits(vec(I1, RUN))
    return e.select(bits, low | 16, low)


def _looked_up(
    e: Emitter, source: Value, values: Sequence[int], order: Sequence[int] = range(RUN)
) -> Value:
    """The numbers that the nibbles of 16 bytes stand for, lower ones before upper ones."""
    packed = e.load(source, vec(I8, 16), align=1)
    codes = (packed & 15).shuffle(order, packed >> 4)
    return e.lookup16(values, codes)


def _fp4(e: Emitter, source: Value) -> Value:
    """Twice 16 numbers, each in 8 bytes."""
    order = [8 * (i // 16) + i % 8 + 16 * (i // 8 % 2) for i in range(RUN)]
    return _looked_up(e, source, FP4_VALUES, order)


def _f8(e: Emitter, block: Value, run: Value) -> Value:
    codes = e.load(block.at(run * RUN + 4), vec(I8, RUN), align=1).sext(I16)
    numbers = [e4m3(codes.shuffle(range(i, i + 16))).half_to_f32() for i in (0, 16)]
    return e.pairs_of_bf16(*numbers)


def _bf16(e: Emitter, block: Value, run: Value) -> Value:  # noqa: ARG001
    return e.load(block, vec(I16, RUN), align=1)


def _f16(e: Emitter, block: Value, run: Value) -> Sequence[Value]:  # noqa: ARG001
    return [e.load(block.at(at), vec(I16, 16), align=1).half_to_f32() for at in (0, 32)]


def _table4(values: Sequence[float]) -> Form:
    def floats(e: Emitter, block: Value, run: Value) -> Sequence[Value]:
        words = e.load(block.at(run * 16 + 4), vec(I8, 16), align=1).zext(I32)
        return [e.lookup16_f32(values, words >> shift) for shift in (0, 4)]

    return Form(
        lambda e, block, run: e.pairs_of_bf16(*floats(e, block, run)),
        0.0,
        head=_word,
        numbers=lambda heads: [header(heads)[0]],
        floats=floats,
        integers=False,
    )


def _of_octets(
    octets: Callable[[Emitter, Value, Value], Value], zero: float, *args: Any, **kwargs: Any
) -> Form:
    """A form whose codes are signed bytes."""
    codes = lambda e, block, run: _signed(octets(e, block, run))  # noqa: E731
    return replace(Form(codes, zero, *args, **kwargs), octets=octets)


def _q1_0(e: Emitter, block: Value, run: Value) -> Value:
    bits = e.load(block.at(run * 4 + 2), I32, align=1).bits(vec(I1, RUN))
    return e.select(bits, e.const(vec(I8, RUN), 1), e.const(vec(I8, RUN), -1))


def _two_bits(e: Emitter, block: Value, run: Value) -> Value:
    """32 bytes hold four runs."""
    words = _bytes(e, block.at((run >> 2) * 32))
    return _exact(_shifted(words, (run & 3) * 2), 3)


def _q3_k(e: Emitter, block: Value, run: Value) -> Value:
    third = _shifted(_bytes(e, block), run)
    return _two_bits(e, block.at(32), run) | ((third & 1) << 2)


def _q4_k(e: Emitter, block: Value, run: Value) -> Value:
    words = _bytes(e, block.at((run >> 1) * 32 + 16))
    return _exact(_shifted(words, (run & 1) * 4), 15)


def _q5_k(e: Emitter, block: Value, run: Value) -> Value:
    words = _bytes(e, block.at((run >> 1) * 32 + 48))
    low = _exact(_shifted(words, (run & 1) * 4), 15)
    fifth = _shifted(_bytes(e, block.at(16)), run)
    return low | ((fifth & 1) << 4)


def _q6_k(e: Emitter, block: Value, run: Value) -> Value:
    side, part = run >> 2, run & 3
    words = _bytes(e, block.at(side * 64 + (part & 1) * 32))
    low = _exact(_shifted(words, (part >> 1) * 4), 15)
    high = _shifted(_bytes(e, block.at(side * 32 + 128)), part * 2)
    return low | ((high & 3) << 4)


def _tq1_0(e: Emitter, block: Value, run: Value) -> Value:
    """Five runs of 32 bytes, five halves of 16 more, and the rest of the last run of 4."""
    codes = e.var(vec(I8, RUN), e.load(block, vec(I8, RUN), align=1))
    with e.when(run >= 5):
        middle = e.load(block.at(32), vec(I8, 16), align=1)
        last = e.load(block.at(48), vec(I8, 4), align=1).shuffle([i % 4 for i in range(16)])
        codes.set(middle.concat(e.select(run.eq(7), last, middle)))
    halves = [(power, power) for power in range(5)] + [(0, 1), (2, 3)]
    powers = [256 * 3**half for pair in halves for half in pair for _ in range(16)]
    powers += [256 * 3**4] * 16 + [256 * 3 ** (i // 4) for i in range(16)]
    factors = e.load(e.table(I16, [signed16(power) for power in powers]), vec(I16, RUN), run * RUN)
    return _exact(carried(codes.get().zext(I16) * factors), 3)


def _rows_of_a_grid(kind: str) -> Form:
    own = GRIDS[kind]

    def codes(e: Emitter, block: Value, run: Value) -> Value:
        first, second, third, fourth = own.rows(e, block, run, 1)
        numbers = first.concat(second).concat(third.concat(fourth))
        return numbers.zext(I16) + (EXACT - MORE // 2)  # from 128 on, exact below 256

    return Form(
        codes, float(MORE // 2 + 128), lambda e, block: [own.scales(e, block)], groups=own.halves
    )


def _d(e: Emitter, block: Value, at: int) -> Value:
    return e.load(block.at(at), I16, align=1).half_to_f32()


def _scales_2k(e: Emitter, block: Value) -> Sequence[Value]:
    factors = e.load(block, vec(I8, 16), align=1)
    scale = (factors & 15).zext(I32).sitofp() * _d(e, block, 80)
    return scale, (factors >> 4).zext(I32).sitofp() * -_d(e, block, 82)


def _scales_4k(e: Emitter, block: Value) -> Sequence[Value]:
    scales, minima = factors4(e, block)
    scale = scales.zext(I32).sitofp() * _d(e, block, 0)
    return scale, minima.zext(I32).sitofp() * -_d(e, block, 2)


def _scales_6k(e: Emitter, block: Value) -> Sequence[Value]:
    factors = e.load(block.at(192), vec(I8, 16), align=1)
    return [factors.sext(I32).sitofp() * _d(e, block, 208)]


def _one_scale(at: int) -> Callable[[Emitter, Value], Sequence[Value]]:
    return lambda e, block: [_d(e, block, at).splat(TURN)]


def _word(e: Emitter, block: Value, run: Value, group: int) -> Value:  # noqa: ARG001
    return e.load(block, I32, align=1)


def _exponent(e: Emitter, block: Value, run: Value, group: int) -> Value:  # noqa: ARG001
    return e.load(block, I8, align=1).zext(I32)


def _small_float(at: int) -> Callable[[Emitter, Value, Value, int], Value]:
    """Two 8-bit floats of a run, as the bits of halves."""
    return lambda e, block, run, group: fp4_scale(
        e.load(block.at(run * 2 + (at + group)), I8, align=1)
    ).bits(I32)


def _nv4_scale(e: Emitter, block: Value, run: Value, group: int) -> Value:
    scale = fp4_scale(e.load(block.at(run * 2 + (4 + group)), I8, align=1))
    return (scale * e.load(block, F32, align=1)).bits(I32)


def _no_scale(e: Emitter, block: Value, run: Value, group: int) -> Value:  # noqa: ARG001
    return e.f32(1.0).bits(I32)


def _half(heads: Value) -> Sequence[Value]:
    return [two_halves(heads)[0]]


FORMS = MappingProxyType(
    {
        "Q8_0": _of_octets(lambda e, block, _: _q8(e, block, 2), 0.0, head=_word, numbers=_half),
        "Q4_0": Form(lambda e, block, _: _q4(e, block, 2), 136.0, head=_word, numbers=_half),
        "Q4_1": Form(
            lambda e, block, _: _q4(e, block, 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "Q5_0": Form(lambda e, block, _: _q5(e, block, 2), 144.0, head=_word, numbers=_half),
        "Q5_1": Form(
            lambda e, block, _: _q5(e, block, 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "IQ4_NL": _of_octets(
            lambda e, block, _: _looked_up(e, block.at(2), IQ4_VALUES),
            0.0,
            head=_word,
            numbers=_half,
        ),
        "MXFP4": _of_octets(
            lambda e, block, _: _looked_up(e, block.at(1), FP4_VALUES),
            0.0,
            head=_exponent,
            numbers=lambda heads: [half_of_power(heads)],
        ),
        "NVFP4": _of_octets(
            lambda e, block, run: _fp4(e, block.at(run * 16 + 4)),
            0.0,
            head=_small_float(0),
            groups=2,
        ),
        "NV4_128": _of_octets(
            lambda e, block, run: _fp4(e, block.at(run * 16 + 12)), 0.0, head=_nv4_scale, groups=2
        ),
        "Q1_0": _of_octets(_q1_0, 0.0, head=_word, numbers=_half),
        "U4_32": Form(
            lambda e, block, _: _q4(e, block, 4), 128.0, head=_word, numbers=header, minimum=True
        ),
        "U4_64": Form(
            lambda e, block, run: _q4(e, block.at(run * 16), 4),
            128.0,
            head=_word,
            numbers=header,
            minimum=True,
        ),
        "A4_64": Form(
            lambda e, block, run: _q4(e, block.at(run * 16), 4),
            128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "A8_32": _of_octets(
            lambda e, block, _: _u8(e, block, 4),
            -128.0,
            head=_word,
            numbers=two_halves,
            minimum=True,
        ),
        "U8_64": _of_octets(
            lambda e, block, run: _u8(e, block.at(run * RUN), 4),
            -128.0,
            head=_word,
            numbers=header,
            minimum=True,
        ),
        "F8_64": Form(
            _f8,
            0.0,
            head=_word,
            numbers=lambda heads: [header(heads)[0] * HALVES_LESS],
            integers=False,
        ),
        "BF16_32": Form(_bf16, 0.0, head=_no_scale, integers=False),
        "F16_32": Form(
            lambda e, block, run: e.pairs_of_bf16(*_f16(e, block, run)),
            0.0,
            head=_no_scale,
            floats=_f16,
            integers=False,
        ),
        "NF4_64": _table4(NF4_VALUES),
        "FP4_64": _table4(BNB_FP4_VALUES),
        "Q2_K": Form(
            lambda e, block, run: _two_bits(e, block.at(16), run),
            128.0,
            _scales_2k,
            minimum=True,
            groups=2,
        ),
        "Q3_K": Form(
            _q3_k,
            132.0,
            lambda e, block: [factors3(e, block).sext(I32).sitofp() * _d(e, block, 108)],
            groups=2,
        ),
        "Q4_K": Form(_q4_k, 128.0, _scales_4k, minimum=True),
        "Q5_K": Form(_q5_k, 128.0, _scales_4k, minimum=True),
        "Q6_K": Form(_q6_k, 160.0, _scales_6k, groups=2),
        "IQ4_XS": _of_octets(
            lambda e, block, run: _looked_up(e, block.at(run * 16 + 8), IQ4_VALUES),
            0.0,
            lambda e, block: [factors_x4(e, block).sitofp() * _d(e, block, 0)],
        ),
        "TQ1_0": Form(_tq1_0, 129.0, _one_scale(52)),
        "TQ2_0": Form(_two_bits, 129.0, _one_scale(64)),
        **{kind: _rows_of_a_grid(kind) for kind in GRIDS},
    }
)
