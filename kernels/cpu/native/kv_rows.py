"""Rows of keys and values of a cache in fewer bytes (`mtmd.kernels.quantization.kv_rows`): written,
and read as float32.
"""

from __future__ import annotations

from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, I64, Emitter, Value, vec
from mtmd.kernels.quantization.kv_rows import (
    BLOCK,
    LARGEST_F8,
    ROW_TYPES,
    RowType,
    blocks_of,
    cached_bytes,
    part_types,
)

LANES = 16
PLAIN = {"bf16": "bf16", "fp32": "f32"}  # rows of numbers, as machine code calls them


def rotated(e: Emitter, low: Value, high: Value) -> tuple[Value, Value]:
    """The Walsh-Hadamard transform of a block, whose values 0..15 are `low`."""
    low, high = low + high, low - high
    for step in (8, 4, 2, 1):
        partner = [lane ^ step for lane in range(LANES)]
        sign = e.const(low.type, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        low, high = (e.fma(v, sign, v.shuffle(partner)) for v in (low, high))
    return low * BLOCK**-0.5, high * BLOCK**-0.5


def read_half(
    e: Emitter, kind: str, size: int, row: Value, block: Value | int, upper: bool
) -> Value:
    """Values 0..15 of a block, or 16..31, as float32, as they are coded (`rotated` or not): of the
    head of `size` values at `row`.
    """
    of, block = ROW_TYPES[kind], e.i64(block)
    if of.plain:
        return e.read(row, PLAIN[kind], block * BLOCK + LANES * upper, LANES)
    scale = e.load(row.at(e.i64(of.code_bytes(size)) + block * 2), I16).half_to_f32()
    if kind == "q4_0":
        codes = e.load(row.at(block * (BLOCK // 2)), vec(I8, LANES), align=1)
        codes = codes >> 4 if upper else codes & 15
        return e.fma(codes.zext(I32).sitofp(), scale, scale * -8.0)
    codes = e.load(row.at(block * BLOCK + LANES * upper), vec(I8, LANES), align=1)
    if kind == "q8_0":
        return codes.sext(I32).sitofp() * scale
    wide = codes.zext(I16)  # as fp16, whose exponent begins 8 lower
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).half_to_f32() * (scale * 256.0)


def emit_quantized_store(e: Emitter, x: str, kind: str, size: int, halves: int) -> None:
    """The `kv_store` op into quantized rows; keys alone if `halves` is 1

    args: k, k outer, k inner, v, v outer, v inner, slots (int64), cache, bytes from a key to its
    value, G. Units: tokens times G.
    """
    types = [ROW_TYPES[part] for part in part_types(kind)]
    sources = [(e.arg_ptr(i), e.arg(i + 1), e.arg(i + 2)) for i in (0, 3)]
    slots, cache, half, groups = e.arg_ptr(6), e.arg_ptr(7), e.arg(8), e.arg(9)
    with e.loop(e.first, e.last) as unit:
        t = unit // groups
        g = unit - t * groups
        to = (e.load(slots, I64, t) * groups + g) * cached_bytes(kind, size)
        for which, (source, outer, inner) in enumerate(sources[:halves]):
            at, row = t * outer + g * inner, cache.at(to + half * which)
            _Row(e, x, types[which], size, source, at, row).write()


class _Row:
    """One head of one token: from `size` values at `at` of `source` to the row `to`."""

    def __init__(
        self, e: Emitter, x: str, of: RowType, size: int, source: Value, at: Value, to: Value
    ):
        self.e, self.x, self.of, self.size = e, x, of, size
        self.source, self.at, self.to = source, at, to

    def write(self) -> None:
        e, whole = self.e, self.size // BLOCK
        with e.loop(0, whole) as block:
            self._block(self._values(block), block)
        if whole < blocks_of(self.size):
            self._block(self._values(whole), e.i64(whole))

    def _values(self, block: Value | int) -> tuple[Value, Value]:
        """Both halves of a block, with zeros behind the last value."""
        e = self.e
        begin = self.at + e.i64(block) * BLOCK
        halves = []
        for first in (0, LANES):
            mask = None
            if isinstance(block, int):  # the last one
                count = min(max(self.size - block * BLOCK - first, 0), LANES)
                mask = e.mask(e.i64(count), LANES)
            halves.append(e.read(self.source, self.x, begin + first, LANES, mask))
        low, high = halves
        return rotated(e, low, high) if self.of.rotated else (low, high)

    def _top(self, values: tuple[Value, Value]) -> Value:
        """The largest size, NaN where there is one: as integers, in which it is above all."""
        e = self.e
        low, high = (v.bits(vec(I32, LANES)) & 0x7FFFFFFF for v in values)
        return e.largest(e.maximum(low, high)).bits(F32)

    def _block(self, values: tuple[Value, Value], block: Value) -> None:
        e = self.e
        if self.of.plain:
            for half, v in enumerate(values):
                e.write(self.to, PLAIN[self.of.name], block * BLOCK + half * LANES, v)
            return
        top = self._top(values)
        if self.of.signed:
            high = e.largest(e.maximum(*values))
            low = -e.largest(e.maximum(-values[0], -values[1]))
            top = e.select(-low > high, -top, top)
        stored = (top * (1 / self.of.largest)).f32_to_half()
        e.store(self.to.at(self.of.code_bytes(self.size)), stored, block)
        self._codes(values, _factor(e, stored.half_to_f32()), block)

    def _codes(self, values: tuple[Value, Value], factor: Value, block: Value) -> None:
        e, to = self.e, self.to.at(block * (BLOCK * self.of.bits // 8))
        shared = [v * factor for v in values]
        zero = e.f32(0.0, LANES)
        shared = [e.select(v.eq(v), v, zero) for v in shared]
        if self.of.name == "q4_0":
            low, high = (e.minimum(e.maximum(e.floor(v + 8.5), 0.0), 15.0).fptosi() for v in shared)
            e.store(to, (low | (high << 4)).trunc(I8), align=1)
            return
        for half, v in enumerate(shared):
            codes = _f8(e, v) if self.of.name == "fp8" else _q8(e, v)
            e.store(to.at(half * LANES), codes.trunc(I8), align=1)


def _factor(e: Emitter, scale: Value) -> Value:
    """1 / scale; 0 where that is no number to multiply by."""
    factor = 1.0 / scale
    return e.select(e.abs(factor) < float("inf"), factor, e.f32(0.0))


def _q8(e: Emitter, x: Value) -> Value:
    nearest = e.call(f"llvm.rint.v{LANES}f32", x.type, x)
    return e.minimum(e.maximum(nearest, -127.0), 127.0).fptosi()


def _f8(e: Emitter, x: Value) -> Value:
    """The bits of e4m3fn, to the nearest even."""
    x = e.minimum(e.maximum(x, -LARGEST_F8), LARGEST_F8)  # a scale may have been rounded down
    bits = x.bits(vec(I32, LANES))
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (e.abs(x) + 16384.0).bits(bits.type) - 0x46800000  # a step is 2^-9 there
    return e.select(size < 121 << 23, small, normal) | ((bits >> 24) & 0x80)


def emit_gather(e: Emitter, kind: str, size: int, out: str) -> None:
    """The `gather_pages` op out of quantized rows

    args: keys or values of the cache, pages (int64), tokens of a page, G, out, bytes from a row to
    the next. Units: heads of the result, P * page * G.
    """
    cache, pages, page, groups, target, row = (
        e.arg_ptr(0),
        e.arg_ptr(1),
        e.arg(2),
        e.arg(3),
        e.arg_ptr(4),
        e.arg(5),
    )
    whole = size // BLOCK
    with e.loop(e.first, e.last) as unit:
        each = page * groups
        number = unit // each
        from_ = cache.at((e.load(pages, I64, number) * each + unit - number * each) * row)
        to = unit * size

        def block(at: Value | int, count: int, from_: Value = from_, to: Value = to) -> None:
            low, high = (read_half(e, kind, size, from_, at, upper) for upper in (False, True))
            halves = rotated(e, low, high) if ROW_TYPES[kind].rotated else (low, high)
            for first, value in zip(range(0, count, LANES), halves, strict=False):
                rest = count - first
                mask = None if rest >= LANES else e.mask(e.i64(rest), LANES)
                e.write(target, out, to + e.i64(at) * BLOCK + first, value, mask)

        with e.loop(0, whole) as at:
            block(at, BLOCK)
        if size % BLOCK:
            block(whole, size % BLOCK)
