"""GGUF blocks decoded in registers: one function per block type, `decode` to choose among them.

Each gives COUNT groups of 32 values of each of ROWS weight rows, fp32 [ROWS, COUNT, 32], bit for
bit those of `blocks.dequantize`: all products of scales and codes have at most 24 bits, so that a
fused multiply-add rounds as separate operations do. `row` are the first bytes of the rows, `group`
the numbers of the groups in a row. Layouts are ggml's (ggml-common.h); every block is of even size,
so that its 16-bit numbers are aligned. A byte that several lanes need is loaded by each of them;
the first cache serves all but one.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.quantization.blocks_of_32 import IQ4_VALUES

# The values of IQ4 codes plus 128, eight to a word, first in the lowest byte.
IQ4_LOW, IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(value + 128 for value in part), "little", signed=True))
    for part in (IQ4_VALUES[:8], IQ4_VALUES[8:])
)


@triton.jit
def decode(w, row, group, QUANT: tl.constexpr):
    if QUANT == "Q8_0":
        value = _q8_0(w, row, group)
    elif QUANT == "Q4_0":
        value = _scaled(w, row, group, 18, _nibbles(w, _block(row, group, 18) + 2) - 8)
    elif QUANT == "IQ4_NL":
        value = _scaled(w, row, group, 18, _iq4(_nibbles(w, _block(row, group, 18) + 2)))
    elif QUANT == "Q5_0":
        value = _scaled(w, row, group, 22, _fifth_bits(w, _block(row, group, 22) + 2) - 16)
    elif QUANT == "Q4_1":
        value = (
            _scaled(w, row, group, 20, _nibbles(w, _block(row, group, 20) + 4))
            + _half(w, _block(row, group, 20) + 2)[:, :, None]
        )
    elif QUANT == "Q5_1":
        value = (
            _scaled(w, row, group, 24, _fifth_bits(w, _block(row, group, 24) + 4))
            + _half(w, _block(row, group, 24) + 2)[:, :, None]
        )
    elif QUANT == "Q2_K":
        value = _q2_k(w, row, group)
    elif QUANT == "Q3_K":
        value = _q3_k(w, row, group)
    elif QUANT == "Q4_K":
        value = _q4_k(w, row, group)
    elif QUANT == "Q5_K":
        value = _q5_k(w, row, group)
    elif QUANT == "Q6_K":
        value = _q6_k(w, row, group)
    else:
        tl.static_assert(QUANT == "IQ4_XS")
        value = _iq4_xs(w, row, group)
    return value


@triton.jit
def _block(row, group, SIZE: tl.constexpr):
    """First bytes of the blocks of 32 values: [ROWS, COUNT]."""
    return row[:, None] + (group * SIZE)[None, :]


@triton.jit
def _byte(w, at):
    return tl.load(w + at).to(tl.int32)


@triton.jit
def _half(w, at):
    return tl.load((w + at).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _word16(w, at):
    return tl.load((w + at).to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def _lanes():
    return tl.arange(0, 32)[None, None, :]


@triton.jit
def _nibbles(w, at):
    """16 bytes whose low halves are 16 codes and whose high halves are the next 16: [ROWS, COUNT,
    32].
    """
    i = _lanes()
    return _byte(w, at[:, :, None] + i % 16) >> (i // 16 * 4) & 15


@triton.jit
def _fifth_bits(w, at):
    """32 fifth bits, then the lower four."""
    bits = _word16(w, at) | _word16(w, at + 2) << 16
    return _nibbles(w, at + 4) | (bits[:, :, None] >> _lanes() & 1) << 4


@triton.jit
def _iq4(code):
    word = tl.where(code < 8, IQ4_LOW, IQ4_HIGH)
    return (word >> ((code & 7) * 8).to(tl.int64) & 255).to(tl.int32) - 128


@triton.jit
def _scaled(w, row, group, SIZE: tl.constexpr, code):
    return _half(w, _block(row, group, SIZE))[:, :, None] * code.to(tl.float32)


@triton.jit
def _q8_0(w, row, group):
    at = _block(row, group, 34)
    code = tl.load((w + (at[:, :, None] + 2 + _lanes())).to(tl.pointer_type(tl.int8)))
    return _half(w, at)[:, :, None] * code.to(tl.float32)


@triton.jit
def _factors(w, at, s):
    """The 6-bit factors of scale and minimum of group s of 8, in 12 bytes: [ROWS, COUNT] each, as
    fp32.
    """
    a, b, c = _byte(w, at + s), _byte(w, at + s + 4), _byte(w, at + s % 4)
    scale = tl.where(s < 4, a & 63, b & 15 | c >> 6 << 4)
    minimum = tl.where(s < 4, b & 63, b >> 4 | a >> 6 << 4)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _q4_k(w, row, group):
    at, s = _block(row, group // 8, 144), (group % 8)[None, :]
    scale, minimum = _factors(w, at + 4, s)
    scale, minimum = _half(w, at) * scale, _half(w, at + 2) * minimum
    code = _byte(w, (at + 16 + s // 2 * 32)[:, :, None] + _lanes()) >> (s % 2 * 4)[:, :, None] & 15
    return scale[:, :, None] * code.to(tl.float32) - minimum[:, :, None]


@triton.jit
def _q5_k(w, row, group):
    at, s = _block(row, group // 8, 176), (group % 8)[None, :]
    scale, minimum = _factors(w, at + 4, s)
    scale, minimum = _half(w, at) * scale, _half(w, at + 2) * minimum
    code = _byte(w, (at + 48 + s // 2 * 32)[:, :, None] + _lanes()) >> (s % 2 * 4)[:, :, None] & 15
    fifth = _byte(w, (at + 16)[:, :, None] + _lanes()) >> s[:, :, None] & 1
    return scale[:, :, None] * (code | fifth << 4).to(tl.float32) - minimum[:, :, None]


@triton.jit
def _two_halves(first, second):
    """A scale for 16 values and one for the next 16."""
    return tl.where(_lanes() < 16, first[:, :, None], second[:, :, None])


@triton.jit
def _pairs(w, at, s):
    """Group s of 8, in codes of 2 bits: four groups share 32 bytes."""
    return _byte(w, (at + s // 4 * 32)[:, :, None] + _lanes()) >> (s % 4 * 2)[:, :, None] & 3


@triton.jit
def _q6_k(w, row, group):
    at, s = _block(row, group // 8, 210), (group % 8)[None, :]
    d, factor = _half(w, at + 208), (w + (at + 192 + 2 * s)).to(tl.pointer_type(tl.int8))
    scale = _two_halves(d * tl.load(factor).to(tl.float32), d * tl.load(factor + 1).to(tl.float32))
    low = (
        _byte(w, (at + s // 4 * 64 + s % 2 * 32)[:, :, None] + _lanes())
        >> (s % 4 // 2 * 4)[:, :, None]
        & 15
    )
    return scale * ((low | _pairs(w, at + 128, s) << 4) - 32).to(tl.float32)


@triton.jit
def _factor3(w, at, j):
    """The 6-bit factor of 16 values, number j of 16: lower 4 bits in 8 bytes, upper 2 in 4."""
    code = (
        _byte(w, at + j % 8) >> j // 8 * 4 & 15 | (_byte(w, at + 8 + j % 4) >> j // 4 * 2 & 3) << 4
    )
    return (code - 32).to(tl.float32)


@triton.jit
def _q3_k(w, row, group):
    at, s = _block(row, group // 8, 110), (group % 8)[None, :]
    d = _half(w, at + 108)
    scale = _two_halves(d * _factor3(w, at + 96, 2 * s), d * _factor3(w, at + 96, 2 * s + 1))
    third = _byte(w, at[:, :, None] + _lanes()) >> s[:, :, None] & 1
    return scale * ((_pairs(w, at + 32, s) | third << 2) - 4).to(tl.float32)


@triton.jit
def _q2_k(w, row, group):
    at, s = _block(row, group // 8, 84), (group % 8)[None, :]
    d, dmin, first, second = (
        _half(w, at + 80),
        _half(w, at + 82),
        _byte(w, at + 2 * s),
        _byte(w, at + 2 * s + 1),
    )
    scale = _two_halves(d * (first & 15).to(tl.float32), d * (second & 15).to(tl.float32))
    minimum = _two_halves(dmin * (first >> 4).to(tl.float32), dmin * (second >> 4).to(tl.float32))
    return scale * _pairs(w, at + 16, s).to(tl.float32) - minimum


@triton.jit
def _iq4_xs(w, row, group):
    at, s = _block(row, group // 8, 136), (group % 8)[None, :]
    factor = _byte(w, at + 4 + s // 2) >> s % 2 * 4 & 15 | (_word16(w, at + 2) >> 2 * s & 3) << 4
    scale = _half(w, at) * (factor - 32).to(tl.float32)
    return scale[:, :, None] * _iq4(_nibbles(w, at + 8 + s * 16)).to(tl.float32)
