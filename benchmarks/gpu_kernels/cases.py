"""Every case of every kernel against its op's reference on the GPU; and every filter for
pictures against Pillow, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from gpu_kernels import pictures
from gpu_kernels.rows import Row, Setting, Task, must

DRY = 3  # cases of an op that a dry run makes: its first ones that are exact, which are small


def tasks(setting: Setting) -> Iterator[Task]:
    """One of each op, then another: whenever time is up, something of each was seen. A dry run has
    some of those that are exact.
    """
    from mtmd.kernels.gpu.table import KERNELS

    each = [of_op(op, setting) for op in KERNELS if setting.op in (None, op)]
    if setting.op in (None, "pictures"):
        each.append(pictures.checks(setting))
    for one_of_each in zip_longest(*each):
        yield from filter(None, one_of_each)


def of_op(op: str, setting: Setting) -> Iterator[Task]:
    left = DRY
    for kernel in kernels(op):
        for case in kernel.cases:
            here = setting.dry and left > 0 and is_exact(case)
            left -= here
            yield Task(f"{op}: {case}", functools.partial(right, op, kernel, case, setting), here)


def right(op: str, kernel: Any, case: Any, setting: Setting) -> Row:
    must(kernel.failure(op, case, "cpu" if setting.dry else setting.device))
    return Row()


def kernels(op: str) -> Iterator[Any]:
    """Those for an op, in order of preference."""
    from mtmd.kernels.gpu.table import KERNELS

    return (entry.load() for entry in KERNELS[op])


def first(kernel: Any) -> Any:
    """Of its cases, one that is small and exact."""
    return next(case for case in kernel.cases if is_exact(case))


def is_exact(case: Any) -> bool:
    """Whether Triton's interpreter computes with its numbers as a GPU does: not with bf16, of which
    it multiplies the bits.
    """
    import torch

    return bool(case.dtype != torch.bfloat16)
