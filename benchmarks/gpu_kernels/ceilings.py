"""What the card can do at best, by which everything else is judged: copying its memory, and
multiplying matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from gpu_kernels.predictions import card_of
from gpu_kernels.rows import Cells, Row, Setting, SkipError, Task

COPIED, SIDE = 4 << 30, 8192  # bytes, far beyond any cache; rows and columns
BEFORE, RUNS = 3, 20
SMALL_COPIED, SMALL_SIDE = 1 << 20, 64
COPY, PRODUCT = "copied bytes/s", "bf16 flop/s"


def tasks(setting: Setting) -> Iterator[Task]:
    yield Task("versions", lambda: versions(setting))
    yield Task("copy of 4 GiB on the device", lambda: copy(setting))
    yield Task("bf16 product of 8192 x 8192 x 8192", lambda: product(setting))


def versions(setting: Setting) -> Row:
    import platform

    import numpy
    import torch
    import triton

    from mtmd.base.cores import usable_cores

    cells: Cells = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "Triton": triton.__version__,
        "numpy": numpy.__version__,
        "Python": platform.python_version(),
        "cores": usable_cores().usable,
    }
    if not setting.dry:
        card = torch.cuda.get_device_properties(setting.device)
        of_card: Cells = {
            "card": card.name,
            "multiprocessors": card.multi_processor_count,
            "GiB": round(card.total_memory / 2**30, 1),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
        cells = of_card | cells
    return Row(cells, "Versions")


def copy(setting: Setting) -> Row:
    """Bytes that are read and bytes that are written."""
    import torch

    size = SMALL_COPIED if setting.dry else COPIED
    source = torch.zeros(size // 2, dtype=torch.int16, device=setting.device).random_()
    there = torch.empty_like(source)
    rate = 2 * size / seconds(lambda: there.copy_(source), setting)
    cells: Cells = {"what": "copy of 4 GiB", "rate": f"{rate / 1e9:.0f} GB/s"}
    cells |= published(rate, "bandwidth", setting)
    return Row(cells, "Ceilings, measured", rates={COPY: rate})


def product(setting: Setting) -> Row:
    import torch

    side = SMALL_SIDE if setting.dry else SIDE
    a, b = (torch.randn(side, side, device=setting.device).to(torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / seconds(lambda: a @ b, setting)
    cells: Cells = {"what": "bf16 product, 8192 a side", "rate": f"{rate / 1e12:.0f} TFLOP/s"}
    cells |= published(rate, "flops_16", setting)
    return Row(cells, "Ceilings, measured", rates={PRODUCT: rate})


def published(rate: float, of: str, setting: Setting) -> Cells:
    """Which part it is of what the maker says, and which was assumed (docs/gpu.md)."""
    from mtmd.kernels.estimate.roofline import FAST, factors_of

    try:
        card = card_of(setting)
    except SkipError:
        return {"of published": "-", "assumed": "-"}
    factors = factors_of(card)[FAST]
    assumed = factors.bandwidth if of == "bandwidth" else factors.product
    return {"of published": rate / getattr(card, of), "assumed": assumed}


def seconds(run: Callable[[], Any], setting: Setting) -> float:
    """Median of runs, by the device's clock."""
    import torch

    if setting.dry:
        run()
        return 1.0
    result: list[float] = []
    for number in range(BEFORE + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= BEFORE:
            result.append(start.elapsed_time(end) / 1e3)
    return median(result)
