"""Products with quantized weights: against torch's bf16 matmul on the weights dequantized."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

from gpu_kernels.ceilings import COPY, PRODUCT
from gpu_kernels.predictions import cells_of
from gpu_kernels.rows import Cells, Row, Setting, Task, judged, must

KINDS = ("Q4_K", "Q4_0", "Q6_K", "Q8_0")
WEIGHTS = ((4096, 4096), (14336, 4096))  # rows, columns; the second is the FFN of Mistral 7B
ROWS = (1, 8, 16, 64, 512, 4096)
FEW = 64  # rows up to which reading weights takes the time, and its rate is shown
SMALL_WEIGHT, SMALL_ROWS = (33, 256), 65
TITLE = "Products with quantized weights, against torch's bf16 matmul on dequantized weights"


def tasks(setting: Setting) -> Iterator[Task]:
    for rows, weight, kind in product(ROWS, WEIGHTS, KINDS):
        make = functools.partial(measured, rows, *weight, kind, setting)
        yield Task(f"{kind} {weight[0]} x {weight[1]}, {rows} rows of x", make)


def programs(target: str) -> Iterator[Any]:  # noqa: ARG001 - as the others' are called
    """What the timed products launch."""
    import torch

    from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
    from mtmd.kernels.graph import Type
    from mtmd.kernels.quantization.blocks import row_bytes

    for rows, (outer, width), kind in product(ROWS, WEIGHTS, KINDS):
        x = Type.contiguous((rows, width), torch.bfloat16)
        w = Type.contiguous((outer, row_bytes(kind, width)), torch.uint8)
        yield from KERNEL.launched(x, w, quant=kind)


def problem(
    rows: int, outer: int, width: int, kind: str, device: str, exact: bool = False
) -> tuple[Any, Any]:
    """x, bf16 or fp32 [rows, width], and w, u8 [outer, bytes of width values]."""
    import torch

    from mtmd.kernels.gpu.quant_matmul.cases import random_blocks

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=rng)
    x = x.to(device, torch.float32 if exact else torch.bfloat16)
    return x, random_blocks(kind, outer, width).to(device)


def measured(rows: int, outer: int, width: int, kind: str, setting: Setting) -> Row:
    import torch.nn.functional as F

    from mtmd.kernels.gpu.quant_matmul.cases import NMSE, product_error
    from mtmd.kernels.gpu.table import KERNELS
    from mtmd.kernels.quantization.blocks import dequantize

    label = f"{kind} {outer} x {width}"
    if setting.dry:
        rows, (outer, width) = min(rows, SMALL_ROWS), SMALL_WEIGHT
    x, w = problem(rows, outer, width, kind, setting.device, exact=setting.dry)
    quant_matmul = KERNELS["matmul"][0].load().run
    error = product_error("matmul", quant_matmul(x, w, quant=kind), (x, w), {"quant": kind})
    must(judged(f"{label}, {rows} rows of x", error, NMSE[x.dtype]))
    wide = dequantize(w, kind).to(x.dtype)
    ours = setting.milliseconds(lambda: quant_matmul(x, w, quant=kind))
    torchs = setting.milliseconds(lambda: F.linear(x, wide))
    few = rows <= FEW
    rate = (w.numel() if few else 2 * rows * outer * width) / ours * 1e3
    share = setting.part_of(rate, COPY if few else PRODUCT)
    cells: Cells = {
        "weight": label,
        "rows of x": rows,
        "kernel ms": ours,
        **cells_of("matmul", (x, w), {"quant": kind}, ours, setting),
        f"weight bytes (to {FEW} rows) or arithmetic": (
            f"{rate / 1e9:.0f} GB/s" if few else f"{rate / 1e12:.0f} TFLOP/s"
        ),
        "of ceiling": "-" if share is None else share,
        "torch bf16 ms": torchs,
        "ratio": torchs / ours,
    }
    return Row(cells, TITLE)
