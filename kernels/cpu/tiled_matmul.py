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


def rejects(
    x: Type,
    w: Type,
    bias: Type | None = None,
    *,
    quant: str | None = None,
    int8: bool = False,  # noqa: ARG001
) -> str | None:
    """None if the kernel multiplies tensors of these types, else why not."""
    if quant is not None:
        return f"weights are {quant}; the kernel supports plain ones"
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
    from mtmd.kernels.cpu.tiled import many_rows

    width = x.shape[-1]
    out = new_result(*x.shape[:-1], w.shape[0], dtype=x.dtype)
    many_rows.multiply("BF16", x.view(-1, width), w, bias, out)
    return out


def workspace(
    x: Type,
    w: Type,
    bias: Type | None = None,  # noqa: ARG001
    *,
    quant: None = None,  # noqa: ARG001
) -> int:
    """Bytes beyond the result: a panel of the weight for each thread."""
    from mtmd.kernels.cpu.tiled import many_rows

    width = x.shape[-1]
    return many_rows.workspace("BF16", x.count // width, width, w.shape[0], x.dtype)


def how(*types: Type | None, **attrs: object) -> str:  # noqa: ARG001
    """The only way there is."""
    return "machine code (AMX)"


KERNEL = Kernel(tiled_matmul, rejects, workspace, how=how)
