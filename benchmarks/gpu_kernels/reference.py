"""Every kernel of the table on its `USES`, against the op's reference, which launches op by op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu_kernels.measure import milliseconds, table


def kernels(op: str) -> Iterator[Any]:
    """Those for an op, in order of preference."""
    from mtmd.kernels.gpu.table import KERNELS

    return (entry.load() for entry in KERNELS[op])


def checks(device: str, op: str, exact: bool = False) -> Iterator[str | None]:
    """For every case and use of an op's kernels, None or how it failed. `exact`: for cases in fp32
    alone, with whose numbers Triton's interpreter computes as a GPU does.
    """
    import torch

    for kernel in kernels(op):
        cases = [(str(c), c) for c in kernel.cases if not exact or c.dtype == torch.float32]
        for label, case in [*cases, *({} if exact else kernel.uses).items()]:
            yield kernel.failure(op, case, device, label)


def report(device: str, op: str) -> list[str]:
    heads = ("use", "kernel ms", "GB/s", "TFLOP/s", "reference ms", "ratio")
    rows = [
        measured(label, op, kernel, case, device)
        for kernel in kernels(op)
        for label, case in kernel.uses.items()
    ]
    return table(f"{op}, against its reference, which launches op by op", heads, rows)


def measured(label: str, op: str, kernel: Any, case: Any, device: str) -> list[str]:
    from mtmd.kernels.gpu.triton_kernel import node_of
    from mtmd.kernels.ops import OPS

    inputs, node = case.inputs(device), node_of(op, case)
    ours = milliseconds(lambda: kernel.run(*inputs, **case.options))
    # References may ask where sequences start, for which they wait: that cannot be replayed.
    reference = milliseconds(lambda: OPS[op].reference(*inputs, **case.options), replayed=False)
    return [
        label,
        f"{ours:.4f}",
        f"{OPS[op].bytes(node) / ours / 1e6:.0f}",
        f"{OPS[op].flops(node) / ours / 1e9:.1f}",
        f"{reference:.3f}",
        f"{reference / ours:.1f}",
    ]
