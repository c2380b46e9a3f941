"""Products of a few rows of x in fp32 with GGUF blocks, four codes at a time.

Value by value (`blocks`) a weight takes 10 to 30 instructions, and matrix instructions would round
x (in 16 bits they do not: `operands`). So codes stay packed, four to a 32-bit word with one in each
byte, until they are multiplied. A byte becomes an fp32 number by one `or` and one subtraction: the
bits of 2^23 are 0x4B000000, and its lower 16 count ones. The second byte of a half word counts as
256 times its code, which x has been divided by. Scales and minimums apply to sums of products.
Nothing is rounded but sums.

`dot` gives fp32 [M, ROWS, COUNT, LANES], parts of the products of M rows of x with ROWS rows of w
over COUNT *units* of UNIT_VALUES. A unit is what shares bytes: a block of 32, a quarter of a block
of 256 (two groups whose codes of four bits share their bytes) or a half of one (`Q6_K`: four groups
share the upper bits of their codes).
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import tl, triton

UNIT_VALUES = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "Q4_K": 64,
    "Q5_K": 64,
    "Q6_K": 128,
}
# Rows of x up to which this is used: as many as take fewer instructions than decoding value by
# value, as counted in what is compiled for cuda:90.
MAX_ROWS = {"Q4_0": 4, "Q4_1": 2, "Q5_0": 4, "Q5_1": 4, "Q8_0": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 4}
UNROLLED = 8  # over lanes of a unit: steps of the loop that are one


@triton.jit
def dot(x, w, row, unit, real, QUANT: tl.constexpr, WHOLE: tl.constexpr):
    """`x` are pointers to the first values of rows of x, `row` the first bytes of rows of w, `unit`
    the numbers of units in them. Where one is not `real`, x counts as zero; WHOLE: all are.
    """
    if QUANT == "Q6_K":
        part = _q6_k(x, w, row, unit, real, WHOLE)
    elif QUANT == "Q4_K":
        part = _pairs_of_groups(x, w, row, unit, real, 144, False, WHOLE)
    elif QUANT == "Q5_K":
        part = _pairs_of_groups(x, w, row, unit, real, 176, True, WHOLE)
    elif QUANT == "Q8_0":
        part = _q8_0(x, w, row, unit, real, WHOLE)
    elif QUANT == "Q4_0":
        part = _nibbles(x, w, row, unit, real, 18, 8, False, False, WHOLE)
    elif QUANT == "Q4_1":
        part = _nibbles(x, w, row, unit, real, 20, 0, False, True, WHOLE)
    elif QUANT == "Q5_0":
        part = _nibbles(x, w, row, unit, real, 22, 16, True, False, WHOLE)
    else:
        tl.static_assert(QUANT == "Q5_1")
        part = _nibbles(x, w, row, unit, real, 24, 0, True, True, WHOLE)
    return part


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _halves(at, LANES: tl.constexpr):
    """A half for each of LANES lanes, which read it themselves rather than wait for another's."""
    return _half(at[:, :, :, None] + tl.zeros([1, 1, 1, LANES], tl.int32))


@triton.jit
def word_at(at, ALIGNED: tl.constexpr):
    """32 bits, of blocks that begin at multiples of four bytes by one load, of others by two."""
    if ALIGNED:
        word = tl.load(at.to(tl.pointer_type(tl.uint32)))
    else:
        halves = at.to(tl.pointer_type(tl.uint16))
        word = tl.load(halves).to(tl.uint32) | tl.load(halves + 1).to(tl.uint32) << 16
    return word


@triton.jit
def _words(at, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """LANES words that follow each other: [1, ROWS, COUNT, LANES]."""
    lane = tl.arange(0, LANES)[None, None, None, :]
    if ALIGNED:
        word = tl.load(at.to(tl.pointer_type(tl.uint32))[:, :, :, None] + lane)
    else:
        halves = at.to(tl.pointer_type(tl.uint16))[:, :, :, None] + 2 * lane
        word = tl.load(halves).to(tl.uint32) | tl.load(halves + 1).to(tl.uint32) << 16
    return word


@triton.jit
def _x_locations(x, unit, VALUES: tl.constexpr, LANES: tl.constexpr):
    return x[:, None, None] + (unit * VALUES)[:, None] + tl.arange(0, LANES) * 4


@triton.jit
def _four_of_x(at, real, WHOLE: tl.constexpr):
    """x at four places that follow each other, the second and the fourth over 256, and the sum of
    the four: [M, 1, COUNT, LANES] each.
    """
    if WHOLE:
        a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        a = tl.load(at, mask=real, other=0)
        b = tl.load(at + 1, mask=real, other=0)
        c = tl.load(at + 2, mask=real, other=0)
        d = tl.load(at + 3, mask=real, other=0)
    a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    total = a + b + (c + d)
    b, d = b * 0.00390625, d * 0.00390625
    return a[:, None], b[:, None], c[:, None], d[:, None], total[:, None]


@triton.jit
def _number(bits, OFFSET: tl.constexpr):
    """The lower 16 bits of a word, no others being set, less OFFSET: fp32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _four(word, a, b, c, d, MASK: tl.constexpr, OFFSET: tl.constexpr):
    """The sum of four codes, less OFFSET each, times `_four_of_x`: of the bits MASK of each byte of
    a word.
    """
    high = word >> 16
    one, two = _number(word & MASK, OFFSET), _number(word & MASK * 256, OFFSET * 256)
    three, four = _number(high & MASK, OFFSET), _number(high & MASK * 256, OFFSET * 256)
    return one * a + two * b + three * c + four * d


@triton.jit
def _spread(bits):
    """Four bits, each to bit 4 of a byte."""
    return (bits * 0x204081 & 0x01010101) << 4


@triton.jit
def _nibbles(
    x,
    w,
    row,
    unit,
    real,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    FIFTHS: tl.constexpr,
    MINIMUM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Blocks of 32: a scale, a minimum if any, fifth bits if any, 16 bytes with two codes each."""
    at = w + (row[None, :, None] + (unit * SIZE)[None, None, :])
    head: tl.constexpr = 4 if MINIMUM else 2
    aligned: tl.constexpr = SIZE % 4 == 0
    word = _words(at + (head + 4 if FIFTHS else head), 4, aligned)
    location = _x_locations(x, unit, 32, 4)
    a, b, c, d, first = _four_of_x(location, real, WHOLE)
    if FIFTHS:
        shift = (tl.arange(0, 4) * 4).to(tl.uint32)
        spread = at[:, :, :, None] + tl.zeros([1, 1, 1, 4], tl.int32)
        fifth = word_at(spread + head, aligned) >> shift
        low = word & 0x0F0F0F0F | _spread(fifth & 15)
        high = word >> 4 & 0x0F0F0F0F | _spread(fifth >> 16 & 15)
        total = _four(low, a, b, c, d, 0xFF, OFFSET)
        a, b, c, d, second = _four_of_x(location + 16, real, WHOLE)
        total += _four(high, a, b, c, d, 0xFF, OFFSET)
    else:
        total = _four(word, a, b, c, d, 0x0F, OFFSET)
        a, b, c, d, second = _four_of_x(location + 16, real, WHOLE)
        total += _four(word, a, b, c, d, 0xF0, OFFSET * 16) * 0.0625
    total *= _halves(at, 4)
    if MINIMUM:
        total += _halves(at + 2, 4) * (first + second)
    return total


@triton.jit
def _q8_0(x, w, row, unit, real, WHOLE: tl.constexpr):
    at = w + (row[None, :, None] + (unit * 34)[None, None, :])
    location = _x_locations(x, unit, 32, 4)
    a, b, c, d, _ = _four_of_x(location, real, WHOLE)
    total = _four(_words(at + 2, 4, False) ^ 0x80808080, a, b, c, d, 0xFF, 128)
    a, b, c, d, _ = _four_of_x(location + 16, real, WHOLE)
    total += _four(_words(at + 18, 4, False) ^ 0x80808080, a, b, c, d, 0xFF, 128)
    return total * _halves(at, 4)


@triton.jit
def _pairs_of_groups(
    x, w, row, unit, real, SIZE: tl.constexpr, FIFTHS: tl.constexpr, WHOLE: tl.constexpr
):
    """Blocks of 256 in eight groups: scale and smallest factor, 12 bytes with factors of 6 bits,
    fifth bits if any, and 32 bytes with the codes of each two groups.
    """
    quarter = unit % 4
    at = w + (row[None, :, None] + (unit // 4 * SIZE)[None, None, :])
    word = _words(at + (48 if FIFTHS else 16) + (quarter * 32), 8, True)
    location = _x_locations(x, unit, 64, 8)
    a, b, c, d, first = _four_of_x(location, real, WHOLE)
    if FIFTHS:
        shift = (quarter * 2).to(tl.uint32)[:, None]
        fifth = _words(at + 16, 8, True) >> shift
        one = _four(word & 0x0F0F0F0F | (fifth & 0x01010101) << 4, a, b, c, d, 0xFF, 0)
        a, b, c, d, second = _four_of_x(location + 32, real, WHOLE)
        two = _four(word >> 4 & 0x0F0F0F0F | (fifth & 0x02020202) << 3, a, b, c, d, 0xFF, 0)
    else:
        one = _four(word, a, b, c, d, 0x0F, 0)
        a, b, c, d, second = _four_of_x(location + 32, real, WHOLE)
        two = _four(word, a, b, c, d, 0xF0, 0) * 0.0625
    # Factors of groups 0 to 3 are the lower six bits of bytes; of 4 to 7, four bits of the last
    # bytes and the upper two of those.
    scales, minimums, last = word_at(at + 4, True), word_at(at + 8, True), word_at(at + 12, True)
    early, shift = quarter < 2, (quarter % 2 * 16).to(tl.uint32)
    scales = (
        tl.where(early, scales & 0x3F3F3F3F, last & 0x0F0F0F0F | scales >> 2 & 0x30303030) >> shift
    )
    minimums = (
        tl.where(early, minimums & 0x3F3F3F3F, last >> 4 & 0x0F0F0F0F | minimums >> 2 & 0x30303030)
        >> shift
    )
    scale, minimum = _half(at), _half(at + 2)
    total = one * (scale * _number(scales & 0xFF, 0))[:, :, :, None]
    total += two * (scale * (_number(scales & 0xFF00, 0) * 0.00390625))[:, :, :, None]
    total -= first * (minimum * _number(minimums & 0xFF, 0))[:, :, :, None]
    return total - second * (minimum * (_number(minimums & 0xFF00, 0) * 0.00390625))[:, :, :, None]


@triton.jit
def _q6_k(x, w, row, unit, real, WHOLE: tl.constexpr):
    """Blocks of 256 in two halves: 128 bytes with the lower four bits, 64 with the upper two of
    four codes each, 16 scales, a scale for all.
    """
    half = unit % 2
    at = w + (row[None, :, None] + (unit // 2 * 210)[None, None, :])
    one = _words(at + half * 64, 8, False)
    two = _words(at + half * 64 + 32, 8, False)
    upper = _words(at + half * 32 + 128, 8, False)
    factors = (at + half * 8 + 192).to(tl.pointer_type(tl.int8))[:, :, :, None]
    factors = factors + tl.arange(0, 8) // 4
    location = _x_locations(x, unit, 128, 8)
    a, b, c, d, _ = _four_of_x(location, real, WHOLE)
    part = _four(one & 0x0F0F0F0F | upper << 4 & 0x30303030, a, b, c, d, 0xFF, 32)
    total = part * tl.load(factors).to(tl.float32)
    a, b, c, d, _ = _four_of_x(location + 32, real, WHOLE)
    part = _four(two & 0x0F0F0F0F | upper << 2 & 0x30303030, a, b, c, d, 0xFF, 32)
    total += part * tl.load(factors + 2).to(tl.float32)
    a, b, c, d, _ = _four_of_x(location + 64, real, WHOLE)
    part = _four(one >> 4 & 0x0F0F0F0F | upper & 0x30303030, a, b, c, d, 0xFF, 32)
    total += part * tl.load(factors + 4).to(tl.float32)
    a, b, c, d, _ = _four_of_x(location + 96, real, WHOLE)
    part = _four(two >> 4 & 0x0F0F0F0F | upper >> 2 & 0x30303030, a, b, c, d, 0xFF, 32)
    total += part * tl.load(factors + 6).to(tl.float32)
    return total * _halves(at + 208, 8)
