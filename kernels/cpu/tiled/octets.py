"""Products of many rows with x in 8-bit integers: the fastest form of CPUs without AMX, and the
least exact, so that a user has to choose it.

    out[m, n] = sum over groups of  scale[n] s[m] (sum of q[m, k] c[n, k]) + minimum[n] (sum of x)

c are the weight's own integers, so that nothing of it is rounded. q are x as integers from -127 to
127, with a scale s for every 32 numbers. Instructions multiply bytes without a sign, q + 128, by
signed ones, c; what that is too much, 128 times the sum of c, is what sums begin with.

AVX-512 VNNI and AVX-VNNI add four products at a time to a 32-bit sum. Other CPUs add two of them in
16 bits, as often as that cannot overflow (`Center.steps`), and those in 32 bits. Beside weights of
8 bits not even two fit, so x has 7 there: q from -63 to 63, and 64 more.

A step of a panel is 32 numbers of 16 columns: int8 [four numbers, 16 columns, 4], then int32 what
sums begin with [group, 16 columns], float32 scales [group, 16 columns], and minima where the type
has them. x is laid out once for all products that read it: uint8 [rows, numbers], float32 scales
[rows, steps], and sums of 16 numbers each [rows, steps, 2].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from mtmd.kernels.cpu.native.compile import Cpu, compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, Emitter, Value, Var, scalar_of, vec
from mtmd.kernels.cpu.native.layouts import madd, madd_bytes, quantized
from mtmd.kernels.cpu.tiled.codes import FORMS, ROWS, RUN
from mtmd.kernels.cpu.tiled.words import Prepared, add_scaled

EXACT = 8  # bits of x
FEWER = 7  # bits of x whose products with weights of 8 bits can be added in twos in 16 bits
FOUR = 4  # numbers whose products an instruction adds
UNROLLED = 2  # fours
CODES_BYTES = RUN * ROWS


@dataclass(frozen=True)
class Center:
    """Integers of a type less `less`, which are from -`largest` to `largest`."""

    less: int
    largest: int

    def steps(self, bits: int) -> int:
        """Return how many products of two numbers each, with x in so many bits, a 16-bit integer
        holds the sum of, a power of two; 0 where it does not hold one.
        """
        count = 32767 // (2 * (_more(bits) + _limit(bits)) * self.largest)
        return 1 << count.bit_length() - 1 if count else 0


CENTERS = MappingProxyType(
    {
        **dict.fromkeys(("Q1_0", "TQ1_0", "TQ2_0"), Center(0, 1)),
        **dict.fromkeys(("Q2_K", "Q3_K"), Center(0, 4)),
        "Q4_0": Center(0, 8),
        **dict.fromkeys(("Q4_1", "Q4_K", "U4_32", "U4_64", "A4_64"), Center(8, 8)),
        **dict.fromkeys(("MXFP4", "NVFP4", "NV4_128"), Center(0, 12)),
        "Q5_0": Center(0, 16),
        **dict.fromkeys(("Q5_1", "Q5_K"), Center(16, 16)),
        "Q6_K": Center(0, 32),
        **dict.fromkeys(("Q8_0", "IQ4_NL", "IQ4_XS"), Center(0, 128)),
        **dict.fromkeys(("A8_32", "U8_64"), Center(128, 128)),
    }
)
"""Types of weights that can be multiplied so: those of the usual files."""


def in_octets(
    kind: str, form: tuple[str, int, int, int], cpu: Cpu
) -> tuple[str, int, int, int] | None:
    """Return the form of products with a type of weight, where x in its own type has `form`; None
    where that is better, or no other is there.
    """
    if kind not in CENTERS or why_not(form, cpu) is not None:
        return None
    return ("octets", 16, 8, 2) if form[1] == 16 else ("octets", 8, 4, 2)


def why_not(form: tuple[str, int, int, int] | None, cpu: Cpu) -> str | None:
    """Why no product is faster with x in 8 bits on a CPU whose products have `form` without; None
    where some are.
    """
    if form is not None and form[0] == "tiles":
        return "its AMX multiplies bf16 faster than other instructions multiply int8"
    if form is None or not cpu.has("avx512bw" if form[1] == 16 else "avx2"):
        return "it has neither AVX2 nor AVX-512 BW"
    return None


def bits_of(kind: str, has: Callable[[str], bool]) -> int:
    """Return the bits of x in products with a type of weight, on a CPU that has these features."""
    return EXACT if _has_dots(has) or CENTERS[kind].steps(EXACT) else FEWER


def _limit(bits: int) -> int:
    """Return the largest number of so many bits."""
    return (1 << bits - 1) - 1


def _more(bits: int) -> int:
    """Return what makes x a number without a sign."""
    return 1 << bits - 1


def _has_dots(has: Callable[[str], bool]) -> bool:
    return has("avx512vnni") or has("avxvnni")


def step_bytes(kind: str) -> int:
    """Return the bytes of a step of 16 columns."""
    codes = FORMS[kind]
    return CODES_BYTES + 4 * ROWS * codes.groups * (2 + codes.minimum)


def prepared(dtype: str, bits: int) -> Prepared:
    address = compile_kernel(emit_prepare, dtype, bits)
    return Prepared(address, f"octets {dtype} {bits}", octets_bytes)


def octets_bytes(rows: int, width: int) -> int:
    """Return the bytes of x prepared."""
    return rows * (width // RUN) * (RUN + 4 + 8)


def emit_prepare(e: Emitter, dtype: str, bits: int) -> None:
    """args: x, its row stride in elements, what is prepared (aligned to 64), width, rows. Units:
    rows.
    """
    x, stride, to, half = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), RUN // 2
    steps, rows = e.arg(3) // RUN, e.arg(4)
    scales, sums = _behind(to, rows, steps)
    with e.loop(e.first, e.last) as row, e.loop(0, steps) as step:
        values = [e.read(x, dtype, row * stride + step * RUN + i, half) for i in (0, half)]
        scale, integers = quantized(e, values, _limit(bits))
        slot = row * steps + step
        whole = (integers[0].concat(integers[1]) + _more(bits)).trunc(I8)
        e.store(to, whole, slot * RUN, align=RUN)
        e.store(scales, scale, slot)
        for i, some in enumerate(integers):
            e.store(sums, e.sum(some).sitofp() * scale, slot * 2 + i)


def _behind(numbers: Value, rows: Value, steps: Value) -> tuple[Value, Value]:
    """Return where scales and sums lie."""
    scales = numbers.at(rows * steps * RUN)
    return scales, scales.at(rows * steps * 4)


def lay_step(
    e: Emitter,
    kind: str,
    blocks: list[Value],
    run: Value,
    tables: list[Value],
    at: Value,
    to: Value,
) -> None:
    """Store a step: run `run` of the blocks of 16 rows."""
    codes, center, half = FORMS[kind], CENTERS[kind], ROWS // 2
    fours = RUN // FOUR // codes.groups
    begins, scales, minima = (CODES_BYTES + 4 * ROWS * codes.groups * n for n in range(3))
    ones, more = e.const(vec(I8, FOUR * half), 1), _more(bits_of(kind, e.has))
    for first in (0, half):
        rows = [
            codes.whole(e, block, run, center.less).trunc(I8).bits(vec(I32, half))
            for block in blocks[first : first + half]
        ]
        columns = e.transposed(rows)
        for i, column in enumerate(columns):
            e.store(to, column, i * ROWS + first, align=4 * half)
        for group in range(codes.groups):
            total = None
            for column in columns[group * fours : (group + 1) * fours]:
                both = madd_bytes(e, ones, column.bits(ones.type))
                total = both if total is None else total + both
            assert total is not None
            less = madd(e, total, e.const(total.type, -more))
            e.store(to.at(begins + 4 * (ROWS * group + first)), less, align=4 * half)
    for group in range(codes.groups):
        here = to.at(4 * ROWS * group)
        scale, *minimum = (
            e.load(table, vec(F32, ROWS), (at + group) * ROWS, align=64) for table in tables
        )
        e.store(here.at(scales), scale, align=64)
        if minimum:
            e.store(here.at(minima), e.fma(scale, float(center.less), minimum[0]), align=64)


def dots(e: Emitter, x: Value, w: Value, total: Value) -> Value:
    """total [n] and products of bytes without a sign and signed ones [4 n], added in fours."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.lanes}"
    # As LLVM had it before version 22, which takes both
    return e.call(name, total.type, total, x.bits(total.type), w.bits(total.type))


Sums = list[list[Var]]  # [row, panel]


class Octets:
    """Products with x in integers, as `Prepared` lays it out."""

    def __init__(self, e: Emitter, kind: str, numbers: Value, rows: Value, steps: Value):
        self.e, self.codes, self.step, self.steps = e, FORMS[kind], step_bytes(kind), steps
        self.once, self.numbers = CENTERS[kind].steps(bits_of(kind, e.has)), numbers
        self.scales, self.sums = _behind(numbers, rows, steps)

    def multiply(
        self,
        panels: list[Value],
        sums: Callable[[], list[Value]],
        row: Value,
        start: Value,
        stop: Value,
        form: tuple[str, int, int, int],
    ) -> None:
        """Add some steps to `sums()`, float32 [rows, 16] of each of `panels`, `lanes` columns."""
        e, codes, (_, lanes, each, _) = self.e, self.codes, form
        fours = RUN // FOUR // codes.groups
        with e.loop(start, stop) as step:
            slots = [(row + i) * self.steps + step for i in range(each)]
            here = [panel.at(step * self.step) for panel in panels]
            for group in range(codes.groups):
                begins, kind = CODES_BYTES + 4 * ROWS * group, vec(I32, lanes)
                begin = [e.load(panel.at(begins), kind, align=4 * lanes) for panel in here]
                totals = [[e.var(kind, value) for value in begin] for _ in slots]
                first, last = group * fours, (group + 1) * fours
                if _has_dots(e.has):
                    with e.loop(first, last, UNROLLED) as at:
                        self._products(totals, slots, here, at, UNROLLED)
                elif self.once == 1:  # all at once, as AVX2 is 1.25 times as fast then
                    ones = e.const(vec(I16, 2 * lanes), 1)
                    self._products(totals, slots, here, e.i64(first), fours, ones)
                else:
                    once = min(fours, self.once)
                    with e.loop(first, last, once) as at:
                        self._in_16_bits(totals, slots, here, at, once)
                xs, behind = (self.scales, self.sums), CODES_BYTES + 4 * ROWS * codes.groups
                add_scaled(e, codes, group, here, behind, xs, slots, totals, sums())

    def _in_16_bits(
        self, totals: Sums, slots: list[Value], panels: list[Value], first: Value, once: int
    ) -> None:
        """Add so many fours in 16 bits, and those to the sums."""
        e, lanes = self.e, totals[0][0].get().lanes
        kind = vec(I16, 2 * lanes)
        halves = [[e.var(kind, e.const(kind, 0)) for _ in panels] for _ in slots]
        with e.loop(first, first + once, UNROLLED) as at:
            self._products(halves, slots, panels, at, UNROLLED)
        ones = e.const(kind, 1)
        for line, others in zip(totals, halves, strict=True):
            for total, half in zip(line, others, strict=True):
                total.set(total.get() + madd(e, half.get(), ones))

    def _products(
        self,
        sums: Sums,
        slots: list[Value],
        panels: list[Value],
        first: Value,
        count: int,
        ones: Value | None = None,
    ) -> None:
        """Add so many fours to sums, of 32 or of 16 bits; to those of 32 by way of 16, with
        `ones`.
        """
        e, one = self.e, sums[0][0].get()
        direct = scalar_of(one.type) == I32
        lanes = one.lanes if direct else one.lanes // 2
        for at in (first + i for i in range(count)):
            ws = [
                e.load(panel, vec(I32, lanes), at * ROWS, align=4 * lanes).bits(vec(I8, 4 * lanes))
                for panel in panels
            ]
            for line, slot in zip(sums, slots, strict=True):
                x = e.load(self.numbers, I32, slot * (RUN // FOUR) + at)
                x = x.splat(lanes).bits(vec(I8, 4 * lanes))
                for total, w in zip(line, ws, strict=True):
                    last = total.get()
                    if ones is not None:
                        total.set(last + madd(e, madd_bytes(e, x, w), ones))
                    else:
                        total.set(dots(e, x, w, last) if direct else last + madd_bytes(e, x, w))
