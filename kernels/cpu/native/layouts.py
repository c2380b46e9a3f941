"""Describes how rows of x are laid out for products with blocks of small integers.

Products with quantized weights are sums of 16-bit integers: x is cut into groups that share a
scale, s = max |x| / limit, and q = round(x / s) is kept in 16 bits. The error is that of a 15-bit
fraction of the group's largest value: relative to the result, an NMSE of about 1e-9 (at worst,
where one value of 256 is not zero next to others, 1e-8 to 1e-7), far below what bf16 does to x.

A prepared row is a series of chunks, each what a kernel multiplies in one turn:

    values  int16 [vectors, 32]   in the order in which the kernel unpacks the weights
    scales  fp32 [parts, 16]      s of the group that a lane of the sums belongs to
    extra   [parts, 16]           depending on the type, one of
        start  int32   what the sums begin with: the weights' zero point times the lane's sum of q
        lane   fp32    s times the lane's sum of q, for weights with a minimum for each block
        run    fp32    s times the sum of q of each run of values with a minimum of its own

Lane i of a sum is that of positions 2i and 2i + 1 of all of a part's vectors, as `madd` has it. A
chunk has several parts where a weight's scales are more than the lanes of one sum. Rows are filled
up with zeros to whole chunks.

Weights that are floating-point numbers (`real`) are multiplied with x in fp32 [vectors, 16], which
has no scales.

Where weights are bytes (planes.py), q = 256 upper + lower are two signed bytes, and a vector is 32
upper bytes, then 32 lower ones. Lane i of the 8 of a sum is that of positions 4i to 4i + 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, Emitter, Value, vec

LANES = 32  # 16-bit integers of a vector
SUMS = 16  # 32-bit sums of a vector
UPPER = 256  # what an upper byte counts
RUN = 16  # consecutive values that pieces are taken from

Piece = tuple[int, int, int]  # the run of 16 values, the first to take of it, the step between them


@dataclass(frozen=True)
class Layout:
    """`vectors` says for each vector of a chunk which pieces it is made of: four of 8 values, or
    eight of 4.
    """

    name: str
    vectors: tuple[tuple[Piece, ...], ...]
    group: int  # values that share a scale
    limit: int = 32767
    zero: int = 0  # `start` is made with this zero point
    lane: bool = False
    run: int = 0  # values of a run for `run`
    parts: int = 1
    real: bool = False
    planes: bool = False

    @property
    def sums(self) -> int:
        """Return the lanes of a sum."""
        return SUMS // 2 if self.planes else SUMS

    @property
    def values(self) -> int:
        """Return the values of a chunk."""
        return (SUMS if self.real else LANES) * len(self.vectors)

    @property
    def each(self) -> int:
        """Return the vectors of a part."""
        return len(self.vectors) // self.parts

    @property
    def has_extra(self) -> bool:
        return bool(self.zero or self.lane or self.run)

    @property
    def bytes(self) -> int:
        """Return the bytes of a chunk."""
        if self.real:
            return 4 * self.values
        return 2 * self.values + 64 * self.parts * (1 + self.has_extra)

    def scale_at(self, part: int) -> int:
        """Return where the scales of a part are in a chunk, in bytes."""
        return 2 * self.values + 64 * part

    def extra_at(self, part: int) -> int:
        return 2 * self.values + 64 * (self.parts + part)

    def row_bytes(self, width: int) -> int:
        return -(-width // self.values) * self.bytes

    def run_of(self, part: int, lane: int) -> int:
        """Return a run of 16 values that a lane of a part's sums belongs to."""
        pieces = self.vectors[part * self.each]
        return pieces[lane * len(pieces) // self.sums][0]


def madd(e: Emitter, a: Value, b: Value) -> Value:
    """Products of 16-bit integers, added in pairs: int16 [2n], int16 [2n] -> int32 [n]."""
    if a.lanes == 32 and e.has("avx512bw"):
        return e.call("llvm.x86.avx512.pmaddw.d.512", vec(I32, 16), a, b)
    if a.lanes == 16 and e.has("avx2"):
        return e.call("llvm.x86.avx2.pmadd.wd", vec(I32, 8), a, b)
    if a.lanes == 8 and e.has("sse2"):
        return e.call("llvm.x86.sse2.pmadd.wd", vec(I32, 4), a, b)
    if a.lanes > 8 and e.has("sse2"):
        low, high = range(a.lanes // 2), range(a.lanes // 2, a.lanes)
        first = madd(e, a.shuffle(low), b.shuffle(low))
        return first.concat(madd(e, a.shuffle(high), b.shuffle(high)))
    even, odd = range(0, a.lanes, 2), range(1, a.lanes, 2)
    products = a.sext(I32) * b.sext(I32)
    return products.shuffle(even) + products.shuffle(odd)


def madd_bytes(e: Emitter, a: Value, b: Value) -> Value:
    """Products of bytes without a sign and signed ones, added in pairs, at most 32767 each: int8
    [2n], int8 [2n] -> int16 [n], with AVX2 or, where there are 64 bytes, AVX-512 BW.
    """
    if a.lanes == 64:
        return e.call("llvm.x86.avx512.pmaddubs.w.512", vec(I16, 32), a, b)
    return e.call("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 16), a, b)


def sums_of(vectors: list[Value]) -> Value:
    """The sum of each vector's lanes, side by side: as many vectors as a power of two, at most as
    many as lanes.
    """
    count = len(vectors)
    while len(vectors) > 1:
        vectors = [_pairs(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total = vectors[0]
    while total.lanes > count:
        even, odd = range(0, total.lanes, 2), range(1, total.lanes, 2)
        total = total.shuffle(even) + total.shuffle(odd)
    return total


def _pairs(a: Value, b: Value) -> Value:
    """Neighbours added, of a and then of b."""
    even, odd = range(0, 2 * a.lanes, 2), range(1, 2 * a.lanes, 2)
    return a.shuffle(even, b) + a.shuffle(odd, b)


def prepare(e: Emitter, layout: Layout, x: str) -> None:
    """A kernel whose units are rows of x.

    args: x, its row stride in elements, the prepared rows (aligned to 64), width
    """
    source, stride, target, width = e.arg_ptr(0), e.arg(1), e.arg_ptr(2), e.arg(3)
    size = layout.values
    chunks = (width + (size - 1)) // size
    whole = width // size
    element = F32 if x == "f32" else I16
    with e.loop(e.first, e.last) as row:
        values = source.at(row * stride, element)
        to = target.at(row * chunks * layout.bytes)
        with e.loop(0, whole) as chunk:
            _chunk(e, layout, x, values, chunk, None, to.at(chunk * layout.bytes))
        with e.when(whole < chunks):
            _chunk(e, layout, x, values, whole, width, to.at(whole * layout.bytes))


def _chunk(
    e: Emitter, layout: Layout, x: str, values: Value, chunk: Value, width: Value | None, to: Value
) -> None:
    """Load a chunk; where `width` is given, values from there on are zeros."""
    runs = []
    for run in range(layout.values // RUN):
        at = chunk * layout.values + run * RUN
        mask = None if width is None else e.mask(width - at, RUN)
        runs.append(e.read(values, x, at, RUN, mask))
    if layout.real:
        for index, numbers in enumerate(runs):
            e.store(to, numbers, index * RUN, align=64)
        return
    scales, whole = [], []
    each = layout.group // RUN
    for first in range(0, len(runs), each):
        s, integers = quantized(e, runs[first : first + each], layout.limit)
        scales.append(s)
        whole += integers
    vectors = [_gathered(whole, pieces) for pieces in layout.vectors]
    for index, vector in enumerate(vectors):
        stored = vector
        if layout.planes:
            stored = (vector + 128).ashr(8).trunc(I8).concat(vector.trunc(I8))
        e.store(to.at(2 * LANES * index), stored, align=64)
    for part in range(layout.parts):
        scale = scales[0].splat(layout.sums)
        lanes = [layout.run_of(part, lane) // each for lane in range(layout.sums)]
        for index, s in enumerate(scales[1:], 1):
            here = e.const(vec(I32, len(lanes)), [int(lane == index) for lane in lanes]).eq(1)
            scale = e.select(here, s.splat(len(lanes)), scale)
        e.store(to.at(layout.scale_at(part)), scale, align=64)
        extra = to.at(layout.extra_at(part))
        if layout.zero or layout.lane:
            factor = e.const(vec(I16, LANES), layout.zero or 1)
            own = vectors[part * layout.each : (part + 1) * layout.each]
            total = madd(e, own[0], factor)
            for vector in own[1:]:
                total = total + madd(e, vector, factor)
            if layout.planes:
                even, odd = range(0, SUMS, 2), range(1, SUMS, 2)
                total = total.shuffle(even) + total.shuffle(odd)
            e.store(extra, total.sitofp() * scale if layout.lane else total, align=64)
        if layout.run:
            e.store(extra, _run_sums(e, layout, whole).sitofp() * scales[0], align=64)


def quantized(e: Emitter, runs: list[Value], limit: int) -> tuple[Value, list[Value]]:
    """The scale of a group and its integers. A group with NaN or infinities has such a scale."""
    bits = [run.bits(vec(I32, RUN)) & 0x7FFFFFFF for run in runs]
    largest = bits[0]
    for more in bits[1:]:
        largest = e.maximum(largest, more)
    # As integers, so that NaN, whose bits are above all others, is not lost
    maximum = e.largest(largest).bits(F32)
    usable = (maximum > 1e-30) & (maximum < float("inf"))
    inverse = e.select(usable, float(limit) / maximum, e.f32(0.0))
    scale = e.select(maximum <= 1e-30, e.f32(0.0), maximum * (1.0 / limit))
    numbers = []
    for run in runs:
        scaled = run * inverse
        nearest = e.call(f"llvm.rint.v{RUN}f32", scaled.type, scaled)
        numbers.append(nearest.fptosi())
    return scale, numbers


def _gathered(whole: list[Value], pieces: tuple[Piece, ...]) -> Value:
    """A vector of 16-bit integers from its pieces."""
    count = LANES // len(pieces)
    parts = [
        whole[run].shuffle(range(start, start + count * step, step)).trunc(I16)
        for run, start, step in pieces
    ]
    while len(parts) > 1:
        parts = [a.concat(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _run_sums(e: Emitter, layout: Layout, whole: list[Value]) -> Value:
    """int32 [16], zeros after the last run."""
    each = layout.run // RUN
    totals = []
    for first in range(0, len(whole), each):
        total = whole[first]
        for more in whole[first + 1 : first + each]:
            total = total + more
        totals.append(total)
    totals += [e.const(vec(I32, RUN), 0)] * (SUMS - len(totals))
    return sums_of(totals)
