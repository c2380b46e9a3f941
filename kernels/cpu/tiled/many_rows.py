"""Products of many rows, divided into panels and runs for torch's threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtmd.kernels.cpu.native.compile import compile_kernel
from mtmd.kernels.cpu.native.products import row_bytes
from mtmd.kernels.cpu.tiled import product, team
from mtmd.kernels.cpu.tiled.cpu import GENERIC, host_form, second_cache

TYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SHARE = 1 << 25  # products that a thread needs to have to be waited for: 50 us and more
RUN = 256  # rows of x that are worth laying a panel out for once more, to share work better


@dataclass(frozen=True)
class Call:
    """A product as a kernel with its units: `sizes` are its arguments behind the pointers."""

    address: int
    sizes: tuple[int, ...]
    units: int
    scratch: int


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
) -> Call:
    """The product of x [rows, width] with `columns` rows of a weight; types are named as in
    `emit_product`. `share`: products that a thread needs to have,
    `SHARE` unless said otherwise.
    """
    form = host_form(x) or GENERIC
    item = product.item_of(form)
    panel, run, units = _shares(rows, width, columns, item, SHARE if share is None else share)
    results, rest, scratch = product.locations(width, panel, item)
    sizes = panel, run, -(-rows // run), results, rest, product.block_of(width, item)
    more = (add, gated) if add or gated else ()
    address = compile_kernel(product.emit_product, kind, form, x, bias or x, *more)
    return Call(address, sizes, units, scratch)


def multiply(kind: str, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = x [M, K] times a weight of N rows, all contiguous; x and `out` in fp32 or bf16,
    M at least `product.HALF`, N at least 1.
    """
    (rows, width), columns = x.shape, len(w)
    biased = None if bias is None else TYPES[bias.dtype]
    made = call(kind, rows, width, columns, TYPES[x.dtype], biased)
    args = [x.data_ptr(), width, rows, width, w.data_ptr(), row_bytes(kind, width), columns]
    args += [0 if bias is None else bias.data_ptr(), out.data_ptr(), columns]
    team.run(made.address, [*args, *made.sizes], made.units, 1, made.scratch)


def workspace(rows: int, width: int, columns: int, dtype: torch.dtype) -> int:
    """Return the bytes that `multiply` takes: a panel of the weight for each thread."""
    item = product.item_of(host_form(TYPES[dtype]) or GENERIC)
    panel, _, units = _shares(rows, width, columns, item, SHARE)
    return team.scratch_bytes(product.locations(width, panel, item)[2], units)


def _shares(rows: int, width: int, columns: int, item: int, share: int) -> tuple[int, int, int]:
    """Columns of a panel, rows of a run, units."""
    threads = min(torch.get_num_threads(), max(1, rows * width * columns // share))
    panel = product.panel_of(columns, width, threads, item, 3 * second_cache() // 8)
    panels = -(-columns // panel)
    # Whole rounds of panels need no runs
    runs = 1 if panels % threads == 0 else max(1, min(-(-2 * threads // panels), rows // RUN))
    run = -(-rows // (runs * product.STEP)) * product.STEP
    return panel, run, panels * -(-rows // run)
