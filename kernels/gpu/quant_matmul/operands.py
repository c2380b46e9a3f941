"""Products of a few rows of x, in 16 bits, with GGUF blocks by matrix instructions whose operands
are made of packed codes, two to a 32-bit word.

With up to 16 rows of x a product is to take as long as its weights are read: that leaves a thread
of an H200 some seven instructions for a weight of four bits. A code becomes a number by a shift, a
mask and an `or`: at the upper end of the mantissa of 2^BITS it counts ones. Codes that are 16 bits
apart in a word become two numbers at once, and x is read in their order. What is so added to each
code is subtracted by the sum of x, which a matrix instruction makes with an operand that is
constant; scales and minimums apply to fp32 sums of products. Nothing is rounded but sums: codes
have at most as many bits as bf16's mantissa, and those of eight (`Q8_0`) go in two parts.

An infinity in x, or a value of bf16 near its largest, of which 2^BITS times as much is none, makes
its row of the product NaN where the sum of x is subtracted: in all types but those whose codes are
looked up among 16 numbers, or are floats. The kernels for more rows, and the reference, give
infinities.

`add_product` adds to fp32 [R, G, 8, 4, MT, 2]: parts of the products of 8 R rows of w with 8 MT
rows of x over G *units* of UNIT_VALUES, which share bytes. Tensors are laid out as the operands of
NVIDIA's 16 x 8 x 16 instructions are (PTX, mma.m16n8k16): a warp for a unit, in it eight rows of w
or x by four *lanes*, each with a word of four bytes or two. So nothing moves between threads. On
other GPUs the compiler moves it.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import joins_wide, last_first, on_amd, tl, triton
from mtmd.kernels.gpu.quant_matmul import codes

UNIT_VALUES = {
    "Q4_0": 32,
    "Q4_1": 32,
    "Q5_0": 32,
    "Q5_1": 32,
    "Q8_0": 32,
    "IQ4_NL": 32,
    "Q4_K": 64,
    "Q5_K": 64,
    "IQ4_XS": 64,
    "Q2_K": 128,
    "Q3_K": 128,
    "Q6_K": 128,
    "MXFP4": 32,
    "NVFP4": 64,
    "Q1_0": 64,
    "TQ1_0": 64,
    "TQ2_0": 128,
    "IQ1_M": 64,
    "IQ1_S": 64,
    "IQ2_S": 64,
    "IQ2_XS": 64,
    "IQ2_XXS": 64,
    "IQ3_S": 64,
    "IQ3_XXS": 64,
    "U4_32": 32,
    "U4_64": 32,
    "U8_64": 32,
    "F8_64": 32,
    "NF4_64": 32,
    "FP4_64": 32,
    "NV4_128": 64,
    "A4_64": 32,
    "A8_32": 32,
}


MANY_COLUMNS = 8192  # rows of w from which twice as many go to a program
FEW_PROGRAMS = 128  # of which a multiprocessor of an H200 has one or none


@triton.jit
def read(w, unit, QUANT: tl.constexpr):
    """Read the part of w that `add_product` takes, as it lies in memory: all is read before
    anything is made of it, so that much is under way. `w` are pointers to the first bytes of rows
    of w, [R, 1, 8, 1]; `unit` the numbers of units in them, [1, G, 1, 1].
    """
    if QUANT == "Q4_0":
        words = _read_nibbles(w, unit, 18, False, False)
    elif QUANT == "Q4_1":
        words = _read_nibbles(w, unit, 20, False, True)
    elif QUANT == "Q5_0":
        words = _read_nibbles(w, unit, 22, True, False)
    elif QUANT == "Q5_1":
        words = _read_nibbles(w, unit, 24, True, True)
    elif QUANT == "Q8_0":
        words = _read_q8_0(w, unit)
    elif QUANT == "IQ4_NL":
        words = _read_nibbles(w, unit, 18, False, False)
    elif QUANT == "IQ4_XS":
        words = _read_iq4_xs(w, unit)
    elif QUANT == "Q4_K":
        words = _read_pairs_of_groups(w, unit, 144, False)
    elif QUANT == "Q5_K":
        words = _read_pairs_of_groups(w, unit, 176, True)
    elif QUANT == "Q6_K":
        words = _read_q6_k(w, unit)
    elif QUANT == "Q3_K":
        words = _read_q3_k(w, unit)
    elif QUANT == "Q2_K":
        words = _read_q2_k(w, unit)
    elif QUANT == "MXFP4":
        words = _read_mxfp4(w, unit)
    elif QUANT == "U4_32":
        words = _read_own_nibbles(w, unit, 20, 0)
    elif QUANT == "U4_64" or QUANT == "A4_64" or QUANT == "NF4_64" or QUANT == "FP4_64":
        words = _read_own_nibbles(w, unit, 36, 1)
    elif QUANT == "U8_64" or QUANT == "F8_64":
        words = _read_own_bytes(w, unit, 68, 1)
    elif QUANT == "A8_32":
        words = _read_own_bytes(w, unit, 36, 0)
    elif QUANT == "TQ2_0":
        words = _read_tq2_0(w, unit)
    elif QUANT == "NVFP4":
        words = _read_fours(w, unit, 36, 0, QUANT)
    elif QUANT == "NV4_128":
        words = _read_fours(w, unit, 76, 1, QUANT)
    elif QUANT == "Q1_0":
        words = _read_fours(w, unit, 18, 1, QUANT)
    elif QUANT == "TQ1_0":
        words = _read_fours(w, unit, 54, 2, QUANT)
    elif QUANT == "IQ1_S":
        words = _read_fours(w, unit, 50, 2, QUANT)
    elif QUANT == "IQ1_M":
        words = _read_fours(w, unit, 56, 2, QUANT)
    elif QUANT == "IQ2_XXS":
        words = _read_fours(w, unit, 66, 2, QUANT)
    elif QUANT == "IQ2_XS":
        words = _read_fours(w, unit, 74, 2, QUANT)
    elif QUANT == "IQ2_S":
        words = _read_fours(w, unit, 82, 2, QUANT)
    elif QUANT == "IQ3_XXS":
        words = _read_fours(w, unit, 98, 2, QUANT)
    else:
        tl.static_assert(QUANT == "IQ3_S")
        words = _read_fours(w, unit, 110, 2, QUANT)
    return words


@triton.jit
def add_product(
    total, x, words, unit, real, R: tl.constexpr, QUANT: tl.constexpr, WHOLE: tl.constexpr, p
):
    """`x` are pointers to the first values of rows of x, [MT, 1, 8, 1], `words` what was `read` of
    rows of w for units of these numbers. Where one is not `real`, x counts as zero; WHOLE: all are.
    `p` has the table of grids, for types that have one.
    """
    if QUANT == "Q4_0":
        total = _nibbles(total, x, words, unit, real, R, 8, False, False, WHOLE)
    elif QUANT == "Q4_1":
        total = _nibbles(total, x, words, unit, real, R, 0, False, True, WHOLE)
    elif QUANT == "Q5_0":
        total = _nibbles(total, x, words, unit, real, R, 16, True, False, WHOLE)
    elif QUANT == "Q5_1":
        total = _nibbles(total, x, words, unit, real, R, 0, True, True, WHOLE)
    elif QUANT == "Q8_0":
        total = _q8_0(total, x, words, unit, real, R, WHOLE)
    elif QUANT == "IQ4_NL":
        total = _by_table(total, x, _word(words[0]), words[2], unit, real, QUANT, WHOLE)
    elif QUANT == "IQ4_XS":
        total = _iq4_xs(total, x, words, unit, real, WHOLE)
    elif QUANT == "Q4_K":
        total = _pairs_of_groups(total, x, words, unit, real, R, False, WHOLE)
    elif QUANT == "Q5_K":
        total = _pairs_of_groups(total, x, words, unit, real, R, True, WHOLE)
    elif QUANT == "Q6_K":
        total = _q6_k(total, x, words, unit, real, R, WHOLE)
    elif QUANT == "Q3_K":
        total = _q3_k(total, x, words, unit, real, R, WHOLE)
    elif QUANT == "Q2_K":
        total = _q2_k(total, x, words, unit, real, R, WHOLE)
    elif QUANT == "MXFP4":
        total = _mxfp4(total, x, words, unit, real, WHOLE)
    elif QUANT == "U4_32" or QUANT == "U4_64" or QUANT == "A4_64":
        scale, minimum = codes.affine(words[1], QUANT == "A4_64")
        words = words[0], words[0], scale, minimum
        total = _nibbles(total, x, words, unit, real, R, 0, False, True, WHOLE)
    elif QUANT == "NF4_64" or QUANT == "FP4_64":
        scale, _ = codes.header(words[1])
        total = _by_table(total, x, words[0], scale, unit, real, QUANT, WHOLE)
    elif QUANT == "U8_64" or QUANT == "A8_32":
        total = _own_bytes(total, x, words, unit, real, R, QUANT == "A8_32", WHOLE)
    elif QUANT == "F8_64":
        total = _f8_64(total, x, words, unit, real, WHOLE)
    elif QUANT == "TQ1_0":
        total = _fours(total, x, words, unit, real, R, 2, 2, 1, WHOLE, QUANT, p)
    elif QUANT == "TQ2_0":
        total = _tq2_0(total, x, words, unit, real, R, WHOLE)
    elif QUANT == "NVFP4":
        total = _fours(total, x, words, unit, real, R, 0, 4, 0, WHOLE, QUANT, p)
    elif QUANT == "NV4_128":
        total = _fours(total, x, words, unit, real, R, 1, 4, 0, WHOLE, QUANT, p)
    elif QUANT == "Q1_0":
        total = _fours(total, x, words, unit, real, R, 1, 2, 1, WHOLE, QUANT, p)
    elif QUANT == "IQ1_S" or QUANT == "IQ1_M":
        total = _fours(total, x, words, unit, real, R, 2, 5, 9, WHOLE, QUANT, p)
    else:
        total = _fours(total, x, words, unit, real, R, 2, 7, 64, WHOLE, QUANT, p)
    return total


@triton.jit
def eights_of(first, ROWS: tl.constexpr, OF_X: tl.constexpr = False):
    """ROWS numbers from `first` on as rows of w, or of x, are numbered: [eights, 1, 8, 1]."""
    # AMD's instructions take no fewer than 16 rows of x.
    EIGHTS: tl.constexpr = 2 if OF_X and ROWS == 8 and on_amd() else ROWS // 8
    eight = tl.arange(0, 8)[None, None, :, None]
    return first + tl.arange(0, EIGHTS)[:, None, None, None] * 8 + eight


@triton.jit
def product(x, w, units, QUANT: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr, p):
    """The products of rows of x and w of so many units, COUNT of them at once, `x`, `w` and `p` as
    `add_product` takes them, WHOLE if COUNT divides the units: [R, 8, 4, MT, 2].
    """
    R: tl.constexpr = w.shape[0]
    total = tl.zeros([R, COUNT, 8, 4, x.shape[0], 2], tl.float32)
    for start in range(0, units, COUNT):
        unit = units_from(start, units, WHOLE, COUNT)
        real = start + tl.arange(0, COUNT)[None, :, None, None] < units
        words = read(w, unit, QUANT)
        tl.debug_barrier()  # else the compiler puts off what it reads, and waits several times
        total = add_product(total, x, words, unit, real, R, QUANT, WHOLE, p)
    return tl.sum(total, 1)


@triton.jit
def units_from(start, units, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT numbers of units from `start` on, of so many; past the last the first one, which is
    there, times zeros. In 64 bits, in which what they differ by is a constant of a load.
    """
    unit = tl.cast(start, tl.int64) + tl.arange(0, COUNT)[None, :, None, None]
    return unit if WHOLE else tl.where(unit < units, unit, 0)


@triton.jit
def result_rows(first, MT: tl.constexpr):
    """The rows of x, from `first` on, of the numbers of a `product`: [1, 1, 4, MT, 2]."""
    m = tl.arange(0, MT)[:, None] * 8 + tl.arange(0, 2)[None, :]
    m = tl.arange(0, 4)[:, None, None] * 2 + m[None, :, :]
    return first + m[None, None, :, :, :]


@triton.jit
def _lane():
    return tl.arange(0, 4)


@triton.jit
def _half(at):
    locations = at.to(tl.pointer_type(tl.float16))
    return tl.load(last_first(locations))


@triton.jit
def _float(word):
    """The half in the lower 16 bits of a word."""
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _one_word(at):
    """32 bits, of blocks that begin at multiples of four bytes."""
    locations = at.to(tl.pointer_type(tl.uint32))
    return tl.load(last_first(locations))


@triton.jit
def _halves(at):
    """The halves of a word of other blocks, which `_word` puts together: that waits for them."""
    locations = at.to(tl.pointer_type(tl.uint16))
    first, second = tl.load(last_first(locations)), tl.load(last_first(locations + 1))
    return first.to(tl.uint32), second.to(tl.uint32)


@triton.jit
def _word(halves):
    return halves[0] | halves[1] << 16


@triton.jit
def _lane_word(at):
    """A word for each lane, which follow each other: [R, G, 8, 4]."""
    return _one_word(at + _lane() * 4)


@triton.jit
def _lane_halves(at):
    return _halves(at + _lane() * 4)


@triton.jit
def _lane_pair(at):
    """Two words for each lane, which all follow each other: [R, G, 8, 4, 2]."""
    words = (at + _lane() * 8).to(tl.pointer_type(tl.uint32))[:, :, :, :, None]
    return tl.load(last_first(words + tl.arange(0, 2)))


@triton.jit
def _four_words(at):
    """Four words that follow each other: for each lane, which reads what it needs itself. By one
    load where w, and so each of its blocks, begins at a multiple of 16 bytes, which the launch
    tells the compiler; else by four.
    """
    words = _lanes_of(at).to(tl.pointer_type(tl.uint32))[:, :, :, :, None] + tl.arange(0, 4)
    return tl.load(last_first(words))


@triton.jit
def _each_of_four(words):
    """Return what `_four_words` read, [R, G, 8, 4] each."""
    shape: tl.constexpr = words.shape[0], words.shape[1], 8, 4, 2, 2
    even, odd = tl.split(tl.reshape(words, shape))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load(at, real, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=real[:, :, :, :, None], other=0)


@triton.jit
def _x(x, at, real, WHOLE: tl.constexpr, JOINED: tl.constexpr = True):
    """16 values of each row of x that follow each other, for words of `_lane_word`, as an operand:
    [G, 16, 8 MT]. JOINED: for one that was joined, of which the compiler sees that.
    """
    locations = (x + at + _lane() * 4)[:, :, :, :, None] + tl.arange(0, 4)
    return _operand_of_x(_load(last_first(locations), real, WHOLE), JOINED)


@triton.jit
def _x_pair(x, at, real, WHOLE: tl.constexpr):
    """32 values of each row of x that follow each other, for words of `_lane_pair`, as two operands
    of 16.
    """
    locations = (x + at + _lane() * 8)[:, :, :, :, None] + tl.arange(0, 8)
    MT: tl.constexpr = locations.shape[0]
    G: tl.constexpr = locations.shape[1]
    value = tl.reshape(_load(last_first(locations), real, WHOLE), [MT, G, 8, 4, 2, 4])
    first, second = tl.split(tl.permute(value, (0, 1, 2, 3, 5, 4)))
    return _operand_of_x(first, True), _operand_of_x(second, True)


@triton.jit
def _operand_of_x(value, JOINED: tl.constexpr):
    """Four values of each lane, [MT, G, 8, 4, 4], in the order of `_operand_of_values`."""
    MT: tl.constexpr = value.shape[0]
    G: tl.constexpr = value.shape[1]
    value = tl.reshape(value, [MT, G, 8, 4, 2, 2])
    if JOINED and joins_wide():
        value = tl.permute(value, (1, 3, 5, 4, 0, 2))
    else:
        value = tl.permute(value, (1, 5, 3, 4, 0, 2))
    return tl.reshape(value, [G, 16, 8 * MT])


@triton.jit
def _codes(even, odd, TYPE: tl.constexpr):
    """Words of pairs of numbers of TYPE, [R, G, 8, 4] each, which are of bytes 0 and 2 and of bytes
    1 and 3 of words, as an operand: [G, 8 R, 16].
    """
    both = tl.join(even, odd)
    value = tl.join(both.to(tl.uint16), (both >> 16).to(tl.uint16))
    return _operand_of_values(value, True).to(TYPE, bitcast=True)


@triton.jit
def _numbers(
    word,
    FROM: tl.constexpr,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    TIMES: tl.constexpr = 0,
    FLIP: tl.constexpr = 0,
):
    """The BITS bits from bit FROM on of each half of a word, xor FLIP, as numbers
    2^TIMES (2^BITS + bits).
    """
    mantissa: tl.constexpr = 10 if TYPE.is_fp16() else 7
    bias: tl.constexpr = 15 if TYPE.is_fp16() else 127
    to: tl.constexpr = mantissa - BITS  # the bit that counts ones
    if to > FROM:
        word = word << (to - FROM)
    if to < FROM:
        word = word >> (FROM - to)
    mask: tl.constexpr = (((1 << BITS) - 1) << to) * 0x10001
    power: tl.constexpr = (((bias + BITS + TIMES) << mantissa) | (FLIP << to)) * 0x10001
    return word & mask ^ power


@triton.jit
def _codes_of(word, FROM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr):
    """The BITS bits from bit FROM on of each byte of words as an operand, 2^BITS more each."""
    return _codes(_numbers(word, FROM, BITS, TYPE), _numbers(word, FROM + 8, BITS, TYPE), TYPE)


@triton.jit
def _sums_of_x(x, TIMES: tl.constexpr, sums=None):
    """TIMES the sums of columns of an operand `_x`, in each row: [G, 16, 8 MT]."""
    G: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[2]
    if joins_wide():  # what is not joined has the other order
        x = tl.reshape(tl.permute(tl.reshape(x, [G, 4, 2, 2, M]), (0, 2, 1, 3, 4)), [G, 16, M])
    return tl.dot(tl.full([G, 16, 16], TIMES, x.dtype), x, sums)


@triton.jit
def _for_rows(sums, R: tl.constexpr):
    """[G, 16, 8 MT] for each 16 rows of w: [G, 8 R, 8 MT]."""
    G: tl.constexpr = sums.shape[0]
    M: tl.constexpr = sums.shape[2]
    many = tl.broadcast_to(tl.reshape(sums, [G, 1, 16, M]), [G, R // 2, 16, M])
    return tl.reshape(many, [G, 8 * R, M])


@triton.jit
def _parts(sums):
    """[G, 8 R, 8 MT] as `product` gives it: [R, G, 8, 4, MT, 2]."""
    R: tl.constexpr = sums.shape[1] // 8
    MT: tl.constexpr = sums.shape[2] // 8
    return tl.permute(tl.reshape(sums, [sums.shape[0], R, 8, MT, 4, 2]), (1, 0, 2, 4, 3, 5))


@triton.jit
def _for_x(scale):
    return scale[:, :, :, :, None, None]


@triton.jit
def _number(bits, OFFSET: tl.constexpr):
    """The lower bits of a word, at most 23, no others being set, less OFFSET: fp32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _lanes_of(at):
    """Addresses for each lane, which reads what it needs itself."""
    # A zero that the compiler does not see: else it reads before there are lanes.
    return at + (_lane() >> 2 if joins_wide() else tl.zeros([4], tl.int32))


@triton.jit
def _spread(bits):
    """Four bits, each to bit 4 of a byte."""
    return bits * 0x2040810 & 0x10101010


@triton.jit
def _read_nibbles(w, unit, SIZE: tl.constexpr, FIFTHS: tl.constexpr, MINIMUM: tl.constexpr):
    """Blocks of 32: a scale, a minimum if any, fifth bits if any, 16 bytes with two codes each."""
    at = w + unit * SIZE
    head: tl.constexpr = 4 if MINIMUM else 2
    codes = at + (head + 4 if FIFTHS else head)
    if SIZE % 4 == 0:
        word = _lane_word(codes)
        fifth = _one_word(_lanes_of(at + head)) if FIFTHS else word
    else:
        word = _lane_halves(codes)
        fifth = _halves(_lanes_of(at + head)) if FIFTHS else word
    scale = _half(_lanes_of(at))
    return word, fifth, scale, _half(_lanes_of(at + 2)) if MINIMUM else scale


@triton.jit
def _nibbles(
    total,
    x,
    words,
    unit,
    real,
    R: tl.constexpr,
    OFFSET: tl.constexpr,
    FIFTHS: tl.constexpr,
    MINIMUM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Decode what `_read_nibbles` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    bits: tl.constexpr = 5 if FIFTHS else 4
    # Of blocks with a minimum the size is a multiple of four.
    word = words[0] if MINIMUM else _word(words[0])
    first = _x(x, unit * 32, real, WHOLE)
    second = _x(x, unit * 32 + 16, real, WHOLE)
    less: tl.constexpr = -(1 << bits) - OFFSET
    below = _for_rows(_sums_of_x(second, less, _sums_of_x(first, less)), R)
    if FIFTHS:
        fifth = (words[1] if MINIMUM else _word(words[1])) >> (_lane() * 4).to(tl.uint32)
        low = word & 0x0F0F0F0F | _spread(fifth & 15)
        high = word >> 4 & 0x0F0F0F0F | _spread(fifth >> 16 & 15)
        sums = tl.dot(_codes_of(low, 0, 5, TYPE), first, below)
        sums = tl.dot(_codes_of(high, 0, 5, TYPE), second, sums)
    else:
        sums = tl.dot(_codes_of(word, 0, 4, TYPE), first, below)
        sums = tl.dot(_codes_of(word, 4, 4, TYPE), second, sums)
    total += _parts(sums) * _for_x(words[2].to(tl.float32))
    if MINIMUM:
        total += _parts(below) * _for_x(words[3].to(tl.float32) * (1.0 / less))
    return total


@triton.jit
def _bytes_dot(word, x, sums):
    """Codes of eight bits with a sign times x: with 384 more each in fp16, and in bf16, in two
    parts, 400.
    """
    TYPE: tl.constexpr = x.dtype
    if TYPE.is_fp16():
        even = _numbers(word, 0, 8, TYPE, 0, 128)
        sums = tl.dot(_codes(even, _numbers(word, 8, 8, TYPE, 0, 128), TYPE), x, sums)
    else:
        even = _numbers(word, 4, 4, TYPE, 4, 8)
        sums = tl.dot(_codes(even, _numbers(word, 12, 4, TYPE, 4, 8), TYPE), x, sums)
        sums = tl.dot(_codes_of(word, 0, 4, TYPE), x, sums)
    return sums


@triton.jit
def _read_q8_0(w, unit):
    at = w + unit * 34
    scale = _half(_lanes_of(at))
    return _lane_halves(at + 2), _lane_halves(at + 18), scale


@triton.jit
def _q8_0(total, x, words, unit, real, R: tl.constexpr, WHOLE: tl.constexpr):
    less: tl.constexpr = -384 if x.dtype.element_ty.is_fp16() else -400
    first = _x(x, unit * 32, real, WHOLE)
    second = _x(x, unit * 32 + 16, real, WHOLE)
    sums = _for_rows(_sums_of_x(second, less, _sums_of_x(first, less)), R)
    sums = _bytes_dot(_word(words[0]), first, sums)
    sums = _bytes_dot(_word(words[1]), second, sums)
    return total + _parts(sums) * _for_x(words[2].to(tl.float32))


@triton.jit
def _read_pairs_of_groups(w, unit, SIZE: tl.constexpr, FIFTHS: tl.constexpr):
    """Blocks of 256 in eight groups: scale and smallest factor, 12 bytes with factors of 6 bits,
    fifth bits if any, and 32 bytes with the codes of each two groups.
    """
    at = w + (unit >> 2) * SIZE
    pair = _lane_pair(at + (48 if FIFTHS else 16) + (unit & 3) * 32)
    fifths = _lane_pair(at + 16) if FIFTHS else pair
    return pair, fifths, _four_words(at)


@triton.jit
def _pairs_of_groups(
    total, x, words, unit, real, R: tl.constexpr, FIFTHS: tl.constexpr, WHOLE: tl.constexpr
):
    """Decode what `_read_pairs_of_groups` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    quarter = (unit & 3).to(tl.int32)
    bits: tl.constexpr = 5 if FIFTHS else 4
    word, other = tl.split(words[0])
    first, third = _x_pair(x, unit * 64, real, WHOLE)
    second, fourth = _x_pair(x, unit * 64 + 32, real, WHOLE)
    less: tl.constexpr = -(1 << bits)
    below = _for_rows(_sums_of_x(third, less, _sums_of_x(first, less)), R)
    below_second = _for_rows(_sums_of_x(fourth, less, _sums_of_x(second, less)), R)
    if FIFTHS:
        fifth, other_fifth = tl.split(words[1])
        shift = (quarter * 2).to(tl.uint32)
        fifth, other_fifth = fifth >> shift, other_fifth >> shift
        low = word & 0x0F0F0F0F | (fifth & 0x01010101) << 4
        high = word >> 4 & 0x0F0F0F0F | (fifth & 0x02020202) << 3
        one = tl.dot(_codes_of(low, 0, 5, TYPE), first, below)
        two = tl.dot(_codes_of(high, 0, 5, TYPE), second, below_second)
        low = other & 0x0F0F0F0F | (other_fifth & 0x01010101) << 4
        high = other >> 4 & 0x0F0F0F0F | (other_fifth & 0x02020202) << 3
        one = tl.dot(_codes_of(low, 0, 5, TYPE), third, one)
        two = tl.dot(_codes_of(high, 0, 5, TYPE), fourth, two)
    else:
        one = tl.dot(_codes_of(word, 0, 4, TYPE), first, below)
        two = tl.dot(_codes_of(word, 4, 4, TYPE), second, below_second)
        one = tl.dot(_codes_of(other, 0, 4, TYPE), third, one)
        two = tl.dot(_codes_of(other, 4, 4, TYPE), fourth, two)
    # Factors of groups 0 to 3 are the lower six bits of bytes; of 4 to 7, four bits of the last
    # bytes and the upper two of those.
    halves, scales, minimums, last = _each_of_four(words[2])
    early, shift = quarter < 2, (quarter % 2 * 16).to(tl.uint32)
    scales = (
        tl.where(early, scales & 0x3F3F3F3F, last & 0x0F0F0F0F | scales >> 2 & 0x30303030) >> shift
    )
    minimums = (
        tl.where(early, minimums & 0x3F3F3F3F, last >> 4 & 0x0F0F0F0F | minimums >> 2 & 0x30303030)
        >> shift
    )
    scale, minimum = _float(halves), _float(halves >> 16) * (1.0 / (1 << bits))
    total += _parts(one) * _for_x(scale * _number(scales & 0xFF, 0))
    total += _parts(two) * _for_x(scale * (_number(scales & 0xFF00, 0) * 0.00390625))
    total += _parts(below) * _for_x(minimum * _number(minimums & 0xFF, 0))
    minimum *= 0.00390625
    return total + _parts(below_second) * _for_x(minimum * _number(minimums & 0xFF00, 0))


@triton.jit
def _byte(word, BYTE: tl.constexpr):
    """A byte of words, no others being set."""
    return word >> (8 * BYTE) & 255


@triton.jit
def _read_q6_k(w, unit):
    """Blocks of 256 in two halves: 128 bytes with the lower four bits, 64 with the upper two of
    four codes each, 16 scales, a scale for all.
    """
    half = unit & 1
    at = w + (unit >> 1) * 210
    head = _lanes_of(at)
    factors = head + half * 8 + 192
    lower = at + half * 64
    upper = at + half * 32 + 128
    one = _lane_halves(lower), _lane_halves(lower + 16)
    two = _lane_halves(lower + 32), _lane_halves(lower + 48)
    bits = _lane_halves(upper), _lane_halves(upper + 16)
    early, late = _halves(factors), _halves(factors + 4)
    return one, two, bits, early, late, _half(head + 208)


@triton.jit
def _q6_k(total, x, words, unit, real, R: tl.constexpr, WHOLE: tl.constexpr):
    """Decode what `_read_q6_k` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    scale = words[5].to(tl.float32)
    for i in tl.static_range(2):
        one, two, upper = _word(words[0][i]), _word(words[1][i]), _word(words[2][i])
        for j in tl.static_range(4):
            lower = (one if j % 2 == 0 else two) >> (j // 2 * 4)
            bits = upper << (4 - 2 * j) if j < 3 else upper >> 2
            code = lower & 0x0F0F0F0F | bits & 0x30303030
            part = _x(x, unit * 128 + (32 * j + 16 * i), real, WHOLE)
            sums = _for_rows(_sums_of_x(part, -96), R)
            sums = tl.dot(_codes_of(code, 0, 6, TYPE), part, sums)
            factor = _byte(words[3 + j // 2][j % 2].to(tl.uint32), i) ^ 128
            total += _parts(sums) * _for_x(scale * _number(factor, 128))
    return total


@triton.jit
def _read_q3_k(w, unit):
    """Blocks of 256 in two halves: 32 bytes with the third bits of eight codes each, 64 with the
    lower two of four, 12 with factors of 6 bits of 16 codes, a scale.
    """
    at = w + (unit >> 1) * 110
    head = _lanes_of(at)
    lower = at + (unit & 1) * 32 + 32
    thirds = _lane_halves(at), _lane_halves(at + 16)
    lowers = _lane_halves(lower), _lane_halves(lower + 16)
    early, late = _halves(head + 96), _halves(head + 100)
    upper = _halves(head + 104)
    return thirds, lowers, early, late, upper, _half(head + 108)


@triton.jit
def _q3_k(total, x, words, unit, real, R: tl.constexpr, WHOLE: tl.constexpr):
    """Decode what `_read_q3_k` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    shift = ((unit & 1) * 4).to(tl.uint32)
    scale = words[5].to(tl.float32)
    # Factors of 16 codes i of groups j of the half: lower 4 bits in bytes 2 j + i, upper 2 of
    # groups 0 and 1 below those of 2 and 3.
    upper = _word(words[4]) >> shift
    early = _word(words[2]) >> shift & 0x0F0F0F0F | (upper & 0x03030303) << 4
    late = _word(words[3]) >> shift & 0x0F0F0F0F | (upper & 0x0C0C0C0C) << 2
    for i in tl.static_range(2):
        third = _word(words[0][i]) >> shift
        word = _word(words[1][i])
        for j in tl.static_range(4):
            code = word >> (2 * j) & 0x03030303 | (third >> j & 0x01010101) << 2
            part = _x(x, unit * 128 + (32 * j + 16 * i), real, WHOLE)
            sums = _for_rows(_sums_of_x(part, -12), R)
            sums = tl.dot(_codes_of(code, 0, 3, TYPE), part, sums)
            factor = _byte(early if j < 2 else late, j % 2 * 2 + i)
            total += _parts(sums) * _for_x(scale * _number(factor, 32))
    return total


@triton.jit
def _read_q2_k(w, unit):
    """Blocks of 256 in two halves: 16 bytes with a factor and a smallest factor of 4 bits for 16
    codes each, 64 with four codes of 2 bits, scale and smallest factor.
    """
    half = unit & 1
    at = w + (unit >> 1) * 84
    head = _lanes_of(at)
    codes, factors = at + half * 32 + 16, head + half * 8
    words = _lane_word(codes), _lane_word(codes + 16)
    early, late = _one_word(factors), _one_word(factors + 4)
    return words, early, late, _half(head + 80), _half(head + 82)


@triton.jit
def _q2_k(total, x, words, unit, real, R: tl.constexpr, WHOLE: tl.constexpr):
    """Decode what `_read_q2_k` reads. A code times its factor, at most 45, is a number of six bits:
    it is summed over all the half.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    half_type: tl.constexpr = TYPE.is_fp16()
    # 2^6 and 2^4 twice in a word, and a one of the numbers from there on.
    sixty_four: tl.constexpr = (0x5400 if half_type else 0x4280) * 0x10001
    times: tl.constexpr = 16 if half_type else 2
    sixteen: tl.constexpr = (0x4C00 if half_type else 0x4180) * 0x10001
    twice: tl.constexpr = (64 if half_type else 8) * 0x10001
    M: tl.constexpr = 8 * x.shape[0]
    G: tl.constexpr = unit.shape[1]
    sums = tl.zeros([G, 8 * R, M], tl.float32)
    minimums, below = sums, tl.zeros([G, 16, M], tl.float32)
    ones = tl.full([G, 16, 16], -16, TYPE)
    for i in tl.static_range(2):
        word = words[0][i]
        for j in tl.static_range(4):
            part = _x(x, unit * 128 + (32 * j + 16 * i), real, WHOLE)
            below = tl.dot(ones, part, below)
            factors = words[1 + j // 2] >> (j % 2 * 16 + i * 8)
            factor = (factors & 15) * times
            even = (word >> (2 * j) & 0x00030003) * factor + sixty_four
            odd = (word >> (2 * j + 8) & 0x00030003) * factor + sixty_four
            sums = tl.dot(_codes(even, odd, TYPE), part, sums)
            minimum = (factors >> 4 & 15) * twice + sixteen
            minimums = tl.dot(_codes(minimum, minimum, TYPE), part, minimums)
    below = _parts(_for_rows(below, R))
    total += (_parts(sums) + 4 * below) * _for_x(words[3].to(tl.float32))
    return total - (_parts(minimums) + below) * _for_x(words[4].to(tl.float32))


@triton.jit
def _looked_up(word, QUANT: tl.constexpr, TYPE: tl.constexpr):
    """The values of the codes of words [R, G, 8, 4, WORDS], as words of pairs of numbers of TYPE
    are: of the lower four bits of bytes and of the upper, [R, G, 8, 4, WORDS, 2, 2] each. Rounded
    to TYPE; IQ4's are whole.
    """
    code = tl.join(word, word >> 8)
    code = tl.join(code, code >> 16)
    code = tl.join(code, code >> 4) & 15
    value = tl.gather(codes.table(QUANT).to(TYPE), tl.ravel(code).to(tl.int32), 0)
    return tl.split(tl.reshape(value, code.shape))


@triton.jit
def _operand_of_values(value, JOINED: tl.constexpr):
    """[R, G, 8, 4, 2, 2], two values of a pair last, as an operand: [G, 8 R, 16]. JOINED as of
    `_x`.
    """
    R: tl.constexpr = value.shape[0]
    G: tl.constexpr = value.shape[1]
    if JOINED and joins_wide():
        value = tl.permute(value, (1, 0, 2, 3, 4, 5))
    else:
        value = tl.permute(value, (1, 0, 2, 4, 3, 5))
    return tl.reshape(value, [G, 8 * R, 16])


@triton.jit
def _by_table(total, x, word, scale, unit, real, QUANT: tl.constexpr, WHOLE: tl.constexpr):
    """32 codes of four bits that stand for numbers of a table, times a scale of any type."""
    low, high = _looked_up(word, QUANT, x.dtype.element_ty)
    sums = tl.dot(_operand_of_values(low, False), _x(x, unit * 32, real, WHOLE, False))
    sums = tl.dot(_operand_of_values(high, False), _x(x, unit * 32 + 16, real, WHOLE, False), sums)
    return total + _parts(sums) * _for_x(scale.to(tl.float32))


@triton.jit
def _read_iq4_xs(w, unit):
    """Blocks of 256 in eight groups: a scale, 2 bytes with the upper two bits of the groups'
    factors, 4 with the lower four, 128 with codes.
    """
    at = w + (unit >> 2) * 136
    head = _lanes_of(at)
    codes = at + 8 + (unit & 3) * 32
    word, other = _lane_word(codes), _lane_word(codes + 16)
    return word, other, _one_word(head), _one_word(head + 4)


@triton.jit
def _iq4_xs(total, x, words, unit, real, WHOLE: tl.constexpr):
    """Decode what `_read_iq4_xs` reads."""
    quarter = (unit & 3).to(tl.int32)
    halves, lower = words[2], words[3] >> (quarter * 8).to(tl.uint32)
    upper = halves >> (quarter * 4 + 16).to(tl.uint32)
    scale = _float(halves)
    word = tl.join(words[0], words[1])
    low, high = _looked_up(word, "IQ4_XS", x.dtype.element_ty)
    low, other_low = tl.split(tl.permute(low, (0, 1, 2, 3, 5, 6, 4)))
    high, other_high = tl.split(tl.permute(high, (0, 1, 2, 3, 5, 6, 4)))
    one = tl.dot(_operand_of_values(low, False), _x(x, unit * 64, real, WHOLE, False))
    one = tl.dot(_operand_of_values(high, False), _x(x, unit * 64 + 16, real, WHOLE, False), one)
    two = tl.dot(_operand_of_values(other_low, False), _x(x, unit * 64 + 32, real, WHOLE, False))
    two = tl.dot(
        _operand_of_values(other_high, False), _x(x, unit * 64 + 48, real, WHOLE, False), two
    )
    total += _parts(one) * _for_x(scale * _number(lower & 15 | (upper & 3) << 4, 32))
    return total + _parts(two) * _for_x(scale * _number(lower >> 4 & 15 | (upper & 12) << 2, 32))


@triton.jit
def _lane_bytes(at):
    """A word for each lane, of blocks of odd size, whose bytes `_of_bytes` puts together."""
    at = at + _lane() * 4
    first, second = tl.load(last_first(at)), tl.load(last_first(at + 1))
    third, fourth = tl.load(last_first(at + 2)), tl.load(last_first(at + 3))
    return first.to(tl.uint32), second.to(tl.uint32), third.to(tl.uint32), fourth.to(tl.uint32)


@triton.jit
def _of_bytes(parts):
    return (parts[0] | parts[1] << 8) | (parts[2] << 16 | parts[3] << 24)


@triton.jit
def _read_mxfp4(w, unit):
    """Blocks of 32: an exponent, 16 bytes with two 4-bit floats each."""
    at = w + unit * 17
    return _lane_bytes(at + 1), tl.load(last_first(_lanes_of(at))).to(tl.uint32)


@triton.jit
def _mxfp4(total, x, words, unit, real, WHOLE: tl.constexpr):
    """Decode what `_read_mxfp4` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    word = _of_bytes(words[0])
    sums = tl.dot(_floats(word, 4, TYPE), _x(x, unit * 32, real, WHOLE))
    sums = tl.dot(_floats(word >> 4, 4, TYPE), _x(x, unit * 32 + 16, real, WHOLE), sums)
    return total + _parts(sums) * _for_x(codes.mx_half(words[1]) * 32768)


@triton.jit
def _read_own_nibbles(w, unit, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    """Blocks of 2^SHIFT units of 32: a header word, 16 bytes with two codes each of each unit."""
    at = w + (unit >> SHIFT) * SIZE
    return _lane_word(at + 4 + (unit & ((1 << SHIFT) - 1)) * 16), _one_word(_lanes_of(at))


@triton.jit
def _read_own_bytes(w, unit, SIZE: tl.constexpr, SHIFT: tl.constexpr):
    """Blocks of 2^SHIFT units of 32: a header word, 32 bytes with a code each of each unit."""
    at = w + (unit >> SHIFT) * SIZE
    start = at + 4 + (unit & ((1 << SHIFT) - 1)) * 32
    return _lane_word(start), _lane_word(start + 16), _one_word(_lanes_of(at))


@triton.jit
def _own_bytes(
    total, x, words, unit, real, R: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr
):
    """Decode what `_read_own_bytes` reads: codes without sign, as codes less 128."""
    less: tl.constexpr = -384 if x.dtype.element_ty.is_fp16() else -400
    first = _x(x, unit * 32, real, WHOLE)
    second = _x(x, unit * 32 + 16, real, WHOLE)
    below = _for_rows(_sums_of_x(second, less, _sums_of_x(first, less)), R)
    sums = _bytes_dot(words[0] ^ 0x80808080, first, below)
    sums = _bytes_dot(words[1] ^ 0x80808080, second, sums)
    scale, minimum = codes.affine(words[2], HALVES)
    total += _parts(sums) * _for_x(scale)
    return total + _parts(below) * _for_x((minimum + scale * 128) * (1.0 / less))


@triton.jit
def _f8_64(total, x, words, unit, real, WHOLE: tl.constexpr):
    """Decode what `_read_own_bytes` reads: 8-bit floats, 2^-8 of which both types of x have."""
    scale, _ = codes.header(words[2])
    sums = tl.dot(_floats(words[0], 8, x.dtype.element_ty), _x(x, unit * 32, real, WHOLE))
    second = _x(x, unit * 32 + 16, real, WHOLE)
    sums = tl.dot(_floats(words[1], 8, x.dtype.element_ty), second, sums)
    return total + _parts(sums) * _for_x(scale * 256)


@triton.jit
def _floats(word, BITS: tl.constexpr, TYPE: tl.constexpr):
    """The floats of so many bits of each byte of words as an operand, as small as `codes` has them,
    which both types of x hold.
    """
    both = tl.join(codes.floats(word, BITS), codes.floats(word >> 8, BITS))
    value = tl.join(both.to(tl.uint16), (both >> 16).to(tl.uint16)).to(tl.float16, bitcast=True)
    return _operand_of_values(value if TYPE.is_fp16() else value.to(tl.float32).to(TYPE), True)


@triton.jit
def _read_tq2_0(w, unit):
    """Blocks of 256 in two halves: 32 bytes with four digits of 2 bits each; a scale."""
    at = w + (unit >> 1) * 66
    lower = at + (unit & 1) * 32
    return (_lane_halves(lower), _lane_halves(lower + 16)), _half(_lanes_of(at) + 64)


@triton.jit
def _tq2_0(total, x, words, unit, real, R: tl.constexpr, WHOLE: tl.constexpr):
    """Decode what `_read_tq2_0` reads."""
    TYPE: tl.constexpr = x.dtype.element_ty
    sums, x_sums = None, None
    for i in tl.static_range(2):
        word = _word(words[0][i])
        for j in tl.static_range(4):
            part = _x(x, unit * 128 + (32 * j + 16 * i), real, WHOLE)
            x_sums = _sums_of_x(part, -5, x_sums)
            sums = tl.dot(_codes_of(word, 2 * j, 2, TYPE), part, sums)
    sums = _parts(sums) + _parts(_for_rows(x_sums, R))
    return total + sums * _for_x(words[1].to(tl.float32))


@triton.jit
def _read_fours(w, unit, SIZE: tl.constexpr, SHIFT: tl.constexpr, QUANT: tl.constexpr):
    """Blocks of 2^SHIFT units of 64, four times 16 values."""
    at, first = _lanes_of(w + (unit >> SHIFT) * SIZE), _first_four(unit, SHIFT)
    return (
        _read_sixteen(at, first, QUANT),
        _read_sixteen(at, first + 4, QUANT),
        _read_sixteen(at, first + 8, QUANT),
        _read_sixteen(at, first + 12, QUANT),
    )


@triton.jit
def _first_four(unit, SHIFT: tl.constexpr):
    """The number of a lane's first four values in a block: [1, G, 1, 4]."""
    return (unit & ((1 << SHIFT) - 1)).to(tl.int32) * 16 + _lane()


@triton.jit
def _read_sixteen(at, number, QUANT: tl.constexpr):
    words = codes.read_four(at, number, QUANT, True)
    return words, codes.read_scale(at, number, QUANT, True)


@triton.jit
def _fours(
    total,
    x,
    words,
    unit,
    real,
    R: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    WHOLE: tl.constexpr,
    QUANT: tl.constexpr,
    p,
):
    """Decode what `_read_fours` reads: codes of so many bits, OFFSET more each; of four bits, they
    are floats.
    """
    TYPE: tl.constexpr = x.dtype.element_ty
    less: tl.constexpr = -(1 << BITS) - OFFSET
    for i in tl.static_range(4):
        number = _first_four(unit, SHIFT) + 4 * i
        part = _x(x, unit * 64 + 16 * i, real, WHOLE)
        code = codes.four(words[i][0], number, QUANT, p)
        scale = codes.scale(words[i][1], number, QUANT)
        if BITS == 4:
            sums = tl.dot(_floats(code, 4, TYPE), part)
            scale *= 32768
        else:
            sums = _for_rows(_sums_of_x(part, less), R)
            sums = tl.dot(_codes_of(code, 0, BITS, TYPE), part, sums)
        total += _parts(sums) * _for_x(scale)
    return total


def columns_of(outer: int, eights: int) -> int:
    """Rows of w of a program. Rows of x are read again for every so many; with few, there are more
    programs.
    """
    return 16 if eights == 1 and outer < MANY_COLUMNS else 32


def max_warps(programs: int, eights: int, quant: str) -> int:
    """Return the most warps of a program. Where a multiprocessor has but one program, more share
    out its rows; not where eight have as much under way, or some of their registers would lie in
    memory.
    """
    wide = UNIT_VALUES[quant] == 128 or quant in ("IQ3_S", "IQ3_XXS", "U8_64", "A8_32")
    shared = 1 if wide else 2
    return 16 if programs <= FEW_PROGRAMS and eights <= shared else 8


def units_at_once(
    width: int, columns: int, eights: int, quant: str, warps: int = 8, tables: int = 1
) -> tuple[int, int, int]:
    """Units of a row, how many of them are multiplied at once, and by how many warps, `warps` at
    most. What is read for them is all under way at once: as much as two programs of eight warps
    have registers for, or less, and by fewer warps, where more than a quarter of all would be past
    the end. tables: multiplied in one loop.
    """
    units = width // UNIT_VALUES[quant]
    each = 2 if UNIT_VALUES[quant] == 32 else 1
    if columns * eights == 16:
        if quant == "IQ4_XS":  # a second unit would not stay in registers
            warps = 16
        else:
            each *= 2
    # With 32 rows of x warps of one unit would spill on cuda:80, in IQ4_XS and Q4_1.
    minimum = 1
    if eights == 4 and tables == 2 and quant == "IQ4_XS":
        # Two units would spill, too; of four warps with one a multiprocessor has three programs.
        warps = min(warps, 4)
    elif eights == 4 and UNIT_VALUES[quant] < 128:
        each = minimum = 2 if UNIT_VALUES[quant] == 32 or quant == "IQ4_XS" else 1
    while warps * each > 1 and -units % (warps * each) * 4 > units:
        if each > minimum or warps == 1:
            each //= 2
        else:
            warps //= 2
    return units, warps * each, warps
