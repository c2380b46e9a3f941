"""GGUF blocks decoded in registers, four codes of a 32-bit word at a time: `read` takes them from
memory as they are, `values` makes numbers of them; in each a function for each block layout.

That is of COUNT *units* of UNIT values, which share bytes, of each of R weight rows. Layouts are
ggml's (ggml-common.h).

A code stays where it is in its word, or in that word shifted once for three of eight codes, and
becomes a number by one `or`: of a power of two in whose mantissa its lowest bit counts ones. That
power is subtracted with the minimum, if any, by the multiply-add that the code's scale takes. A
thread has 8 bytes that follow each other, of which each part of so many bits is of 8 values that
follow each other: in 16 bits one store to shared memory. What its values need beside codes it reads
itself; the first cache serves all but one.

EXACT: bit for bit the values of `blocks.dequantize`, whose products of scales and codes all have at
most 24 bits, so that a fused multiply-add rounds as separate operations do; by one more instruction
a value. Else what is subtracted is rounded, to 2^-9 of a scale or less where the scale has more
than 11 bits: for numbers that are rounded to bf16.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import on_rdna, tl, triton
from mtmd.kernels.gpu.quant_matmul import codes


@triton.jit
def decode(
    w,
    row,
    start,
    K,
    QUANT: tl.constexpr,
    WHOLE: tl.constexpr,
    VALUES: tl.constexpr,
    TYPE: tl.constexpr,
    p,
):
    """VALUES values, from `start` on, of K in a row, as TYPE: [R, VALUES]. `row` are the first
    bytes of the rows, [R]. Past K, where none is but if WHOLE is false, they are zeros. `p` has the
    table of grids, for types that have one.
    """
    words = read(w, row, units_from(start, K, QUANT, WHOLE, VALUES), QUANT)
    return decoded(words, row, start, K, QUANT, WHOLE, VALUES, TYPE, p)


@triton.jit
def decoded(
    words,
    row,
    start,
    K,
    QUANT: tl.constexpr,
    WHOLE: tl.constexpr,
    VALUES: tl.constexpr,
    TYPE: tl.constexpr,
    p,
):
    """Do what `decode` does, for what was `read`."""
    # Always so. Triton looks through a branch no further: by what it sees there it would choose
    # operands of mma.sync of which each is put together from several loads.
    if start < K:
        unit = units_from(start, K, QUANT, WHOLE, VALUES)
        value = values(words, row, unit, QUANT, not TYPE.is_bf16(), p)
        if not WHOLE:
            value = tl.where((start + tl.arange(0, VALUES) < K)[None, :], value, 0.0)
        value = value.to(TYPE)
    else:
        value = tl.zeros([row.shape[0], VALUES], TYPE)
    return value


@triton.jit
def add_product(total, x_row, there, start, K, value, WHOLE: tl.constexpr):
    """The product of rows of x, at [R, 1], with values of its type from `start` on of K is added.
    `there`: which rows are, [R, 1], or None for all of them.
    """
    if (value.dtype == tl.float32 or on_rdna()) and value.shape[1] == 128:
        # By multiply-adds, whose operands would not all stay in registers.
        first, second = _halves(value)
        one, two = _halves(first)
        three, four = _halves(second)
        total = _add_dot(total, x_row, there, start, K, one, WHOLE)
        total = _add_dot(total, x_row, there, start + 32, K, two, WHOLE)
        total = _add_dot(total, x_row, there, start + 64, K, three, WHOLE)
        total = _add_dot(total, x_row, there, start + 96, K, four, WHOLE)
    elif on_rdna() and value.shape[1] == 128:
        first, second = _halves(value)  # whose operands would take more registers than there are
        total = _add_dot(total, x_row, there, start, K, first, WHOLE)
        total = _add_dot(total, x_row, there, start + 64, K, second, WHOLE)
    else:
        total = _add_dot(total, x_row, there, start, K, value, WHOLE)
    return total


@triton.jit
def _halves(value):
    shape: tl.constexpr = value.shape[0], 2, value.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(value, shape), (0, 2, 1)))


@triton.jit
def _add_dot(total, x_row, there, start, K, value, WHOLE: tl.constexpr):
    k = (start + tl.arange(0, value.shape[1]))[None, :]
    if there is not None:
        part = tl.load(x_row + k, mask=there & (k < K), other=0)
    elif WHOLE:
        part = tl.load(x_row + k)
    else:
        part = tl.load(x_row + k, mask=k < K, other=0)
    return tl.dot(part, tl.trans(value), total, input_precision="ieee")


@triton.jit
def units_from(start, K, QUANT: tl.constexpr, WHOLE: tl.constexpr, VALUES: tl.constexpr):
    """The numbers of the units of VALUES values, from `start` on, of K in a row: [U]. Past the
    last, behind which lies another row, or memory that is not ours, the first one.
    """
    HALVES: tl.constexpr = QUANT == "Q2_K" or QUANT == "Q3_K" or QUANT == "Q6_K" or QUANT == "TQ2_0"
    QUARTERS: tl.constexpr = QUANT == "Q4_K" or QUANT == "Q5_K" or QUANT == "IQ4_XS"
    UNIT: tl.constexpr = 128 if HALVES else 64 if QUARTERS else 32
    unit = start // UNIT + tl.arange(0, VALUES // UNIT)
    return unit if WHOLE else tl.where(unit < K // UNIT, unit, 0)


@triton.jit
def read(w, row, unit, QUANT: tl.constexpr):
    """Read the part of w that `values` takes, as it lies in memory."""
    if QUANT == "Q4_0":
        words = _read_nibbles(_at(w, row, unit, 18, 1), False, False)
    elif QUANT == "Q4_1":
        words = _read_nibbles(_at(w, row, unit, 20, 1), False, True)
    elif QUANT == "Q5_0":
        words = _read_nibbles(_at(w, row, unit, 22, 1), True, False)
    elif QUANT == "Q5_1":
        words = _read_nibbles(_at(w, row, unit, 24, 1), True, True)
    elif QUANT == "Q8_0":
        words = _read_q8_0(_at(w, row, unit, 34, 1))
    elif QUANT == "IQ4_NL":
        words = _read_nibbles(_at(w, row, unit, 18, 1), False, False)
    elif QUANT == "IQ4_XS":
        words = _read_iq4_xs(_at(w, row, unit // 4, 136, 2), _each(unit % 4))
    elif QUANT == "Q4_K":
        words = _read_pairs_of_groups(_at(w, row, unit // 4, 144, 2), _each(unit % 4), False)
    elif QUANT == "Q5_K":
        words = _read_pairs_of_groups(_at(w, row, unit // 4, 176, 2), _each(unit % 4), True)
    elif QUANT == "Q6_K":
        words = _read_q6_k(_at(w, row, unit // 2, 210, 4), _each(unit % 2))
    elif QUANT == "Q3_K":
        words = _read_q3_k(_at(w, row, unit // 2, 110, 4), _each(unit % 2))
    elif QUANT == "Q2_K":
        words = _read_q2_k(_at(w, row, unit // 2, 84, 4), _each(unit % 2))
    elif QUANT == "MXFP4":
        words = _read_mxfp4(_at(w, row, unit, 17, 1))
    elif QUANT == "U4_32":
        words = _read_own_nibbles(_at(w, row, unit, 20, 1), 0)
    elif QUANT == "U4_64" or QUANT == "A4_64" or QUANT == "NF4_64" or QUANT == "FP4_64":
        words = _read_own_nibbles(_at(w, row, unit >> 1, 36, 1), _each(unit & 1))
    elif QUANT == "U8_64" or QUANT == "F8_64":
        words = _read_own_bytes(_at(w, row, unit >> 1, 68, 1), _each(unit & 1))
    elif QUANT == "A8_32":
        words = _read_own_bytes(_at(w, row, unit, 36, 1), 0)
    elif QUANT == "TQ2_0":
        words = _read_tq2_0(_at(w, row, unit >> 1, 66, 4), _each(unit & 1))
    elif QUANT == "NVFP4":
        words = _read_fours(_at(w, row, unit >> 1, 36, 4), unit, 1, QUANT)
    elif QUANT == "NV4_128":
        words = _read_fours(_at(w, row, unit >> 2, 76, 4), unit, 2, QUANT)
    elif QUANT == "TQ1_0":
        words = _read_fours(_at(w, row, unit >> 3, 54, 4), unit, 3, QUANT)
    elif QUANT == "Q1_0":
        words = _read_fours(_at(w, row, unit >> 2, 18, 4), unit, 2, QUANT)
    elif QUANT == "IQ1_S":
        words = _read_fours(_at(w, row, unit >> 3, 50, 4), unit, 3, QUANT)
    elif QUANT == "IQ1_M":
        words = _read_fours(_at(w, row, unit >> 3, 56, 4), unit, 3, QUANT)
    elif QUANT == "IQ2_XXS":
        words = _read_fours(_at(w, row, unit >> 3, 66, 4), unit, 3, QUANT)
    elif QUANT == "IQ2_XS":
        words = _read_fours(_at(w, row, unit >> 3, 74, 4), unit, 3, QUANT)
    elif QUANT == "IQ2_S":
        words = _read_fours(_at(w, row, unit >> 3, 82, 4), unit, 3, QUANT)
    elif QUANT == "IQ3_XXS":
        words = _read_fours(_at(w, row, unit >> 3, 98, 4), unit, 3, QUANT)
    else:
        tl.static_assert(QUANT == "IQ3_S")
        words = _read_fours(_at(w, row, unit >> 3, 110, 4), unit, 3, QUANT)
    return words


@triton.jit
def values(words, row, unit, QUANT: tl.constexpr, EXACT: tl.constexpr, p):
    """The values of units of these numbers, [U], as they were `read`: fp32 [R, U * UNIT]."""
    # No row begins beyond 2^62 bytes, which the compiler does not know: it would set a constant
    # anew wherever it is used.
    zero = (row >> 62).to(tl.uint32)[:, None, None, None]
    if QUANT == "Q4_0":
        value = _nibbles(words, zero, 8, False, False, EXACT)
    elif QUANT == "Q4_1":
        value = _nibbles(words, zero, 0, False, True, EXACT)
    elif QUANT == "Q5_0":
        value = _nibbles(words, zero, 16, True, False, EXACT)
    elif QUANT == "Q5_1":
        value = _nibbles(words, zero, 0, True, True, EXACT)
    elif QUANT == "Q8_0":
        value = _q8_0(words, zero, EXACT)
    elif QUANT == "IQ4_NL":
        value = _looked_up(_four(words[0]), words[2].to(tl.float32), QUANT)
    elif QUANT == "IQ4_XS":
        value = _iq4_xs(words, _each(unit % 4))
    elif QUANT == "Q4_K":
        value = _pairs_of_groups(words, zero, _each(unit % 4), False, EXACT)
    elif QUANT == "Q5_K":
        value = _pairs_of_groups(words, zero, _each(unit % 4), True, EXACT)
    elif QUANT == "Q6_K":
        value = _q6_k(words, zero, EXACT)
    elif QUANT == "Q3_K":
        value = _q3_k(words, zero, _each(unit % 2), EXACT)
    elif QUANT == "Q2_K":
        value = _q2_k(words, zero, EXACT)
    elif QUANT == "MXFP4":
        value = _mxfp4(words)
    elif QUANT == "U4_32" or QUANT == "U4_64" or QUANT == "A4_64":
        scale, plus = codes.affine(_whole(words[1]), QUANT == "A4_64")
        words = words[0], words[1], scale, plus
        value = _nibbles(words, zero, 0, False, True, EXACT)
    elif QUANT == "NF4_64" or QUANT == "FP4_64":
        scale, _ = codes.header(_whole(words[1]))
        value = _looked_up(_four(words[0]), scale, QUANT)
    elif QUANT == "U8_64" or QUANT == "A8_32":
        value = _own_bytes(words, zero, QUANT == "A8_32", EXACT)
    elif QUANT == "F8_64":
        value = _f8_64(words)
    elif QUANT == "TQ2_0":
        value = _tq2_0(words, zero, EXACT)
    elif QUANT == "NVFP4":
        value = _fours(words, unit, zero, 1, 4, 0, EXACT, QUANT, p)
    elif QUANT == "NV4_128":
        value = _fours(words, unit, zero, 2, 4, 0, EXACT, QUANT, p)
    elif QUANT == "Q1_0":
        value = _fours(words, unit, zero, 2, 2, 1, EXACT, QUANT, p)
    elif QUANT == "TQ1_0":
        value = _fours(words, unit, zero, 3, 2, 1, EXACT, QUANT, p)
    elif QUANT == "IQ1_S" or QUANT == "IQ1_M":
        value = _fours(words, unit, zero, 3, 5, 9, EXACT, QUANT, p)
    else:
        value = _fours(words, unit, zero, 3, 7, 64, EXACT, QUANT, p)
    return value


@triton.jit
def _at(w, row, block, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The first bytes of blocks, for each of the threads that share one: [R, U, COUNT]."""
    at = w + (row[:, None] + (block * SIZE)[None, :])
    return at[:, :, None] + tl.zeros([COUNT], tl.int32)


@triton.jit
def _each(number):
    """[1, U, 1]"""
    return number[None, :, None]


@triton.jit
def _half(at):
    return tl.load(at.to(tl.pointer_type(tl.float16)))


@triton.jit
def _one_word(at, ALIGNED: tl.constexpr):
    """32 bits, of blocks that begin at multiples of four bytes by one load; of others by two, as
    halves, which `_whole` puts together: that waits for them.
    """
    if ALIGNED >= 4:
        word = (tl.load(at.to(tl.pointer_type(tl.uint32))),)
    else:
        halves = at.to(tl.pointer_type(tl.uint16))
        low, high = tl.load(halves).to(tl.uint32), tl.load(halves + 1).to(tl.uint32)
        word = low, high  # type: ignore[assignment]
    return word


@triton.jit
def _whole(words):
    return words[0] if len(words) == 1 else words[0] | words[1] << 16


@triton.jit
def _words(at, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    """2 or 4 words for each of COUNT, which all follow each other: [R, U, COUNT, WORDS]. By one
    load where they begin at multiples of 16 bytes. `_all_whole` puts them together.
    """
    at += tl.arange(0, at.shape[2]) * (4 * WORDS)
    if ALIGNED == 16:
        words = tl.load(at.to(tl.pointer_type(tl.uint32))[:, :, :, None] + tl.arange(0, WORDS))
    elif WORDS == 2:
        words = _one_word(at, ALIGNED), _one_word(at + 4, ALIGNED)
    else:
        words = (
            _one_word(at, ALIGNED),
            _one_word(at + 4, ALIGNED),
            _one_word(at + 8, ALIGNED),
            _one_word(at + 12, ALIGNED),
        )
    return words


@triton.jit
def _two(words):
    """Two words of `_words` that were not read by one load."""
    return tl.join(_whole(words[0]), _whole(words[1]))


@triton.jit
def _four(words):
    first = tl.join(_whole(words[0]), _whole(words[2]))
    value = tl.join(first, tl.join(_whole(words[1]), _whole(words[3])))
    return tl.reshape(value, [value.shape[0], value.shape[1], value.shape[2], 4])


@triton.jit
def _number(bits, OFFSET: tl.constexpr):
    """The lower bits of a word, at most 23, no others being set, less OFFSET: fp32."""
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def _codes(
    words,
    scale,
    zero,
    FROM: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    plus=None,
):
    """The BITS bits from bit FROM on of each byte of `_words`, less OFFSET, times a scale, and what
    is added to that, [R, U, COUNT]: [R, U, COUNT, 2, 2, 2].
    """
    first = _located(words << 8, scale, zero, FROM + 8, BITS, OFFSET, EXACT, plus)
    second = _located(words, scale, zero, FROM + 8, BITS, OFFSET, EXACT, plus)
    if FROM + 16 + BITS <= 23:
        third = _located(words, scale, zero, FROM + 16, BITS, OFFSET, EXACT, plus)
    else:
        third = _located(words >> 12, scale, zero, FROM + 4, BITS, OFFSET, EXACT, plus)
    fourth = _located(words >> 12, scale, zero, FROM + 12, BITS, OFFSET, EXACT, plus)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _located(
    words,
    scale,
    zero,
    FROM: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    plus,
):
    """One number of each word: see `_codes`. `zero` is, in each row."""
    mask: tl.constexpr = ((1 << BITS) - 1) << FROM
    power: tl.constexpr = (150 - FROM) << 23  # 2^(23 - FROM) in fp32
    less: tl.constexpr = float((1 << (23 - FROM)) + OFFSET)
    number = (words & mask | (power + zero)).to(tl.float32, bitcast=True)
    if EXACT:
        number = (number - less) * scale[:, :, :, None]
        if plus is not None:
            number += plus[:, :, :, None]
    else:
        minimum = scale * -less if plus is None else scale * -less + plus
        number = number * scale[:, :, :, None] + minimum[:, :, :, None]
    return number


@triton.jit
def _in_a_row(value):
    """[R, U, COUNT, 2, 2, 2], or two or four such parts of each unit, [..., 2] or [..., 2, 2], of
    which one comes after the other: [R, U * UNIT].
    """
    if len(value.shape) == 7:
        value = tl.permute(value, (0, 1, 6, 2, 3, 4, 5))
    if len(value.shape) == 8:
        value = tl.permute(value, (0, 1, 6, 7, 2, 3, 4, 5))
    return tl.reshape(value, [value.shape[0], value.numel // value.shape[0]])


@triton.jit
def _four_parts(first, second, third, fourth):
    return _in_a_row(tl.join(tl.join(first, third), tl.join(second, fourth)))


@triton.jit
def _spread(bits):
    """Four bits, each to bit 4 of a byte."""
    return bits * 0x2040810 & 0x10101010


@triton.jit
def _read_nibbles(at, FIFTHS: tl.constexpr, MINIMUM: tl.constexpr):
    """Blocks of 32: a scale, a minimum if any, fifth bits if any, 16 bytes with two codes each. Of
    blocks with a minimum the size is a multiple of four.
    """
    head: tl.constexpr = 4 if MINIMUM else 2
    aligned: tl.constexpr = 4 if MINIMUM else 2
    words = _words(at + (head + 4 if FIFTHS else head), 4, aligned)
    scale = _half(at)
    fifths = _one_word(at + head, aligned) if FIFTHS else scale
    return words, fifths, scale, _half(at + 2) if MINIMUM else scale


@triton.jit
def _nibbles(
    read,
    zero,
    OFFSET: tl.constexpr,
    FIFTHS: tl.constexpr,
    MINIMUM: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Decode what `_read_nibbles` reads."""
    words, scale = _four(read[0]), read[2].to(tl.float32)
    plus = read[3].to(tl.float32) if MINIMUM else None
    if FIFTHS:
        fifths = _whole(read[1])[:, :, :, None] >> (tl.arange(0, 4) * 4).to(tl.uint32)
        low = words & 0x0F0F0F0F | _spread(fifths & 15)
        high = words >> 4 & 0x0F0F0F0F | _spread(fifths >> 16 & 15)
        first = _codes(low, scale, zero, 0, 5, OFFSET, EXACT, plus)
        second = _codes(high, scale, zero, 0, 5, OFFSET, EXACT, plus)
    else:
        first = _codes(words, scale, zero, 0, 4, OFFSET, EXACT, plus)
        second = _codes(words, scale, zero, 4, 4, OFFSET, EXACT, plus)
    return _in_a_row(tl.join(first, second))


@triton.jit
def _read_q8_0(at):
    """Blocks of 32: a scale, 32 bytes with a code each."""
    return _words(at + 2, 4, 2), _words(at + 18, 4, 2), _half(at)


@triton.jit
def _q8_0(read, zero, EXACT: tl.constexpr):
    """Decode what `_read_q8_0` reads."""
    scale = read[2].to(tl.float32)
    first = _codes(_four(read[0]) ^ 0x80808080, scale, zero, 0, 8, 128, EXACT)
    second = _codes(_four(read[1]) ^ 0x80808080, scale, zero, 0, 8, 128, EXACT)
    return _in_a_row(tl.join(first, second))


@triton.jit
def _read_pairs_of_groups(at, quarter, FIFTHS: tl.constexpr):
    """Blocks of 256 in eight groups: scale and smallest factor, 12 bytes with factors of 6 bits,
    fifth bits if any, and 32 bytes with the codes of each two groups.
    """
    words = _words(at + ((48 if FIFTHS else 16) + quarter * 32), 4, 16)
    fifths = _words(at + 16, 4, 16) if FIFTHS else words
    factors = _one_word(at + 4, 16), _one_word(at + 8, 16), _one_word(at + 12, 16)
    return words, fifths, factors, _half(at), _half(at + 2)


@triton.jit
def _pairs_of_groups(read, zero, quarter, FIFTHS: tl.constexpr, EXACT: tl.constexpr):
    """Decode what `_read_pairs_of_groups` reads."""
    # Factors of groups 0 to 3 are the lower six bits of bytes; of 4 to 7, four bits of the last
    # bytes and the upper two of those.
    scales, minimums, last = _whole(read[2][0]), _whole(read[2][1]), _whole(read[2][2])
    early, shift = quarter < 2, (quarter % 2 * 16).to(tl.uint32)
    scales = (
        tl.where(early, scales & 0x3F3F3F3F, last & 0x0F0F0F0F | scales >> 2 & 0x30303030) >> shift
    )
    minimums = (
        tl.where(early, minimums & 0x3F3F3F3F, last >> 4 & 0x0F0F0F0F | minimums >> 2 & 0x30303030)
        >> shift
    )
    scale, minimum = read[3].to(tl.float32), read[4].to(tl.float32)
    one, two = scale * _number(scales & 255, 0), scale * _number(scales >> 8 & 255, 0)
    plus = -(minimum * _number(minimums & 255, 0))
    plus_two = -(minimum * _number(minimums >> 8 & 255, 0))
    words = read[0]
    if FIFTHS:
        fifths = read[1] >> (quarter * 2).to(tl.uint32)[:, :, :, None]
        low = words & 0x0F0F0F0F | (fifths & 0x01010101) << 4
        high = words >> 4 & 0x0F0F0F0F | (fifths & 0x02020202) << 3
        first = _codes(low, one, zero, 0, 5, 0, EXACT, plus)
        second = _codes(high, two, zero, 0, 5, 0, EXACT, plus_two)
    else:
        first = _codes(words, one, zero, 0, 4, 0, EXACT, plus)
        second = _codes(words, two, zero, 4, 4, 0, EXACT, plus_two)
    return _in_a_row(tl.join(first, second))


@triton.jit
def _sixteenth():
    """Compute which 16 of 32 bytes each 8 belong to: [1, 1, 4]."""
    return (tl.arange(0, 4) // 2)[None, None, :]


@triton.jit
def _read_q6_k(at, half):
    """Blocks of 256 in two halves: 128 bytes with the lower four bits, 64 with the upper two of
    four codes each, 16 scales, a scale for all.
    """
    lower = at + half * 64
    factor = at + 192 + half * 8 + _sixteenth()
    factors = tl.load(factor), tl.load(factor + 2), tl.load(factor + 4), tl.load(factor + 6)
    upper = _words(at + 128 + half * 32, 2, 2)
    return _words(lower, 2, 2), _words(lower + 32, 2, 2), upper, factors, _half(at + 208)


@triton.jit
def _q6_k(read, zero, EXACT: tl.constexpr):
    """Decode what `_read_q6_k` reads."""
    lowers, upper, scale = (_two(read[0]), _two(read[1])), _two(read[2]), read[4].to(tl.float32)
    return _four_parts(
        _q6_k_part(lowers, upper, read[3], scale, zero, 0, EXACT),
        _q6_k_part(lowers, upper, read[3], scale, zero, 1, EXACT),
        _q6_k_part(lowers, upper, read[3], scale, zero, 2, EXACT),
        _q6_k_part(lowers, upper, read[3], scale, zero, 3, EXACT),
    )


@triton.jit
def _q6_k_part(lowers, upper, factors, scale, zero, J: tl.constexpr, EXACT: tl.constexpr):
    lower = lowers[J % 2] >> (J // 2 * 4)
    upper = upper << (4 - 2 * J) if J < 3 else upper >> 2
    scale *= _number(factors[J].to(tl.uint32) ^ 128, 128)
    words = lower & 0x0F0F0F0F | upper & 0x30303030
    return _codes(words, scale, zero, 0, 6, 32, EXACT)


@triton.jit
def _byte(word, BYTE: tl.constexpr):
    return word >> (8 * BYTE) & 255


@triton.jit
def _read_q3_k(at, half):
    """Blocks of 256 in two halves: 32 bytes with the third bits of eight codes each, 64 with the
    lower two of four, 12 with factors of 6 bits of 16 codes, a scale.
    """
    factors = _one_word(at + 96, 2), _one_word(at + 100, 2), _one_word(at + 104, 2)
    return _words(at + 32 + half * 32, 2, 2), _words(at, 2, 2), factors, _half(at + 108)


@triton.jit
def _q3_k(read, zero, half, EXACT: tl.constexpr):
    """Decode what `_read_q3_k` reads."""
    shift, scale = (half * 4).to(tl.uint32), read[3].to(tl.float32)
    words, thirds = _two(read[0]), _two(read[1]) >> shift[:, :, :, None]
    # Factors of 16 codes i of groups j of the half: lower 4 bits in bytes 2 j + i, upper 2 of
    # groups 0 and 1 below those of 2 and 3.
    own = (_sixteenth() * 8).to(tl.uint32)
    upper = _whole(read[2][2]) >> shift
    early = (_whole(read[2][0]) >> shift & 0x0F0F0F0F | (upper & 0x03030303) << 4) >> own
    late = (_whole(read[2][1]) >> shift & 0x0F0F0F0F | (upper & 0x0C0C0C0C) << 2) >> own
    return _four_parts(
        _q3_k_part(words, thirds, scale, early, zero, 0, EXACT),
        _q3_k_part(words, thirds, scale, early, zero, 1, EXACT),
        _q3_k_part(words, thirds, scale, late, zero, 2, EXACT),
        _q3_k_part(words, thirds, scale, late, zero, 3, EXACT),
    )


@triton.jit
def _q3_k_part(words, thirds, scale, factors, zero, J: tl.constexpr, EXACT: tl.constexpr):
    third = thirds << (2 - J) if J < 3 else thirds >> 1
    words = words >> (2 * J) & 0x03030303 | third & 0x04040404
    scale *= _number(_byte(factors, J % 2 * 2), 32)
    return _codes(words, scale, zero, 0, 3, 4, EXACT)


@triton.jit
def _read_q2_k(at, half):
    """Blocks of 256 in two halves: 16 bytes with a factor and a smallest factor of 4 bits for 16
    codes each, 64 with four codes of 2 bits, scale and smallest factor.
    """
    factors = at + half * 8
    factors = _one_word(factors, 4), _one_word(factors + 4, 4)
    return _words(at + 16 + half * 32, 2, 4), factors, _half(at + 80), _half(at + 82)


@triton.jit
def _q2_k(read, zero, EXACT: tl.constexpr):
    """Decode what `_read_q2_k` reads."""
    return _four_parts(
        _q2_k_part(read, zero, 0, EXACT),
        _q2_k_part(read, zero, 1, EXACT),
        _q2_k_part(read, zero, 2, EXACT),
        _q2_k_part(read, zero, 3, EXACT),
    )


@triton.jit
def _q2_k_part(read, zero, J: tl.constexpr, EXACT: tl.constexpr):
    factors = _whole(read[1][J // 2]) >> (_sixteenth() * 8 + J % 2 * 16).to(tl.uint32)
    scale = read[2].to(tl.float32) * _number(factors & 15, 0)
    plus = -(read[3].to(tl.float32) * _number(factors >> 4 & 15, 0))
    return _codes(_two(read[0]), scale, zero, 2 * J, 2, 0, EXACT, plus)


@triton.jit
def _looked_up(words, scale, QUANT: tl.constexpr):
    """The values of the codes of `_words`, of the lower and of the upper four bits of bytes, times
    a scale: a row of each.
    """
    code = tl.join(words, words >> 16)
    code = tl.join(code, code >> 8)
    code = tl.join(code, code >> 4) & 15
    value = tl.reshape(tl.gather(codes.table(QUANT), tl.ravel(code).to(tl.int32), 0), code.shape)
    return _in_a_row(value * scale[:, :, :, None, None, None, None])


@triton.jit
def _read_iq4_xs(at, quarter):
    """Blocks of 256 in eight groups: a scale, 2 bytes with the upper two bits of the groups'
    factors, 4 with the lower four, 128 with codes.
    """
    return _words(at + 8 + quarter * 32, 4, 4), _one_word(at, 4), _one_word(at + 4, 4)


@triton.jit
def _iq4_xs(read, quarter):
    """Decode what `_read_iq4_xs` reads."""
    own = tl.arange(0, 2)[None, None, :]
    head = _whole(read[1])
    upper = head >> (quarter * 4 + own * 2 + 16).to(tl.uint32)
    lower = _whole(read[2]) >> (quarter * 8 + own * 4).to(tl.uint32)
    scale = head.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    scale *= _number(lower & 15 | (upper & 3) << 4, 32)
    R: tl.constexpr = scale.shape[0]
    groups: tl.constexpr = scale.shape[1] * 2
    words = tl.reshape(_four(read[0]), [R, groups, 1, 4])
    return _looked_up(words, tl.reshape(scale, [R, groups, 1]), "IQ4_XS")


@triton.jit
def _read_mxfp4(at):
    """Blocks of 32: an exponent, 16 bytes with two 4-bit floats each; of odd size."""
    byte = (at + 1)[:, :, :, None] + tl.arange(0, 4) * 4
    parts = tl.load(byte), tl.load(byte + 1), tl.load(byte + 2), tl.load(byte + 3)
    return parts, tl.load(at)


@triton.jit
def _mxfp4(read):
    """Decode what `_read_mxfp4` reads."""
    first, second = read[0][0].to(tl.uint32), read[0][1].to(tl.uint32)
    third, fourth = read[0][2].to(tl.uint32), read[0][3].to(tl.uint32)
    words = (first | second << 8) | (third << 16 | fourth << 24)
    scale = codes.mx_half(read[1].to(tl.uint32)) * 32768
    return _in_a_row(tl.join(_floats(words, scale, 4), _floats(words >> 4, scale, 4)))


@triton.jit
def _read_own_nibbles(at, half):
    """Blocks of a header word and 16 bytes with two codes each, of which some have two halves."""
    return _words(at + 4 + half * 16, 4, 4), _one_word(at, 4)


@triton.jit
def _read_own_bytes(at, half):
    """Blocks of a header word and 32 bytes with a code each, of which some have two halves."""
    start = at + 4 + half * 32
    return _words(start, 4, 4), _words(start + 16, 4, 4), _one_word(at, 4)


@triton.jit
def _own_bytes(read, zero, HALVES: tl.constexpr, EXACT: tl.constexpr):
    """Decode what `_read_own_bytes` reads."""
    scale, plus = codes.affine(_whole(read[2]), HALVES)
    first = _codes(_four(read[0]), scale, zero, 0, 8, 0, EXACT, plus)
    second = _codes(_four(read[1]), scale, zero, 0, 8, 0, EXACT, plus)
    return _in_a_row(tl.join(first, second))


@triton.jit
def _f8_64(read):
    """Decode what `_read_own_bytes` reads: 8-bit floats."""
    scale, _ = codes.header(_whole(read[2]))
    scale *= 256
    return _in_a_row(tl.join(_floats(_four(read[0]), scale, 8), _floats(_four(read[1]), scale, 8)))


@triton.jit
def _floats(words, scale, BITS: tl.constexpr):
    """The floats of so many bits of each byte of `_words`, as small as `codes` has them, times a
    scale: [R, U, COUNT, 2, 2, 2].
    """
    both = tl.join(codes.floats(words, BITS), codes.floats(words >> 8, BITS))
    first = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    value = tl.permute(tl.join(first, second), (0, 1, 2, 3, 5, 4))
    return value * scale[:, :, :, None, None, None]


@triton.jit
def _read_tq2_0(at, half):
    """Blocks of 256 in two halves: 32 bytes with four digits of 2 bits each; a scale."""
    return _words(at + half * 32, 2, 2), _half(at + 64)


@triton.jit
def _tq2_0(read, zero, EXACT: tl.constexpr):
    """Decode what `_read_tq2_0` reads."""
    words, scale = _two(read[0]), read[1].to(tl.float32)
    return _four_parts(
        _codes(words, scale, zero, 0, 2, 1, EXACT),
        _codes(words, scale, zero, 2, 2, 1, EXACT),
        _codes(words, scale, zero, 4, 2, 1, EXACT),
        _codes(words, scale, zero, 6, 2, 1, EXACT),
    )


@triton.jit
def _eights(unit, SHIFT: tl.constexpr):
    """The number of the first four of each eight values of a unit in a block of 2^SHIFT units of
    32: [1, U, 4, 1].
    """
    first = (unit & ((1 << SHIFT) - 1)) * 8
    return first[None, :, None, None] + (tl.arange(0, 4) * 2)[:, None]


@triton.jit
def _read_fours(at, unit, SHIFT: tl.constexpr, QUANT: tl.constexpr):
    """Blocks of 2^SHIFT units of 32, four times 8 values."""
    at, first = at[:, :, :, None], _eights(unit, SHIFT)
    words = codes.read_four(at, first + tl.arange(0, 2), QUANT, False)
    return words, codes.read_scale(at, first, QUANT, False)


@triton.jit
def _fours(
    read,
    unit,
    zero,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    EXACT: tl.constexpr,
    QUANT: tl.constexpr,
    p,
):
    """Decode what `_read_fours` reads: codes of so many bits, OFFSET more each; of four bits, they
    are floats.
    """
    first = _eights(unit, SHIFT)
    scale = codes.scale(read[1], first, QUANT)
    scale = tl.reshape(scale, [scale.shape[0], scale.shape[1], 4])
    code = codes.four(read[0], first + tl.arange(0, 2), QUANT, p)
    if BITS == 4:
        value = _floats(code, scale * 32768, 4)
    else:
        # Few bits go to the upper end of their byte: the less is subtracted, the less is lost.
        FROM: tl.constexpr = 8 - BITS if BITS < 7 else 0
        value = _codes(code << FROM, scale, zero, FROM, BITS, OFFSET, EXACT)
    return _in_a_row(value)
