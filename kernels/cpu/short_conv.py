"""Short convolution on the CPU: sequences that decode one token go together, longer parts run in
blocks of rows, so that what is held beyond the result does not grow with their length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.recurrent import spans

# Rows of a block: with 4,096 channels in fp32 2 MiB, what a core's cache holds.
ROWS = 128


def short_conv(
    x: Tensor,
    w: Tensor,
    state: Tensor,
    starts: Tensor,
    slots: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """The `short_conv` op: x [T, C], w [C, W], state [N, W - 1, C] -> [T + S (W - 1), C] in x's
    type
    """
    tokens, before, taps = x.shape[0], w.shape[1] - 1, w.t().float().contiguous()
    out = x.new_empty(tokens + slots.shape[0] * before, x.shape[1])
    states = out[tokens:].view(slots.shape[0], before, x.shape[1])
    parts = spans(starts)
    single = torch.tensor(
        [i for i, (start, stop) in enumerate(parts) if stop - start == 1], dtype=torch.int64
    )
    if single.numel():
        at = starts[single]
        windows = torch.cat([state[slots[single]].to(x.dtype), x[at][:, None]], 1)  # [S, W, C]
        out[at] = _weighted(list(windows.unbind(1)), taps, bias, activation).to(x.dtype)
        states[single] = windows[:, 1:]
    for slot, now, (start, stop) in zip(slots.tolist(), states, parts, strict=True):
        if stop - start != 1:
            last = state[slot].to(x.dtype)
            for first in range(start, stop, ROWS):
                end = min(first + ROWS, stop)
                rows = (
                    x[first - before : end]
                    if first - start >= before
                    else torch.cat([last, x[start:end]])[first - start :]
                )
                rows = rows.float()
                out[first:end] = _weighted(
                    [rows[j : j + end - first] for j in range(before + 1)], taps, bias, activation
                )
            now.copy_(
                x[stop - before : stop]
                if stop - start >= before
                else torch.cat([last, x[start:stop]])[-before:]
            )
    return out


def _weighted(rows: list[Tensor], taps: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """act(sum_j taps[j] rows[j] + bias) in fp32          rows W of [R, C], taps [W, C]"""
    y = rows[0] * taps[0]
    for row, tap in zip(rows[1:], taps[1:], strict=True):
        y.addcmul_(row.float(), tap)
    if bias is not None:
        y += bias.float()
    return F.silu(y, inplace=True) if activation == "silu" else y


def workspace(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,  # noqa: ARG001
    slots: Type,
    bias: Type | None = None,  # noqa: ARG001
    *,
    activation: str,  # noqa: ARG001
) -> int:
    """Most bytes beyond the result; with several sequences, for the parts that take most."""
    (tokens, channels), width, count = x.shape, w.shape[1], slots.shape[0]
    item, half = x.dtype.itemsize, x.dtype.itemsize != 4
    taps = channels * width * 4
    windows = count * channels * width * item
    gathered = count * channels * max(item + (width - 1) * state.dtype.itemsize, 8 if half else 4)
    if tokens == count:
        return taps + windows + gathered
    block = min(tokens, ROWS)
    rows = channels * (
        (block + width - 1) * 4 + max(block * 4, (block + width - 1) * item if half else 0)
    )
    return taps + (rows if count == 1 else windows + max(rows, gathered))


KERNEL = Kernel(short_conv, workspace=workspace)
