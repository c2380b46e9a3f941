"""Products of many rows in 16-bit integers, in place of those in float32, on CPUs that add up
products of pairs of them: with AVX-512 VNNI, AVX-VNNI, or AVX2.

    out[m, n] = sum over groups of  scale[n] s[m] (sum of q[m, k] c[n, k]) + minimum[n] (sum of x)

c are the weight's own integers, so that nothing of it is rounded. q are x as 16-bit integers, with
a scale s for every 32 numbers, as in products of few rows (`native.layouts`). Sums of a group are
exact; they are added in float32. With VNNI that takes half the instructions of a product in
float32. Without it, AVX-512 takes as many, and AVX2 fewer that wait for the same units.

A step of a panel is 32 numbers of 16 columns: int16 [pair, 16 columns, 2], then float32 scales
[group, 16 columns], and minima where the type has them. x is laid out once for all products that
read it: int16 [rows, numbers], float32 scales [rows, steps], and sums of 16 numbers each [rows,
steps, 2].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtmd.kernels.cpu.native.compile import Cpu, compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I16, I32, Emitter, Value, Var, vec
from mtmd.kernels.cpu.native.layouts import madd, quantized
from mtmd.kernels.cpu.tiled.codes import FORMS, ROWS, RUN
from mtmd.kernels.cpu.tiled.codes import Form as Codes

LIMIT = 32767  # of x; sums of 32 products with codes of 8 bits stay below 2^31
UNROLLED = {8: 2, 16: 4}  # pairs, by lanes
CODES_BYTES = 2 * RUN * ROWS


def in_words(form: tuple[str, int, int, int], cpu: Cpu) -> tuple[str, int, int, int]:
    """Return the form of products with weights in integers, where others have `form`."""
    kind, lanes, *_ = form
    if kind == "single" and lanes == 16 and cpu.has("avx512vnni") and cpu.has("avx512bw"):
        return "words", 16, 8, 2
    if kind == "single" and lanes == 8 and cpu.has("avx2"):
        return "words", 8, 4, 2
    return form


def prepared(dtype: str) -> Prepared:
    return Prepared(compile_kernel(emit_prepare, dtype), f"words {dtype}", words_bytes)


def takes(kind: str) -> bool:
    """Return whether a type's numbers are integers times scales."""
    return kind in FORMS and FORMS[kind].integers


def step_bytes(kind: str) -> int:
    """Return the bytes of a step of 16 columns."""
    codes = FORMS[kind]
    return CODES_BYTES + 4 * ROWS * codes.groups * (1 + codes.minimum)


@dataclass(frozen=True)
class Prepared:
    """A kernel that makes integers of x, of as many units as `units`."""

    prepare: int
    name: str
    bytes: Callable[[int, int], int]  # that so many rows of a width take

    def units(self, rows: int, width: int) -> int:  # noqa: ARG002
        return rows


def words_bytes(rows: int, width: int) -> int:
    """Return the bytes of x prepared."""
    return rows * (width // RUN) * (2 * RUN + 4 + 8)


def emit_prepare(e: Emitter, dtype: str) -> None:
    """args: x, its row stride in elements, what is prepared (aligned to 64), width, rows. Units:
    rows.
    """
    x, stride, to, half = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), RUN // 2
    steps, rows = e.arg(3) // RUN, e.arg(4)
    scales, sums = _behind(to, rows, steps)
    with e.loop(e.first, e.last) as row, e.loop(0, steps) as step:
        values = [e.read(x, dtype, row * stride + step * RUN + i, half) for i in (0, half)]
        scale, integers = quantized(e, values, LIMIT)
        slot = row * steps + step
        whole = integers[0].concat(integers[1]).trunc(I16)
        e.store(to, whole, slot * RUN, align=2 * RUN)
        e.store(scales, scale, slot)
        for i, some in enumerate(integers):
            e.store(sums, e.sum(some).sitofp() * scale, slot * 2 + i)


def _behind(numbers: Value, rows: Value, steps: Value) -> tuple[Value, Value]:
    """Return where scales and sums lie."""
    scales = numbers.at(rows * steps * (2 * RUN))
    return scales, scales.at(rows * steps * 4)


def lay_step(
    e: Emitter,
    codes: Codes,
    blocks: list[Value],
    run: Value,
    tables: list[Value],
    at: Value,
    to: Value,
) -> None:
    """Store a step: run `run` of the blocks of 16 rows."""
    pairs = [codes.whole(e, block, run).bits(vec(I32, ROWS)) for block in blocks]
    for i, pair in enumerate(e.transposed(pairs)):
        e.store(to, pair, i * ROWS, align=64)
    for which, table in enumerate(tables):
        for group in range(codes.groups):
            scale = e.load(table, vec(F32, ROWS), (at + group) * ROWS, align=64)
            slot = CODES_BYTES + 4 * ROWS * (which * codes.groups + group)
            e.store(to.at(slot), scale, align=64)


class Words:
    """Products with x in integers, as `Prepared` lays it out."""

    def __init__(self, e: Emitter, kind: str, numbers: Value, rows: Value, steps: Value):
        self.e, self.codes, self.step, self.steps = e, FORMS[kind], step_bytes(kind), steps
        self.numbers = numbers
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
        pairs = RUN // 2 // codes.groups
        with e.loop(start, stop) as step:
            slots = [(row + i) * self.steps + step for i in range(each)]
            here = [panel.at(step * self.step) for panel in panels]
            for group in range(codes.groups):
                totals = [
                    [e.var(vec(I32, lanes), e.const(vec(I32, lanes), 0)) for _ in panels]
                    for _ in range(each)
                ]
                with e.loop(group * pairs, (group + 1) * pairs, UNROLLED[lanes]) as first:
                    for pair in range(UNROLLED[lanes]):
                        at = first + pair
                        ws = [
                            e.load(p, vec(I32, lanes), at * ROWS, align=4 * lanes).bits(
                                vec(I16, 2 * lanes)
                            )
                            for p in here
                        ]
                        for line, slot in zip(totals, slots, strict=True):
                            x = e.load(self.numbers, I32, slot * (RUN // 2) + at)
                            x = x.splat(lanes).bits(vec(I16, 2 * lanes))
                            for total, w in zip(line, ws, strict=True):
                                total.set(total.get() + madd(e, w, x))
                xs = self.scales, self.sums
                add_scaled(e, codes, group, here, CODES_BYTES, xs, slots, totals, sums())


def add_scaled(
    e: Emitter,
    codes: Codes,
    group: int,
    panels: list[Value],
    factors_at: int,
    xs: tuple[Value, Value],
    slots: list[Value],
    totals: list[list[Var]],
    sums: list[Value],
) -> None:
    """Add to `sums` a group's integers [row, panel], scaled, and its minima times the sums of x.
    Factors begin `factors_at` bytes behind a step of a panel; `xs` are scales of x and its sums.
    """
    kind = vec(F32, totals[0][0].get().lanes)
    locations = [
        factors_at + 4 * ROWS * (which * codes.groups + group) for which in range(1 + codes.minimum)
    ]
    factors = [
        [e.load(panel.at(at), kind, align=4 * kind.count) for at in locations] for panel in panels
    ]
    for i, (line, slot) in enumerate(zip(totals, slots, strict=True)):
        s = e.load(xs[0], F32, slot).splat(kind.count)
        x = None
        if codes.minimum:
            both = [group] if codes.groups == 2 else [0, 1]
            parts = [e.load(xs[1], F32, slot * 2 + n) for n in both]
            x = (parts[0] if len(parts) == 1 else parts[0] + parts[1]).splat(kind.count)
        for total, (scale, *minimum), own in zip(line, factors, sums, strict=True):
            result = e.load(own, kind, i * ROWS)
            result = e.fma(total.get().sitofp(), scale * s, result)
            if x is not None:
                result = e.fma(minimum[0], x, result)
            e.store(own, result, i * ROWS)
