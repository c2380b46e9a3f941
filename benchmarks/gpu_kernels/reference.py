"""Kernels of the table on their `USES`, against the op's reference, which launches op by op."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gpu_kernels.cases import first, kernels
from gpu_kernels.ceilings import COPY
from gpu_kernels.predictions import cells_of
from gpu_kernels.rows import Cells, Row, Setting, Task, must

# Timed by parts of their own, but for caches whose rows are stored in blocks.
SPECIAL = ("attention", "paged_attention", "matmul")


def tasks(setting: Setting) -> Iterator[Task]:
    from mtmd.kernels.gpu.table import KERNELS

    for op in KERNELS:
        if setting.op not in (op, None):
            continue
        for kernel in kernels(op):
            for label, case in kernel.uses.items():
                stored = op == "paged_attention" and case.options.get("quant")
                if setting.op or op not in SPECIAL or stored:
                    make = functools.partial(measured, label, op, kernel, case, setting)
                    yield Task(f"{op}: {label}", make)


def measured(label: str, op: str, kernel: Any, case: Any, setting: Setting) -> Row:
    from mtmd.kernels.gpu.triton_kernel import node_of
    from mtmd.kernels.ops import OPS

    if setting.dry:  # a problem of real size would take the interpreter hours
        case = first(kernel)
    device = setting.device
    must(kernel.failure(op, case, device, label))
    inputs, node = case.inputs(device), node_of(op, case)
    ours = setting.milliseconds(lambda: kernel.run(*inputs, **case.options))
    # References may ask where sequences start, for which they wait: that cannot be replayed.
    reference = setting.milliseconds(
        lambda: OPS[op].reference(*inputs, **case.options), replayed=False
    )
    rate = OPS[op].bytes(node) / ours * 1e3
    cells: Cells = {
        "use": label,
        "kernel ms": ours,
        **cells_of(op, inputs, case.options, ours, setting),
        "GB/s": rate / 1e9,
        "of copy": _share(setting.part_of(rate, COPY)),
        "TFLOP/s": OPS[op].flops(node) / ours / 1e9,
        "reference ms": reference,
        "ratio": reference / ours,
    }
    return Row(cells, f"{op}, against its reference, which launches op by op")


def _share(value: float | None) -> float | str:
    return "-" if value is None else value
