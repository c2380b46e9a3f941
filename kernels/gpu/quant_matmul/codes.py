"""Codes of the types whose packing differs from value to value, made four at a time: a word with a
byte for each, in the order of the values. `blocks` makes numbers of them, `operands` operands of
matrix instructions.

Of the number of four values in a block `read_four` and `read_scale` read what there is in memory,
`four` makes the word and `scale` the fp32 number that its codes are multiplied by, less OFFSET
each. Signs, shifts and digits are computed for all four at once: no sum of bytes reaches the next.
Layouts are ggml's (ggml-common.h); grids are in memory (`grids`).
"""

# Triton's language is not Python's: its functions carry no types, and tuples differ.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from mtmd.kernels.gpu.jit import last_first, tl, triton
from mtmd.kernels.gpu.quant_matmul.grids import START
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES
from mtmd.kernels.quantization.own_blocks import BNB_FP4_VALUES, NF4_VALUES

IQ1, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S = (
    tl.constexpr(START[name]) for name in ("IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
)

IQ4, NF4, FP4 = (
    tl.constexpr(tuple(map(float, values))) for values in (IQ4_VALUES, NF4_VALUES, BNB_FP4_VALUES)
)


@triton.jit
def read_four(at, number, QUANT: tl.constexpr, NEXT: tl.constexpr):
    """Read what `four` takes. `at` are the first bytes of blocks, `number` which four values of a
    block, int32; the two broadcast to the shape of the result. NEXT: what neighbouring threads read
    is told the compiler, as `last_first` has it.
    """
    if QUANT == "NVFP4":
        words = (_word(at + 4 + (number >> 2) * 8 + (number & 1) * 4, 4, NEXT),)
    elif QUANT == "NV4_128":
        words = (_word(at + 12 + (number >> 2) * 8 + (number & 1) * 4, 4, NEXT),)
    elif QUANT == "TQ1_0":
        # 32 bytes and 16 of five digits, 4 of four.
        first, second = (number & 7) * 4, 32 + (number & 3) * 4
        byte = tl.where(number < 40, first, tl.where(number < 60, second, 48))
        words = (_word(at + byte, 2, NEXT),)
    elif QUANT == "Q1_0":
        words = (_load(at + 2 + (number >> 1), NEXT),)
    elif QUANT == "IQ1_S":
        words = _load(at + 2 + (number >> 1), NEXT), _short(at + 34 + (number >> 3) * 2, NEXT)
    elif QUANT == "IQ1_M":
        words = _load(at + (number >> 1), NEXT), _load(at + 32 + (number >> 2), NEXT)
    elif QUANT == "IQ2_XXS":
        codes = at + 2 + (number >> 3) * 8
        words = _load(codes + (number >> 1 & 3), NEXT), _word(codes + 4, 2, NEXT)
    elif QUANT == "IQ2_XS":
        words = (_short(at + 2 + (number >> 1) * 2, NEXT),)
    elif QUANT == "IQ2_S":
        row = number >> 1
        codes, signs = _load(at + 2 + row, NEXT), _load(at + 34 + row, NEXT)
        words = codes, _load(at + 66 + (number >> 3), NEXT), signs
    elif QUANT == "IQ3_XXS":
        words = _load(at + 2 + number, NEXT), _word(at + 66 + (number >> 3) * 4, 2, NEXT)
    else:
        tl.static_assert(QUANT == "IQ3_S")
        codes, signs = _load(at + 2 + number, NEXT), _load(at + 74 + (number >> 1), NEXT)
        words = codes, _load(at + 66 + (number >> 3), NEXT), signs
    return words


@triton.jit
def four(words, number, QUANT: tl.constexpr, p):
    """The codes of four values, as `read_four` read them: a word of bytes, of which 4-bit floats
    have the lower bits. `p.grids` is the table of types that look their codes up.
    """
    if QUANT == "NVFP4" or QUANT == "NV4_128":
        code = _whole(words[0]) >> ((number & 2) * 2).to(tl.uint32)
    elif QUANT == "TQ1_0":
        late = tl.where(number < 60, (number - 40) >> 2, number - 60)
        digit = tl.where(number < 40, number >> 3, late)
        power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, 9))
        power = tl.where(digit < 3, power, tl.where(digit == 3, 27, 81)).to(tl.uint32)
        even, odd = _digits(_whole(words[0]), power)
        code = even | odd << 8
    elif QUANT == "Q1_0":
        code = _to_bytes(words[0] >> ((number & 1) * 4).to(tl.uint32) & 15) << 1
    elif QUANT == "IQ1_S":
        high = words[1] >> ((number >> 1 & 3) * 3).to(tl.uint32) & 7
        code = _row(p, words[0] | high << 8, number, IQ1) + (words[1] >> 15 ^ 1) * 0x02020202
    elif QUANT == "IQ1_M":
        high = words[1] >> ((number & 2) * 2).to(tl.uint32) & 15
        row = words[0] | (high & 7) << 8
        code = _row(p, row, number, IQ1) + (high >> 3 ^ 1) * 0x02020202
    elif QUANT == "IQ2_XXS":
        signs = _seven_signs(_whole(words[1]) >> ((number >> 1 & 3) * 7).to(tl.uint32) & 127)
        code = _signed(_row(p, words[0], number, IQ2_XXS), signs, number)
    elif QUANT == "IQ2_XS":
        signs = _seven_signs(words[0] >> 9)
        code = _signed(_row(p, words[0] & 511, number, IQ2_XS), signs, number)
    elif QUANT == "IQ2_S":
        high = words[1] >> (number & 6).to(tl.uint32) & 3
        code = _signed(_row(p, words[0] | high << 8, number, IQ2_S), words[2], number)
    elif QUANT == "IQ3_XXS":
        signs = _seven_signs(_whole(words[1]) >> ((number >> 1 & 3) * 7).to(tl.uint32) & 127)
        code = _signed(_entry(p, words[0] + IQ3_XXS), signs, number)
    else:
        tl.static_assert(QUANT == "IQ3_S")
        high = words[1] >> (number & 7).to(tl.uint32) & 1
        code = _signed(_entry(p, (words[0] | high << 8) + IQ3_S), words[2], number)
    return code


@triton.jit
def read_scale(at, number, QUANT: tl.constexpr, NEXT: tl.constexpr):
    """Read what `scale` takes, as `read_four` reads: of four values, or of the first of so many."""
    if QUANT == "NVFP4":
        words = (_load(at + (number >> 2), NEXT),)
    elif QUANT == "NV4_128":
        words = _load(at + 4 + (number >> 2), NEXT), _word(at, 4, NEXT)
    elif QUANT == "TQ1_0":
        words = (_short(at + 52, NEXT),)
    elif QUANT == "Q1_0":
        words = (_short(at, NEXT),)
    elif QUANT == "IQ1_S":
        words = _short(at, NEXT), _short(at + 34 + (number >> 3) * 2, NEXT)
    elif QUANT == "IQ1_M":
        start = at + 48
        words = _word(start, 4, NEXT), _word(start + 4, 4, NEXT)
    elif QUANT == "IQ2_XXS":
        words = _short(at, NEXT), _short(at + 8 + (number >> 3) * 8, NEXT)
    elif QUANT == "IQ2_XS":
        words = _short(at, NEXT), _load(at + 66 + (number >> 3), NEXT)
    elif QUANT == "IQ2_S":
        words = _short(at, NEXT), _load(at + 74 + (number >> 3), NEXT)
    elif QUANT == "IQ3_XXS":
        words = _short(at, NEXT), _short(at + 68 + (number >> 3) * 4, NEXT)
    else:
        tl.static_assert(QUANT == "IQ3_S")
        words = _short(at, NEXT), _load(at + 106 + (number >> 4), NEXT)
    return words


@triton.jit
def scale(words, number, QUANT: tl.constexpr):
    """The scale that `read_scale` read, in fp32."""
    if QUANT == "NVFP4":
        result = _ue4m3_half(words[0])
    elif QUANT == "NV4_128":
        result = _ue4m3_half(words[0]) * _whole(words[1]).to(tl.float32, bitcast=True)
    elif QUANT == "TQ1_0" or QUANT == "Q1_0":
        result = _float(words[0])
    elif QUANT == "IQ1_S":
        result = _float(words[0]) * _number((words[1] >> 11 & 14) | 1) * 0.125
    elif QUANT == "IQ1_M":
        low, high = _whole(words[0]), _whole(words[1])
        # A quarter of the scale is in the upper four bits of each half.
        quarters = low >> 12 & 15 | low >> 24 & 0xF0 | high >> 4 & 0xF00 | high >> 16 & 0xF000
        late, shift = (number & 32) != 0, (number & 16) + (number >> 2 & 3) * 3
        factor = tl.where(late, high, low) >> shift.to(tl.uint32) & 7
        result = _float(quarters) * _number(factor * 2 + 1) * 0.125
    elif QUANT == "IQ2_XXS":
        result = _float(words[0]) * (_number(words[1] >> 12) + 0.5) * 0.25
    elif QUANT == "IQ2_XS" or QUANT == "IQ2_S":
        factor = words[1] >> (number & 4).to(tl.uint32) & 15
        result = _float(words[0]) * (_number(factor) + 0.5) * 0.25
    elif QUANT == "IQ3_XXS":
        result = _float(words[0]) * (_number(words[1] >> 12) + 0.5) * 0.5
    else:
        tl.static_assert(QUANT == "IQ3_S")
        factor = words[1] >> (number >> 1 & 4).to(tl.uint32) & 15
        result = _float(words[0]) * _number(factor * 2 + 1)
    return result


@triton.jit
def _digits(word, power):
    """A ternary digit of each byte, which `power` of three brings to the front: of bytes 0 and 2,
    and of bytes 1 and 3, each in the lower half of a half of a word.
    """
    even = (word & 0x00FF00FF) * power & 0x00FF00FF
    odd = (word >> 8 & 0x00FF00FF) * power & 0x00FF00FF
    return even * 3 >> 8 & 0x00030003, odd * 3 >> 8 & 0x00030003


@triton.jit
def header(word):
    """Scale and zero of a header word (`quantization/own_blocks.py`), in fp32."""
    return (word & 0xFFFFFF00).to(tl.float32, bitcast=True), _number(word & 255)


@triton.jit
def affine(word, HALVES: tl.constexpr):
    """Scale, and what is added to a code times the scale, of a header word, or of a word whose
    halves are these numbers.
    """
    if HALVES:
        factor, plus = _float(word), _float(word >> 16)
    else:
        factor, zero = header(word)
        plus = -(factor * zero)
    return factor, plus


@triton.jit
def table(QUANT: tl.constexpr):
    """The 16 numbers that codes of a type stand for, in fp32."""
    code = tl.arange(0, 16)
    value = tl.zeros([16], tl.float32)
    for i in tl.static_range(16):
        if QUANT == "NF4_64":
            value = tl.where(code == i, NF4[i], value)
        elif QUANT == "FP4_64":
            value = tl.where(code == i, FP4[i], value)
        else:
            value = tl.where(code == i, IQ4[i], value)
    return value


@triton.jit
def mx_half(exponent):
    """Half the scale that an exponent of MX formats stands for; the smallest two are subnormal."""
    bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def floats(pairs, BITS: tl.constexpr):
    """Two 8-bit or 4-bit floats, in the lower bits of a word's halves, as two of fp16: 2^-8 or
    2^-14 of each. FP8's that is not a number counts as 480.
    """
    if BITS == 8:
        bits = (pairs & 0x007F007F) << 7 | (pairs & 0x00800080) << 8
    else:
        bits = (pairs & 0x00070007) << 9 | (pairs & 0x00080008) << 12
    return bits


@triton.jit
def _ue4m3_half(code):
    """Half an 8-bit float without sign; 0x7F counts as zero, as in ggml."""
    return _float(tl.where(code == 127, 0, code & 127) << 7) * 128.0


@triton.jit
def _load(at, NEXT: tl.constexpr):
    return tl.load(last_first(at) if NEXT else at).to(tl.uint32)


@triton.jit
def _short(at, NEXT: tl.constexpr):
    return _load(at.to(tl.pointer_type(tl.uint16)), NEXT)


@triton.jit
def _word(at, ALIGNED: tl.constexpr, NEXT: tl.constexpr):
    """32 bits, of addresses that are multiples of four by one load, of others by two, which
    `_whole` puts together: that waits for them.
    """
    if ALIGNED == 4:
        word = (_load(at.to(tl.pointer_type(tl.uint32)), NEXT),)
    else:
        word = _short(at, NEXT), _short(at + 2, NEXT)
    return word


@triton.jit
def _whole(words):
    return words[0] if len(words) == 1 else words[0] | words[1] << 16


@triton.jit
def _float(bits):
    """The half in the lower 16 bits of a word."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _number(bits):
    """The lower bits of a word, at most 23, no others being set: fp32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _to_bytes(bits):
    """Four bits, each to bit 0 of a byte."""
    return bits * 0x204081 & 0x01010101


@triton.jit
def _seven_signs(bits):
    """Seven signs, and an eighth that makes the number of negative ones even."""
    odd = 0x6996 >> ((bits ^ bits >> 4) & 15)
    return bits | (odd & 1) << 7


@triton.jit
def _entry(p, entry):
    return tl.load(p.grids + entry.to(tl.int32)).to(tl.uint32, bitcast=True)


@triton.jit
def _row(p, row, number, START: tl.constexpr):
    """Half a row of eight values of a grid."""
    return _entry(p, (row * 2 + START).to(tl.int32) + (number & 1))


@triton.jit
def _signed(magnitudes, signs, number):
    """Magnitudes below 64 with the signs of four values, of eight signs the lower or the upper
    ones: 64 more.
    """
    negative = _to_bytes(signs >> ((number & 1) * 4).to(tl.uint32) & 15)
    return (magnitudes ^ negative * 63) + 0x40404040 - negative * 63
