"""Convolution of a grid for NVIDIA and AMD GPUs: the `conv2d` op without a row for each window.

    y[m, n] = bias[n] + sum over taps (i, j) and channels c of x[cell(m) + (i, j), c] w[n, c, i, j]

One program makes ROWS cells of the result by BLOCK outputs. Cells of all pictures are one list of
rows; a window's cells outside the grid are zeros that nobody stores. Without groups it is a matrix
product: for each block of channels it goes through the taps, so that a line of w, in which a
channel's taps lie next to each other, is fetched once for all of them. With as many groups as
channels (a depthwise convolution) each output reads one channel, and the taps are summed up
directly. Sums are fp32.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.triton_kernel import (
    Launch,
    Plan,
    Problem,
    case,
    declared,
    given,
    not_dense,
    same,
)
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.image import Padding, conv_grid

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# the result in 16 bits, and fp32 sums in another order.
NMSE = {torch.float32: 1e-10 / 3, torch.float16: 2.0**-22 / 3, torch.bfloat16: 2.0**-16 / 3}


@dataclass(frozen=True)
class Operands:
    """Operands of `conv2d`: x [B, rows * columns, C], w [N, C / groups, I, J], bias [N] ->
    [B, P', N] in x's type
    """

    x: Type
    w: Type
    bias: Type | None = None
    _: KW_ONLY
    grid: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    groups: int = 1

    @property
    def depthwise(self) -> bool:
        return self.groups == self.x.shape[2] == self.w.shape[0]


@triton.jit(do_not_specialize=["M"])
def conv2d_kernel(p, s, M, C: tl.constexpr):
    """ROWS cells of the result by BLOCK outputs; M cells in all."""
    blocks = tl.cdiv(s.outputs, C.BLOCK)
    n = tl.program_id(0) % blocks * C.BLOCK + tl.arange(0, C.BLOCK)
    m = tl.program_id(0) // blocks * C.ROWS + tl.arange(0, C.ROWS)
    real = m < M
    cell = m % (s.to_rows * s.to_columns)
    picture = (m // (s.to_rows * s.to_columns)).to(tl.int64) * s.rows * s.columns
    row = cell // s.to_columns * C.DOWN - s.top
    column = cell % s.to_columns * C.ACROSS - s.left
    y = tl.zeros([C.ROWS, C.BLOCK], tl.float32)
    inner = tl.arange(0, C.CHANNELS)
    for first in range(0, 1 if C.DEPTHWISE else s.channels, C.CHANNELS):
        for tap in range(C.I * C.J):
            i, j = row + tap // C.J, column + tap % C.J
            inside = real & (i >= 0) & (i < s.rows) & (j >= 0) & (j < s.columns)
            at = (picture + i * s.columns + j) * s.channels
            if C.DEPTHWISE:
                x = tl.load(
                    p.x + at[:, None] + n[None, :],
                    mask=inside[:, None] & (n < s.channels)[None, :],
                    other=0,
                )
                w = tl.load(p.w + n * (C.I * C.J) + tap, mask=n < s.outputs, other=0)
                y += x.to(tl.float32) * w.to(tl.float32)[None, :]
            else:
                c = first + inner
                x = tl.load(
                    p.x + at[:, None] + c[None, :],
                    mask=inside[:, None] & (c < s.channels)[None, :],
                    other=0,
                )
                w = tl.load(
                    p.w + (n[None, :] * s.channels + c[:, None]) * (C.I * C.J) + tap,
                    mask=(c < s.channels)[:, None] & (n < s.outputs)[None, :],
                    other=0,
                )
                y = tl.dot(x, w, y, input_precision="ieee")
    if C.BIAS:
        y += tl.load(p.bias + n, mask=n < s.outputs, other=0).to(tl.float32)[None, :]
    to = p.out + m.to(tl.int64)[:, None] * s.outputs + n[None, :]
    tl.store(to, y.to(p.out.dtype.element_ty), mask=real[:, None] & (n < s.outputs)[None, :])


def rejects(o: Operands) -> str | None:
    """None if the kernel convolves tensors of these types, else why not. Sizes never matter short
    of 32-bit row numbers and of w's, which are named.
    """
    if reason := not_dense({"x": o.x, "w": o.w, "bias": o.bias}):
        return reason
    if o.groups != 1 and not o.depthwise:
        return (
            f"{o.groups} groups of {o.x.shape[2]} channels, {o.w.shape[0]} outputs; the kernel "
            "takes one group, or an output and a channel for each"
        )
    batch, cells = o.x.shape[:2]
    made = conv_grid(o.grid, (o.w.shape[2], o.w.shape[3]), o.stride, o.padding)
    if max(batch * cells, batch * made[0] * made[1], o.w.count) >= 2**31:
        return f"{batch} grids of {cells} cells, {o.w.count} weights; the kernel numbers below 2^31"
    return None


def plan(o: Operands) -> Plan:
    batch, _, channels = o.x.shape
    outputs, _, height, width = o.w.shape
    made = conv_grid(o.grid, (height, width), o.stride, o.padding)
    count = batch * made[0] * made[1]
    wide = o.x.dtype == torch.float32  # products of fp32 take twice the registers
    rows = min(32 if wide else 64, max(16, power_of_two(max(count, 1))))
    block = min(32 if wide else 64, max(16, power_of_two(outputs)))
    call = Call(
        {
            "M": count,
            "channels": channels,
            "outputs": outputs,
            "rows": o.grid[0],
            "columns": o.grid[1],
            "to_rows": made[0],
            "to_columns": made[1],
            "top": o.padding[0],
            "left": o.padding[2],
        },
        {
            "I": height,
            "J": width,
            "DOWN": o.stride[0],
            "ACROSS": o.stride[1],
            "DEPTHWISE": o.depthwise and channels > 1,
            "BIAS": o.bias is not None,
            "ROWS": rows,
            "BLOCK": block,
            "CHANNELS": min(32, max(16, power_of_two(channels))),
        },
        -(-count // rows) * -(-outputs // block),
        4,
        2,
    )
    out = Type.contiguous((batch, made[0] * made[1], outputs), o.x.dtype)
    return Plan(out, [Launch(conv2d_kernel, call, same("x w bias out"), ("ROWS", "BLOCK"))])


@case
def problem(
    rng: torch.Generator,
    grid: tuple[int, int],
    channels: int,
    outputs: int,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: Padding = (1, 1, 1, 1),
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    groups: int = 1,
    bias: bool = True,
) -> Problem:
    x = torch.randn(batch, grid[0] * grid[1], channels, generator=rng).to(dtype)
    w = torch.randn(outputs, channels // groups, *kernel, generator=rng).to(dtype)
    b = torch.randn(outputs, generator=rng).to(dtype) if bias else None
    return given(x, w, b, grid=grid, stride=stride, padding=padding, groups=groups)


CASES = (
    problem((1, 1), 1, 1),
    problem((5, 7), 3, 17, stride=(2, 2), bias=False),
    problem((9, 6), 40, 70, dtype=torch.bfloat16, batch=3),
    problem((8, 9), 33, 16, (2, 3), (1, 2), (0, 1, 2, 0), torch.float16, 2),
    problem((1, 37), 20, 24, (1, 3), (1, 2), (0, 0, 1, 1), torch.bfloat16),
    problem((1, 3), 1, 5, (1, 3), padding=(0, 0, 1, 1)),
    problem((1, 33), 70, 70, (1, 5), (1, 1), (0, 0, 4, 0), torch.bfloat16, 2, 70),
    problem((4, 5), 18, 18, groups=18),
    problem((6, 6), 64, 64, (1, 1), padding=(0, 0, 0, 0), dtype=torch.float16),
)

USES = {
    "convolution 3 x 3, 64 x 64 cells": problem((64, 64), 256, 256, dtype=torch.bfloat16),
    "convolution 3 x 3, stride 2, 32 x 32 cells": problem(
        (32, 32), 512, 1024, stride=(2, 2), dtype=torch.bfloat16, bias=False
    ),
    "convolution along 3000 frames, stride 2": problem(
        (1, 3000), 1280, 1280, (1, 3), (1, 2), (0, 0, 1, 1), torch.bfloat16
    ),
    "depthwise convolution along 1500 frames": problem(
        (1, 1500), 1024, 1024, (1, 5), padding=(0, 0, 4, 0), dtype=torch.bfloat16, groups=1024
    ),
}

KERNEL = declared(Operands, plan, rejects, what="convolution", cases=CASES, uses=USES, limits=NMSE)
