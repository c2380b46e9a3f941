"""Products with quantized weights: against torch's bf16 matmul on the weights dequantized."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from gpu_kernels.measure import judged, milliseconds, table

KINDS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
WEIGHTS = ((4096, 4096), (14336, 4096))  # rows, columns; the second is the FFN of Mistral 7B
ROWS = (1, 8, 16, 64, 512, 4096)
FEW = 64  # rows up to which reading weights takes the time, and its rate is shown


def checks(device: str) -> Iterator[str | None]:
    """For every timed product, None or how it failed."""
    from mtmd.kernels.gpu.quant_matmul.cases import NMSE, product_error
    from mtmd.kernels.gpu.quant_matmul.kernel import quant_matmul

    for (outer, width), kind in product(WEIGHTS, KINDS):
        given, w = problem(outer, width, kind, device)
        for x in given:
            result = quant_matmul(x, w, quant=kind)
            error = product_error("matmul", result, (x, w), {"quant": kind})
            yield judged(f"{kind} bf16 M{len(x)} N{outer} K{width}", error, NMSE[x.dtype])


def problem(outer: int, width: int, kind: str, device: str) -> tuple[list[Any], Any]:
    """x, bf16 [M, width] for each number of rows, and w, u8 [outer, bytes of width values]."""
    import torch

    from mtmd.kernels.gpu.quant_matmul.cases import random_blocks

    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(m, width, generator=rng).to(device, torch.bfloat16) for m in ROWS
    ], random_blocks(kind, outer, width).to(device)


def report(device: str) -> list[str]:
    rows = [
        row
        for (outer, width), kind in product(WEIGHTS, KINDS)
        for row in measured(outer, width, kind, device)
    ]
    return table(
        "Products with quantized weights, against torch's bf16 matmul on dequantized weights",
        (
            "weight",
            "rows of x",
            "kernel ms",
            f"weight bytes (to {FEW} rows) or arithmetic",
            "torch bf16 ms",
            "ratio",
        ),
        rows,
    )


def measured(outer: int, width: int, kind: str, device: str) -> Iterator[list[str]]:
    import torch
    import torch.nn.functional as F

    from mtmd.kernels.gpu.quant_matmul.kernel import quant_matmul
    from mtmd.kernels.quantization.blocks import dequantize

    given, w = problem(outer, width, kind, device)
    wide = dequantize(w, kind).to(torch.bfloat16)
    for x in given:
        ours = milliseconds(lambda x=x: quant_matmul(x, w, quant=kind))  # type: ignore[misc]
        torchs = milliseconds(lambda x=x: F.linear(x, wide))  # type: ignore[misc]
        few = len(x) <= FEW
        rate = (
            f"{w.numel() / ours / 1e6:.0f} GB/s"
            if few
            else f"{2 * len(x) * outer * width / ours / 1e9:.0f} TFLOP/s"
        )
        yield [
            f"{kind} {outer} x {width}",
            str(len(x)),
            f"{ours:.4f}",
            rate,
            f"{torchs:.4f}",
            f"{torchs / ours:.2f}",
        ]
