"""Rows of blocks as floating-point numbers, as an embedding picks them.

The values are, bit for bit, those of `blocks.dequantize`, rounded to bf16 where that is asked for:
the integers that `unpack` gives are exact, and scale q + minimum is rounded once, as there.

A kernel's units are the rows of the result. args:
    0 w               1 bytes of a weight row
    2 the rows to take, int64 for each unit, or 0: unit n is row n of w
    3 out             4 stride of out's rows, in elements
    5 width           6 a factor, fp32, that multiplies what is stored: out = round(round(w) factor)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from llvmlite import ir

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, I64, Emitter, Value
from mtmd.kernels.cpu.native.layouts import LANES, RUN, Layout
from mtmd.kernels.cpu.native.unpack import UNPACK, Unpack
from mtmd.kernels.quantization.blocks import BLOCKS

PLAIN = {"F32": "f32", "BF16": "bf16"}


def rows_of(kind: str, out: str, scaled: bool = True) -> int:
    """The address of the kernel for a type of weight and of result; `scaled` where it multiplies by
    a factor.
    """
    if kind in PLAIN:
        return compile_kernel(plain_rows, PLAIN[kind], out, scaled)
    return compile_kernel(block_rows, kind, out, scaled)


def plain_rows(e: Emitter, w: str, out: str, scaled: bool) -> None:
    """Rows of a weight in floating point."""
    width = e.arg(5)
    with e.loop(e.first, e.last) as unit:
        source, target = _locations(e, unit, out)
        for k, mask in e.spans(0, width, RUN):
            value = _stored(e, e.read(source, w, k, RUN, mask), out, scaled)
            e.write(target, out, k, value, mask)


def block_rows(e: Emitter, kind: str, out: str, scaled: bool) -> None:
    """Rows of blocks. The last chunk may be a part of one, and is read from a copy: after the last
    row there may be nothing.
    """
    unpack, width = UNPACK[kind], e.arg(5)
    size, step = unpack.layout.values, unpack.chunk_bytes
    whole = width // size
    rest = width - whole * size
    copy = e.local(I8, step)
    with e.loop(e.first, e.last) as unit:
        source, target = _locations(e, unit, out)
        with e.loop(0, whole) as chunk:
            at = target.at(chunk * size, _element(out))
            for index, value in _runs(e, unpack, source.at(chunk * step)):
                e.write(at, out, index * RUN, _stored(e, value, out, scaled))
        if BLOCKS[kind].values < size:
            with e.when(rest > 0):
                with e.loop(0, e.arg(1) - whole * step) as i:
                    e.store(copy.at(i), e.load(source.at(whole * step + i), I8))
                at = target.at(whole * size, _element(out))
                for index, value in _runs(e, unpack, copy):
                    with e.when(rest > index * RUN):
                        e.write(at, out, index * RUN, _stored(e, value, out, scaled))


def _locations(e: Emitter, unit: Value, out: str) -> tuple[Value, Value]:
    """Return where a unit's row of the weight and of the result begin."""
    row = e.var(I64, unit)
    with e.when(e.arg(2).ne(0)):
        row.set(e.load(e.arg_ptr(2), I64, unit))
    source = e.arg_ptr(0).at(row.get() * e.arg(1))
    return source, e.arg_ptr(3).at(unit * e.arg(4), _element(out))


def _element(out: str) -> ir.Type:
    return F32 if out == "f32" else I16


def _stored(e: Emitter, value: Value, out: str, scaled: bool) -> Value:
    return e.rounded(value, out) * e.arg_f32(6) if scaled else value


def _runs(e: Emitter, unpack: Unpack, chunk: Value) -> Iterator[tuple[int, Value]]:
    """The index of each run of 16 values of a chunk, and the run as fp32."""
    layout, terms = unpack.layout, unpack.terms(e, chunk)
    vectors = list(terms.vectors)
    for run in range(layout.values // RUN):
        if layout.real:
            yield run, vectors[run] * terms.scales[0]
            continue
        locations = _locations_of(layout, run)
        lanes = [(vector // layout.each, lane // 2) for vector, lane in locations]
        scale = _taken(terms.scales, lanes)
        value = _taken(vectors, locations).sext(I32).sitofp()
        if layout.zero:
            yield run, e.fma(value, scale, scale * float(layout.zero))
        elif terms.minima:
            at = [(0, run * RUN // layout.run)] * RUN if layout.run else lanes
            yield run, e.fma(value, scale, _taken(terms.minima, at))
        else:
            yield run, value * scale


def _locations_of(layout: Layout, run: int) -> list[tuple[int, int]]:
    """The vector and the lane of each value of a run."""
    result = {}
    for index, pieces in enumerate(layout.vectors):
        count = LANES // len(pieces)
        for piece, (here, start, step) in enumerate(pieces):
            if here == run:
                for i in range(count):
                    result[start + i * step] = (index, piece * count + i)
    return [result[value] for value in range(RUN)]


def _taken(vectors: Sequence[Value], locations: list[tuple[int, int]]) -> Value:
    """Lanes of some vectors, as one vector."""
    used, size = list(dict.fromkeys(index for index, _ in locations)), vectors[0].lanes
    result = None
    for first, second in zip_longest(used[::2], used[1::2]):
        starts = {first: 0, second: size}
        lanes = [starts[index] + lane if index in starts else 0 for index, lane in locations]
        taken = vectors[first].shuffle(lanes, None if second is None else vectors[second])
        if result is not None:
            here = [i + RUN * (index in starts) for i, (index, _) in enumerate(locations)]
            taken = result.shuffle(here, taken)
        result = taken
    assert result is not None
    return result
