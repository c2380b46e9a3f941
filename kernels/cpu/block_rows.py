"""Products with rows of GGUF blocks, compiled by numba the first time a type is met and kept on
disk from then on.

Every function here is one block type and has one form:

    q4_k(x, w, half, rows, out, first, last, lanes)

x fp32 [M, K], w u8 [N, row bytes], out fp32 [M, N]. Rows first..last of w are decoded one after the
other into the rows of `rows`, fp32 [R, K], round and round, and out[:, n] = x @ row: with R = 1 a
product whose weights never leave the first cache, with M = 0 and R = last - first plain decoding.
The values are, bit for bit, those of `blocks.dequantize`; the layouts are ggml's (ggml-common.h).

`half` holds all fp16 numbers as fp32. `lanes` is 16, given at run time: loops of a constant length
are unrolled before they can be vectorized, and then are four times slower. The interpreter lock is
not held, so that threads can share the rows of a weight.
"""

# numba's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from mtmd.kernels.quantization.small import IQ4_VALUES

LANES = 16
HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_IQ4 = np.array(IQ4_VALUES, dtype=np.float32)
_4, _8, _16, _32 = np.float32(4), np.float32(8), np.float32(16), np.float32(32)

# A field of a byte is masked and scaled down instead of shifted: a shift by a variable is slow, and
# powers of two change no digit.
_MASK1 = np.array([1 << bit for bit in range(8)], dtype=np.uint8)
_MASK2 = np.array([3, 12, 48, 192], dtype=np.uint8)
_MASK4 = np.array([15, 240], dtype=np.uint8)
_UNIT = np.array([2.0**-bit for bit in range(8)], dtype=np.float32)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True, **options)(function)


def _sums(function: Callable[..., Any]) -> Any:
    """Compiled so that sums may be taken in any order, which vectors need; decoding stays as it is
    written.
    """
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


@_sums
def _dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@_compiled
def _multiply(x, row, out, n):
    for m in range(x.shape[0]):
        out[m, n] = _dot(x[m], row)


@_compiled
def _half(half, block, at):
    return half[block[at] | (block[at + 1] << 8)]


@_compiled
def q8_0(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 34):
            block = w[n, b * 34 : b * 34 + 34]
            d, codes, to = _half(half, block, 0), block[2:], row[b * 32 : b * 32 + 32]
            for i in range(2 * lanes):
                to[i] = d * np.float32(np.int8(codes[i]))
        _multiply(x, row, out, n)


@_compiled
def q4_0(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 18):
            block = w[n, b * 18 : b * 18 + 18]
            d, codes, low, high = (
                _half(half, block, 0),
                block[2:],
                row[b * 32 : b * 32 + 16],
                row[b * 32 + 16 : b * 32 + 32],
            )
            for i in range(lanes):
                low[i] = d * (np.float32(codes[i] & 15) - _8)
                high[i] = d * (np.float32(codes[i] >> 4) - _8)
        _multiply(x, row, out, n)


@_compiled
def q4_1(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 20):
            block = w[n, b * 20 : b * 20 + 20]
            d, m, codes = _half(half, block, 0), _half(half, block, 2), block[4:]
            low, high = row[b * 32 : b * 32 + 16], row[b * 32 + 16 : b * 32 + 32]
            for i in range(lanes):
                low[i] = d * np.float32(codes[i] & 15) + m
                high[i] = d * np.float32(codes[i] >> 4) + m
        _multiply(x, row, out, n)


@_compiled
def _word(block, at):
    return (
        np.uint32(block[at])
        | np.uint32(block[at + 1]) << 8
        | np.uint32(block[at + 2]) << 16
        | np.uint32(block[at + 3]) << 24
    )


@_compiled
def q5_0(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 22):
            block = w[n, b * 22 : b * 22 + 22]
            d, fifth, codes = _half(half, block, 0), _word(block, 2), block[6:]
            low, high = row[b * 32 : b * 32 + 16], row[b * 32 + 16 : b * 32 + 32]
            for i in range(lanes):
                low[i] = d * (np.float32(codes[i] & 15 | (fifth >> i & 1) << 4) - _16)
                high[i] = d * (np.float32(codes[i] >> 4 | (fifth >> (i + 16) & 1) << 4) - _16)
        _multiply(x, row, out, n)


@_compiled
def q5_1(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 24):
            block = w[n, b * 24 : b * 24 + 24]
            d, m, fifth, codes = (
                _half(half, block, 0),
                _half(half, block, 2),
                _word(block, 4),
                block[8:],
            )
            low, high = row[b * 32 : b * 32 + 16], row[b * 32 + 16 : b * 32 + 32]
            for i in range(lanes):
                low[i] = d * np.float32(codes[i] & 15 | (fifth >> i & 1) << 4) + m
                high[i] = d * np.float32(codes[i] >> 4 | (fifth >> (i + 16) & 1) << 4) + m
        _multiply(x, row, out, n)


@_compiled
def iq4_nl(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 18):
            block = w[n, b * 18 : b * 18 + 18]
            d, codes, low, high = (
                _half(half, block, 0),
                block[2:],
                row[b * 32 : b * 32 + 16],
                row[b * 32 + 16 : b * 32 + 32],
            )
            for i in range(lanes):
                low[i] = d * _IQ4[codes[i] & 15]
                high[i] = d * _IQ4[codes[i] >> 4]
        _multiply(x, row, out, n)


@_compiled
def q2_k(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 84):
            block = w[n, b * 84 : b * 84 + 84]
            d, dmin = _half(half, block, 80), _half(half, block, 82)
            for part in range(8):  # four parts of 32 values share 32 bytes of codes
                pair, at, one, two = (
                    part % 4,
                    16 + part // 4 * 32,
                    block[2 * part],
                    block[2 * part + 1],
                )
                mask, unit = _MASK2[pair], _UNIT[pair * 2]
                first_scale, second_scale = (
                    d * np.float32(one & 15) * unit,
                    d * np.float32(two & 15) * unit,
                )
                first_minimum, second_minimum = (
                    dmin * np.float32(one >> 4),
                    dmin * np.float32(two >> 4),
                )
                codes, to = block[at : at + 32], row[b * 256 + part * 32 : b * 256 + part * 32 + 32]
                for i in range(2 * lanes):
                    scale, minimum = (
                        (first_scale, first_minimum)
                        if i < lanes
                        else (second_scale, second_minimum)
                    )
                    to[i] = scale * np.float32(codes[i] & mask) - minimum
        _multiply(x, row, out, n)


@_compiled
def _factor3(block, group):
    factor = (
        block[96 + group % 8] >> group // 8 * 4 & 15
        | (block[104 + group % 4] >> group // 4 * 2 & 3) << 4
    )
    return np.float32(factor) - _32


@_compiled
def q3_k(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 110):
            block = w[n, b * 110 : b * 110 + 110]
            d = _half(half, block, 108)
            # Four parts of 32 values share 32 bytes of codes, all share 32 of third bits.
            for part in range(8):
                first_scale, second_scale = (
                    d * _factor3(block, 2 * part),
                    d * _factor3(block, 2 * part + 1),
                )
                pair, at = part % 4, 32 + part // 4 * 32
                mask, unit, bit, four = (
                    _MASK2[pair],
                    _UNIT[pair * 2],
                    _MASK1[part],
                    _4 * _UNIT[part],
                )
                codes, to = block[at : at + 32], row[b * 256 + part * 32 : b * 256 + part * 32 + 32]
                for i in range(2 * lanes):
                    scale = first_scale if i < lanes else second_scale
                    to[i] = scale * (
                        np.float32(codes[i] & mask) * unit + np.float32(block[i] & bit) * four - _4
                    )
        _multiply(x, row, out, n)


@_compiled
def _factors(block, group):
    """The 6-bit factors of a group's scale and minimum."""
    if group < 4:
        return np.float32(block[4 + group] & 63), np.float32(block[8 + group] & 63)
    return (
        np.float32(block[8 + group] & 15 | block[group] >> 6 << 4),
        np.float32(block[8 + group] >> 4 | block[4 + group] >> 6 << 4),
    )


@_compiled
def q4_k(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 144):
            block = w[n, b * 144 : b * 144 + 144]
            d, dmin = _half(half, block, 0), _half(half, block, 2)
            for group in range(8):
                scale, minimum = _factors(block, group)
                scale, minimum, mask = (
                    d * scale * _UNIT[group % 2 * 4],
                    dmin * minimum,
                    _MASK4[group % 2],
                )
                codes, to = (
                    block[16 + group // 2 * 32 : 48 + group // 2 * 32],
                    row[b * 256 + group * 32 : b * 256 + group * 32 + 32],
                )
                for i in range(2 * lanes):
                    to[i] = scale * np.float32(codes[i] & mask) - minimum
        _multiply(x, row, out, n)


@_compiled
def q5_k(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 176):
            block = w[n, b * 176 : b * 176 + 176]
            d, dmin, fifth = _half(half, block, 0), _half(half, block, 2), block[16:48]
            for group in range(8):
                scale, minimum = _factors(block, group)
                scale, minimum, mask, unit = (
                    d * scale,
                    dmin * minimum,
                    _MASK4[group % 2],
                    _UNIT[group % 2 * 4],
                )
                bit, sixteen = _MASK1[group], _16 * _UNIT[group]
                codes, to = (
                    block[48 + group // 2 * 32 : 80 + group // 2 * 32],
                    row[b * 256 + group * 32 : b * 256 + group * 32 + 32],
                )
                for i in range(2 * lanes):
                    to[i] = (
                        scale
                        * (
                            np.float32(codes[i] & mask) * unit
                            + np.float32(fifth[i] & bit) * sixteen
                        )
                        - minimum
                    )
        _multiply(x, row, out, n)


@_compiled
def q6_k(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 210):
            block = w[n, b * 210 : b * 210 + 210]
            d = _half(half, block, 208)
            # Four groups of 32 values share 64 bytes of codes and 32 of upper bits; each has two
            # scales.
            for side in range(2):
                c0, c1 = block[side * 64 : side * 64 + 32], block[side * 64 + 32 : side * 64 + 64]
                upper, at = block[128 + side * 32 : 160 + side * 32], b * 256 + side * 128
                to0, to1, to2, to3 = (
                    row[at : at + 32],
                    row[at + 32 : at + 64],
                    row[at + 64 : at + 96],
                    row[at + 96 : at + 128],
                )
                factors = block[192 + side * 8 : 200 + side * 8]
                a0, b0, a1, b1 = (
                    d * np.float32(np.int8(factors[0])),
                    d * np.float32(np.int8(factors[1])),
                    d * np.float32(np.int8(factors[2])),
                    d * np.float32(np.int8(factors[3])),
                )
                a2, b2, a3, b3 = (
                    d * np.float32(np.int8(factors[4])),
                    d * np.float32(np.int8(factors[5])),
                    d * np.float32(np.int8(factors[6])),
                    d * np.float32(np.int8(factors[7])),
                )
                for i in range(2 * lanes):
                    start = i < lanes
                    to0[i] = (a0 if start else b0) * (
                        np.float32(c0[i] & 15 | (upper[i] & 3) << 4) - _32
                    )
                    to1[i] = (a1 if start else b1) * (
                        np.float32(c1[i] & 15 | (upper[i] & 12) << 2) - _32
                    )
                    to2[i] = (a2 if start else b2) * (np.float32(c0[i] >> 4 | upper[i] & 48) - _32)
                    to3[i] = (a3 if start else b3) * (
                        np.float32(c1[i] >> 4 | (upper[i] & 192) >> 2) - _32
                    )
        _multiply(x, row, out, n)


@_compiled
def iq4_xs(x, w, half, rows, out, first, last, lanes):
    for n in range(first, last):
        row = rows[(n - first) % rows.shape[0]]
        for b in range(w.shape[1] // 136):
            block = w[n, b * 136 : b * 136 + 136]
            d, upper = _half(half, block, 0), block[2] | block[3] << 8
            for group in range(8):
                factor = block[4 + group // 2] >> group % 2 * 4 & 15 | (upper >> 2 * group & 3) << 4
                scale, codes, at = (
                    d * (np.float32(factor) - _32),
                    block[8 + group * 16 : 24 + group * 16],
                    b * 256 + group * 32,
                )
                low, high = row[at : at + 16], row[at + 16 : at + 32]
                for i in range(lanes):
                    low[i] = scale * _IQ4[codes[i] & 15]
                    high[i] = scale * _IQ4[codes[i] >> 4]
        _multiply(x, row, out, n)


KERNELS: dict[str, Any] = {
    kernel.__name__.upper(): kernel
    for kernel in (q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q3_k, q2_k, iq4_nl, iq4_xs)
}
