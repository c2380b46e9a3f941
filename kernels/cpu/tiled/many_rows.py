"""Products of many rows, divided into panels and runs for torch's threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtmd.kernels.cpu.native.compile import compile_kernel, compiler
from mtmd.kernels.cpu.native.products import row_bytes
from mtmd.kernels.cpu.native.program import CHUNKS
from mtmd.kernels.cpu.tiled import octets, product, team, words
from mtmd.kernels.cpu.tiled.cpu import GENERIC, host_form, second_cache
from mtmd.kernels.cpu.tiled.words import in_words, takes

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SHARE = 1 << 25  # products that a thread needs to have to be waited for: 50 us and more
LAID_OUT = 16  # rows of x that a thread prepares at a time
RUN = 256  # rows of x that are worth laying a panel out for once more, to share work better
SHORT_RUN = 64  # the same of panels of integers, with AVX2
PANEL_ROWS = 8  # of x that take as long as laying such a panel out
WORTH_MORE = 0.98  # of the time, for more units


@dataclass(frozen=True)
class Call:
    """A product as a kernel with its units: `sizes` are its arguments behind the pointers.
    `prepared`: it reads x as that lays it out.
    """

    address: int
    sizes: tuple[int, ...]
    units: int
    scratch: int
    prepared: words.Prepared | None = None


def call(
    kind: str,
    rows: int,
    width: int,
    columns: int,
    x: str,
    bias: str | None,
    add: bool = False,
    gated: str | None = None,
    share: int | None = None,
    as_stored: bool = False,
    int8: bool = False,
) -> Call:
    """The product of x [rows, width] with `columns` rows of a weight; types are named as in
    `emit_product`. `share`: products that a thread needs to have,
    `SHARE` unless said otherwise. `as_stored`: in a form that reads x as it lies. `int8`: x may be
    rounded to 8 bits.
    """
    form = host_form(x) or GENERIC if as_stored else form_of(kind, x, int8)
    step, block = product.step_of(kind, form), product.block_of(width, product.item_of(form))
    panel, run, units = _shares(rows, width, columns, form, step, SHARE if share is None else share)
    results, rest, scratch = product.locations(kind, form, width, panel)
    sizes = panel, run, -(-rows // run), results, rest, block
    more = (add, gated) if add or gated else ()
    address = compile_kernel(product.emit_product, kind, form, x, bias or x, *more)
    return Call(address, sizes, units, scratch, _prepared(kind, form, x))


def form_of(kind: str, x: str, int8: bool = False) -> product.Form:
    """Return the form of products of a type of weight and of x; `int8`: x may be rounded to 8 bits,
    where that is faster.
    """
    form, cpu = host_form(x) or GENERIC, compiler().cpu
    rounded = octets.in_octets(kind, form, cpu) if int8 else None
    if rounded is not None:
        return rounded
    return in_words(form, cpu) if takes(kind) else form


def _prepared(kind: str, form: product.Form, x: str) -> words.Prepared | None:
    """Return what lays x out for products of a form; None where they read x as it lies."""
    if form[0] == "octets":
        return octets.prepared(x, octets.bits_of(kind, compiler().cpu.has))
    return words.prepared(x) if form[0] == "words" else None


def multiply(
    kind: str, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, int8: bool = False
) -> None:
    """out [M, N] = x [M, K] times a weight of N rows, all contiguous; x and `out` in fp32 or bf16,
    M at least `product.HALF`, N at least 1. `int8`: x may be rounded to 8 bits.
    """
    (rows, width), columns = x.shape, len(w)
    biased = None if bias is None else TYPES[bias.dtype]
    made = call(kind, rows, width, columns, TYPES[x.dtype], biased, int8=int8)
    here, stride = x.data_ptr(), width
    if made.prepared is not None:
        memory = torch.empty(made.prepared.bytes(rows, width) + team.ALIGN, dtype=torch.uint8)
        here, stride = -(-memory.data_ptr() // team.ALIGN) * team.ALIGN, 0
        team.run(made.prepared.prepare, [x.data_ptr(), width, here, width, rows], rows, LAID_OUT)
    args = [here, stride, rows, width, w.data_ptr(), row_bytes(kind, width), columns]
    args += [0 if bias is None else bias.data_ptr(), out.data_ptr(), columns]
    team.run(made.address, [*args, *made.sizes], made.units, 1, made.scratch)


def workspace(
    kind: str, rows: int, width: int, columns: int, dtype: torch.dtype, int8: bool = False
) -> int:
    """Return the bytes that `multiply` takes: a panel of the weight for each thread."""
    form = form_of(kind, TYPES[dtype], int8)
    step = product.step_of(kind, form)
    panel, _, units = _shares(rows, width, columns, form, step, SHARE)
    laid_out = {"words": words.words_bytes, "octets": octets.octets_bytes}.get(form[0])
    more = laid_out(rows, width) + team.ALIGN if laid_out else 0
    return more + team.scratch_bytes(product.locations(kind, form, width, panel)[2], units)


def _shares(
    rows: int, width: int, columns: int, form: product.Form, step: int, share: int
) -> tuple[int, int, int]:
    """Columns of a panel, rows of a run, units."""
    threads = min(torch.get_num_threads(), max(1, rows * width * columns // share))
    cache = 3 * second_cache() // 8
    panel = product.panel_of(columns, width, threads, step, cache)
    if form[0] in ("words", "octets") and form[1] == 8 and threads > 1:
        even = _even_shares(rows, columns, threads, product.fitting(width, step, cache))
        if even is not None:
            return even
    panels = -(-columns // panel)
    # Whole rounds of panels need no runs
    runs = 1 if panels % threads == 0 else max(1, min(-(-2 * threads // panels), rows // RUN))
    run = -(-rows // (runs * product.STEP)) * product.STEP
    return panel, run, panels * -(-rows // run)


@lru_cache(maxsize=256)
def _even_shares(
    rows: int, columns: int, threads: int, fitting: int
) -> tuple[int, int, int] | None:
    """Do what `_shares` does, for panels that cost little to lay out: as threads are done first
    that claim one unit after the other, of wide panels and long runs where that is much the same.
    None where there are so many panels that several are claimed at once.
    """
    best, result = float("inf"), None
    for runs in range(1, max(1, rows // SHORT_RUN) + 1):
        run = -(-rows // (runs * product.STEP)) * product.STEP
        begins = range(0, rows, run)
        for panel in range(fitting, product.STEP - 1, -product.STEP):
            panels = [min(panel, columns - first) for first in range(0, columns, panel)]
            units = len(panels) * len(begins)
            if units > CHUNKS:
                break
            ends = [0] * threads
            for width in panels:
                for first in begins:
                    now = min(range(threads), key=ends.__getitem__)
                    steps = -(-width // product.STEP)
                    ends[now] += steps * (min(run, rows - first) + PANEL_ROWS)
            if max(ends) < best * WORTH_MORE:
                best, result = max(ends), (panel, run, units)
    return result
