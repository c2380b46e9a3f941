"""Rows of blocks as floating-point numbers: what an embedding picks, and what prefill multiplies.

The values are, bit for bit, those of `blocks.dequantize`, rounded to bf16 where that is asked for:
the integers that `unpack` gives are exact, and scale q + minimum is rounded once, as there.

A kernel's units are the rows of the result. args:
    0 w               1 bytes of a weight row
    2 the rows to take, int64 for each unit, or 0: unit n is row n of w
    3 out             4 stride of out's rows, in elements
    5 width           6 a factor, fp32, that multiplies what is stored: out = round(round(w) factor)
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.emit import F32, I8, I16, I32, I64, Emitter, Value
from mtmd.kernels.cpu.native.layouts import RUN, SUMS
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
    minimum = terms.scale * float(layout.zero) if layout.zero else terms.minimum
    for pair in range(0, len(vectors), 2):
        for numbers, run in _ordered(vectors, unpack, pair):
            lane = _lane(unpack, run)
            scale = terms.scale.shuffle([lane] * RUN)
            value = numbers.sext(I32).sitofp()
            if minimum is None:
                yield run, value * scale
            else:
                at = run * RUN // layout.run if layout.run else lane
                yield run, e.fma(value, scale, minimum.shuffle([at] * RUN))


def _ordered(vectors: list[Value], unpack: Unpack, pair: int) -> Iterator[tuple[Value, int]]:
    """The runs of two vectors, each a run's even and odd values or each a run's two halves."""
    first, second = unpack.layout.vectors[pair : pair + 2]
    if first[0][2] == 1:
        for vector, pieces in zip(vectors[pair : pair + 2], (first, second), strict=True):
            for half in range(2):
                yield vector.shuffle(range(RUN * half, RUN * half + RUN)), pieces[2 * half][0]
        return
    for piece in range(4):
        lanes = [8 * piece + i // 2 + 32 * (i % 2) for i in range(RUN)]
        yield vectors[pair].shuffle(lanes, vectors[pair + 1]), first[piece][0]


def _lane(unpack: Unpack, run: int) -> int:
    """A lane of the sums to which the values of a run belong."""
    pieces = unpack.layout.vectors[run % 2 if unpack.layout.vectors[0][0][2] == 1 else 0]
    group = unpack.layout.group // RUN
    return next((lane for lane in range(SUMS) if pieces[lane // 4][0] // group == run // group), 0)
