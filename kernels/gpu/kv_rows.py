"""Rows of a cache in fewer bytes (`mtmd.kernels.quantization.kv_rows`) as part of other kernels:
some columns of some rows read, and rows written. Numbers of fp8 are made of their bits, as not
every GPU has the type.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.quantization.kv_rows import BLOCK, ROW_TYPES, blocks_of, cached_bytes, part_types

BLOCK_VALUES = tl.constexpr(BLOCK)
NORM = tl.constexpr(BLOCK**-0.5)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number


def constants(quant: str | None, head: int) -> dict[str, int | bool | str]:
    """Return the constants by which kernels know such rows."""
    if quant is None:
        return {
            "QUANT": "",
            "V_QUANT": "",
            "ROTATED": False,
            "V_ROTATED": False,
            "ROW": head,
            "PADDED": head,
        }
    keys, values = part_types(quant)
    return {
        "QUANT": keys,
        "V_QUANT": values,
        "ROTATED": ROW_TYPES[keys].rotated,
        "V_ROTATED": ROW_TYPES[values].rotated,
        "ROW": cached_bytes(quant, head),
        "PADDED": blocks_of(head) * BLOCK,
    }


@triton.jit
def rotate(x, EXACT: tl.constexpr):
    """The Walsh-Hadamard transform of each 32 columns of x [ROWS, COLUMNS], fp32. Signs are exact
    in 16 bits, so matrix instructions take queries as they are, and what is fp32 in two parts of 8
    bits, unless it is to be EXACT.
    """
    i = tl.arange(0, BLOCK_VALUES)
    common = i[:, None] & i[None, :]
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    odd = (common ^ (common >> 1)) & 1
    signs = tl.where(odd == 1, -1.0, 1.0)
    blocks = tl.reshape(x, [x.shape[0] * x.shape[1] // BLOCK_VALUES, BLOCK_VALUES])
    if EXACT:
        y = tl.dot(blocks, signs, input_precision="ieee")
    elif x.dtype == tl.float32:
        high = blocks.to(tl.bfloat16)
        low = (blocks - high.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(low, signs.to(tl.bfloat16), tl.dot(high, signs.to(tl.bfloat16)))
    else:
        y = tl.dot(blocks, signs.to(x.dtype))
    return tl.reshape(y * NORM, [x.shape[0], x.shape[1]])


@triton.jit
def read_columns(
    base,
    rows,
    there,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    QUANT: tl.constexpr,
    C: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Columns FIRST..FIRST + COUNT of rows in the type QUANT, fp32, as they are coded, so maybe
    turned (`rotate`); zeros past the last block and, under COMPARE, in rows that are not there.
    `rows` are offsets in units of ROW_ALIGN bytes.
    """
    begin = base + rows * C.ROW_ALIGN
    c = FIRST + tl.arange(0, COUNT)
    inside = (c < C.PADDED)[None, :]
    if COMPARE:
        inside = inside & there[:, None]
    if QUANT == "bf16" or QUANT == "fp32":
        numbers = tl.load(_numbers(begin, QUANT)[:, None] + c[None, :], mask=inside, other=0)
        return numbers.to(tl.float32)
    return _decoded(begin, there, c, inside, FIRST, COUNT, QUANT, C, COMPARE)


@triton.jit
def _numbers(to, QUANT: tl.constexpr):
    """Pointers to the numbers of rows at the pointers `to`, which are stored as they are."""
    TYPE: tl.constexpr = tl.bfloat16 if QUANT == "bf16" else tl.float32
    return to.to(tl.pointer_type(TYPE))


@triton.jit
def _decoded(
    begin,
    there,
    c,
    inside,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    QUANT: tl.constexpr,
    C: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """Columns c of the rows at `begin`, by codes and scales; zeros where `inside` is off."""
    CODES: tl.constexpr = C.PADDED // 2 if QUANT == "q4_0" else C.PADDED
    if QUANT == "q4_0":
        at = c // BLOCK_VALUES * (BLOCK_VALUES // 2) + c % (BLOCK_VALUES // 2)
        codes = tl.load(begin[:, None] + at[None, :], mask=inside, other=0).to(tl.int32)
        upper = (c % BLOCK_VALUES >= BLOCK_VALUES // 2)[None, :]
        numbers = (tl.where(upper, codes >> 4, codes & 15) - 8).to(tl.float32)
    else:
        codes = tl.load(begin[:, None] + c[None, :], mask=inside, other=0)
        if QUANT == "q8_0":
            numbers = codes.to(tl.int8, bitcast=True).to(tl.float32)
        else:  # as fp16, whose exponent begins 8 lower
            wide = codes.to(tl.int16)
            halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            numbers = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    GROUPS: tl.constexpr = COUNT // BLOCK_VALUES
    of = FIRST // BLOCK_VALUES + tl.arange(0, GROUPS)
    at = (begin + CODES).to(tl.pointer_type(tl.float16))[:, None] + of[None, :]
    some = (of * BLOCK_VALUES < C.PADDED)[None, :]
    if COMPARE:
        some = some & there[:, None]
    scales = tl.load(at, mask=some, other=0).to(tl.float32)
    parts = tl.reshape(numbers, [begin.shape[0], GROUPS, BLOCK_VALUES])
    numbers = tl.reshape(parts * scales[:, :, None], [begin.shape[0], COUNT])
    return tl.where(inside, numbers, 0.0)


@triton.jit
def write_rows(to, x, there, QUANT: tl.constexpr, C: tl.constexpr):
    """x fp32 [ROWS, COLUMNS], zeros from column K on, in rows of the type QUANT at the pointers
    `to`.
    """
    if QUANT == "bf16" or QUANT == "fp32":
        c = tl.arange(0, x.shape[1])
        at = _numbers(to, QUANT)
        numbers = x.to(at.dtype.element_ty)
        tl.store(at[:, None] + c[None, :], numbers, mask=there[:, None] & (c < C.PADDED)[None, :])
    else:
        _write_codes(to, x, there, QUANT, C)


@triton.jit
def _write_codes(to, x, there, QUANT: tl.constexpr, C: tl.constexpr):
    """x fp32 [ROWS, COLUMNS] as codes and scales."""
    CODES: tl.constexpr = C.PADDED // 2 if QUANT == "q4_0" else C.PADDED
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // BLOCK_VALUES
    turned = x if QUANT == "fp8" else rotate(x, True)
    parts = tl.reshape(turned, [ROWS, GROUPS, BLOCK_VALUES])
    # As integers, in whose order a NaN is the largest: a GPU's maximum of numbers forgets it, and
    # the row would be stored as one without.
    top = tl.max(tl.abs(parts).to(tl.int32, bitcast=True), 2).to(tl.float32, bitcast=True)
    if QUANT == "q4_0":
        low = tl.min(parts, 2)
        top = tl.where((-low > tl.max(parts, 2)) & (top == top), low, top)
    group = tl.arange(0, GROUPS)
    if QUANT == "q8_0":
        stored = (top * (1 / 127.0)).to(tl.float16)
    elif QUANT == "q4_0":
        stored = (top * (-1 / 8.0)).to(tl.float16)
    else:
        stored = (top * (1 / 448.0)).to(tl.float16)
    at = (to + CODES).to(tl.pointer_type(tl.float16))[:, None] + group[None, :]
    real = (group * BLOCK_VALUES < C.K)[None, :]
    tl.store(at, stored, mask=there[:, None] & real)
    scale = stored.to(tl.float32)
    factor = tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale))
    factor = tl.where((scale != 0) & (tl.abs(factor) < float("inf")), factor, 0.0)
    shared = parts * factor[:, :, None]
    shared = tl.where(shared == shared, shared, 0.0)
    if QUANT == "q4_0":
        codes = tl.floor(shared + 8.5)
        codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
        pairs = tl.permute(tl.reshape(codes, [ROWS, GROUPS, 2, BLOCK_VALUES // 2]), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        codes = tl.reshape(first | (second << 4), [ROWS, x.shape[1] // 2])
    elif QUANT == "q8_0":
        nearest = tl.minimum(tl.maximum(shared, -127.0), 127.0) + MAGIC - MAGIC
        codes = tl.reshape(nearest.to(tl.int32), [ROWS, x.shape[1]])
    else:
        codes = tl.reshape(_f8(shared), [ROWS, x.shape[1]])
    c = tl.arange(0, codes.shape[1])
    at = to[:, None] + c[None, :]
    tl.store(at, codes.to(tl.uint8), mask=there[:, None] & (c < CODES)[None, :])


@triton.jit
def _f8(x):
    """The bits of e4m3fn, to the nearest even."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)  # a scale may have been rounded down
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # a step is 2^-9 there
    return tl.where(size < 121 << 23, small, normal) | ((bits >> 24) & 0x80)
