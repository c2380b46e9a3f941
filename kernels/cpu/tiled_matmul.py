"""Products of many rows in bfloat16 by AMX (`tiled.product`); torch multiplies the rest."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.resources.result_memory import new_result

FEWEST_ROWS = 64  # below, laying the weight out costs more than torch's way
FEWEST = 64  # numbers of a row of x and of the result
RUN = 256  # rows of x that are worth laying a panel out for once more, to share work better


def rejects(x: Type, w: Type, bias: Type | None = None, *, quant: str | None = None) -> str | None:
    """None if the kernel multiplies tensors of these types, else why not."""
    if quant is not None:
        return f"weights are {quant}; the kernel takes plain ones"
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, w, bias)):
        return "operands are not all bf16"
    if not (x.is_contiguous and w.is_contiguous and (bias is None or bias.is_contiguous)):
        return "operands are not contiguous"
    width, columns = x.shape[-1], w.shape[0]
    if width < FEWEST or columns < FEWEST or x.count < FEWEST_ROWS * width:
        rows = prod(x.shape[:-1])
        return f"{rows} x {width} by {columns}; the kernel is for {FEWEST_ROWS} x {FEWEST} on"
    from mtmd.kernels.cpu.tiled.cpu import host_form

    form = host_form("bf16")
    return None if form is not None and form[0] == "tiles" else "the CPU has no AMX, or none for us"


def tiled_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    quant: None = None,  # noqa: ARG001
) -> Tensor:
    """The `matmul` op          x [..., K], w [N, K], bias [N] -> [..., N]"""
    from mtmd.kernels.cpu.native.compile import compile_kernel
    from mtmd.kernels.cpu.tiled import product, team

    width, columns = x.shape[-1], w.shape[0]
    rows = x.numel() // width
    out = new_result(*x.shape[:-1], columns, dtype=x.dtype)
    panel, run, units = _shares(rows, width, columns)
    results, rest, scratch = product.locations(width, panel)
    args = [x.data_ptr(), width, rows, width, w.data_ptr(), width, columns]
    args += [0 if bias is None else bias.data_ptr(), out.data_ptr(), columns]
    args += [panel, run, -(-rows // run), results, rest, product.block_of(width)]
    address = compile_kernel(product.emit_product, bias is not None)
    team.run(address, args, units, 1, scratch)
    return out


def workspace(
    x: Type,
    w: Type,
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: None = None,  # noqa: ARG001
) -> int:
    """Bytes beyond the result: a panel of the weight for each thread."""
    from mtmd.kernels.cpu.tiled import product, team

    width = x.shape[-1]
    panel, _, units = _shares(x.count // width, width, w.shape[0])
    return team.scratch_bytes(product.locations(width, panel)[2], units)


def _shares(rows: int, width: int, columns: int) -> tuple[int, int, int]:
    """Columns of a panel, rows of a run, units."""
    from mtmd.kernels.cpu.tiled import product

    threads = torch.get_num_threads()
    panel = product.panel_of(columns, width, threads)
    panels = -(-columns // panel)
    # Whole rounds of panels need no runs
    runs = 1 if panels % threads == 0 else max(1, min(-(-2 * threads // panels), rows // RUN))
    run = -(-rows // (runs * product.STEP)) * product.STEP
    return panel, run, panels * -(-rows // run)


def how(*types: Type | None, **attrs: object) -> str:  # noqa: ARG001
    """The only way there is."""
    return "machine code (AMX)"


KERNEL = Kernel(tiled_matmul, rejects, workspace, how=how)
