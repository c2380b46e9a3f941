"""Products of one row of x with blocks of few bits, on CPUs with AVX2 alone: blocks as bytes.

An instruction multiplies 32 bytes without a sign by signed ones and adds the products in pairs, 16
bits wide. x is in 16 bits, as it is for other types, cut into two signed bytes:

    q = 256 upper + lower,  -127 <= upper <= 127,  -128 <= lower <= 127,  |q| <= 32639

So that is as many multiplications as of 16-bit integers, and as exact, but codes are unpacked 32 at
a time, not 16.

A pair's products are at most 2 * 128 * `largest` in size, which is the largest number of the bytes:
16 bits hold the sum of 127 // `largest` of them. Where groups have factors, pairs are multiplied by
theirs, 16 bits wide, and added up in 32 bits, upper and lower ones each on their own: a lane adds
up 32 products, at most 32 * 128 * 7 * 32 * 256 of Q3_K, whose factors are upper bytes, and less of
others, which is below 2^31.

Several rows of x would share the work of unpacking, so 16-bit integers (unpack.py) are faster for
them.
"""

from __future__ import annotations

from types import MappingProxyType

from mtmd.kernels.cpu.native import unpack_bytes, unpack_grids
from mtmd.kernels.cpu.native.compile import Cpu
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.layouts import LANES, UPPER, madd, madd_bytes
from mtmd.kernels.cpu.native.unpack import Terms, Unpack

PLANES = MappingProxyType(
    {unpack.kind: unpack for unpack in (*unpack_bytes.BLOCKS, *unpack_grids.BLOCKS)}
)
RUNS = 2  # read side by side: rows of few bits are so short that more of them are slower


def pay(cpu: Cpu) -> bool:
    """Return whether bytes are faster than 16-bit integers: with AVX-512, 16-bit integers are."""
    return cpu.has("avx2") and not cpu.has("avx512bw")


def multiply(e: Emitter, unpack: Unpack, terms: Terms, x: Value, total: Var) -> None:
    """Add a chunk's products to fp32 [8]."""
    for part in range(unpack.layout.parts):
        _part(e, unpack, part, terms, x, total)


def hold(unpack: Unpack) -> int:
    """Return of how many vectors 16 bits hold the sums of pairs."""
    return 127 // unpack.largest


def _part(e: Emitter, unpack: Unpack, part: int, terms: Terms, x: Value, total: Var) -> None:
    layout, whole, real = unpack.layout, vec(I32, unpack.layout.sums), vec(F32, unpack.layout.sums)
    planes: list[Value] = []
    if terms.factors is None:
        number = _sum(e, unpack, part, terms, x)
        if layout.zero:
            number = number + e.load(x.at(layout.extra_at(part)), whole, align=32)
        number = number.sitofp()
    else:
        for index in range(part * layout.each, (part + 1) * layout.each):
            codes, factor = next(terms.vectors), next(terms.factors)
            pairs = [madd(e, madd_bytes(e, codes, plane), factor) for plane in _load(e, x, index)]
            planes = [a + b for a, b in zip(planes, pairs, strict=True)] if planes else pairs
        upper, lower = planes
        number = e.fma(upper.sitofp(), float(UPPER), lower.sitofp())
    result = total.get()
    if terms.minima:
        minima, own = terms.minima[part], None
        assert terms.minimum is not None
        for first in range(0, minima.lanes, real.count):
            here = minima.shuffle(range(first, first + real.count))
            extra = e.load(x.at(layout.extra_at(part)), real, first, align=32)
            own = here * extra if own is None else e.fma(here, extra, own)
        assert own is not None
        result = e.fma(own, terms.minimum, result)
    scale = e.load(x.at(layout.scale_at(part)), real, align=32)
    result = e.fma(number, terms.scales[part] * scale, result)
    total.set(result)


def _sum(e: Emitter, unpack: Unpack, part: int, terms: Terms, x: Value) -> Value:
    """Return the sums of the products of a part without factors: int32 [8]."""
    layout, step = unpack.layout, hold(unpack)
    indices = range(part * layout.each, (part + 1) * layout.each)
    result = None
    for first in indices[::step]:
        sums: list[Value] = []
        for index in range(first, min(first + step, indices.stop)):
            codes = next(terms.vectors)
            pairs = [madd_bytes(e, codes, plane) for plane in _load(e, x, index)]
            sums = [a + b for a, b in zip(sums, pairs, strict=True)] if sums else pairs
        upper, lower = (
            madd(e, own, e.const(vec(I16, LANES // 2), worth))
            for own, worth in zip(sums, (UPPER, 1), strict=True)
        )
        result = upper + lower if result is None else result + upper + lower
    assert result is not None
    return result


def _load(e: Emitter, x: Value, index: int) -> list[Value]:
    """Both planes of a vector."""
    return [e.load(x, vec(I8, LANES), (2 * index + i) * LANES, align=32) for i in range(2)]
