"""Describes what a sum and the norm behind it have in common, of either kind (`add_norm`,
`add_layer_norm`): one program makes a block of rows, and `out` holds all sums and then all norms.
No Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, not_dense, same
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: a rounding of
# the sum, which its norm is taken of, and one of the norm, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15}
WIDEST = 16384  # values of a row in registers: 64 for each thread of 8 warps
TILE = 1024  # values of a program where rows are short


def rejects_rows(x: Type, named: Mapping[str, Type | None]) -> str | None:
    """None if a kernel takes x and all operands by their names, else why not."""
    if reason := not_dense(named):
        return reason
    if x.shape[-1] > WIDEST or prod(x.shape[:-1]) >= 2**30:
        return (
            f"{prod(x.shape[:-1])} rows of {x.shape[-1]} values; the kernel supports "
            "below 2^30 rows "
            f"of up to {WIDEST}"
        )
    return None


def plan_rows(
    kernel: Any, x: Type, pointers: str, scalars: Mapping[str, float], flags: Mapping[str, bool]
) -> Plan:
    """Plan a kernel on the rows of x. scalars: beside their number and width; flags: constants."""
    count, width = prod(x.shape[:-1]), x.shape[-1]
    columns = power_of_two(max(width, 1))
    rows = max(1, TILE // columns)
    call = Call(
        {"N": count, "D": width, **scalars},
        {**flags, "ROWS": rows, "COLUMNS": columns},
        -(-count // rows) if width else 0,
        4 if columns <= 4096 else 8,
        1,
    )
    out = Type.contiguous((2, *x.shape), x.dtype)
    return Plan(out, [Launch(kernel, call, same(pointers), ("ROWS", "COLUMNS"))])
