"""Short convolution and gated delta rule on the CPU: neighbours that decode one token go together,
longer parts run in blocks.

The longer parts of the delta rule run by chunks (see `delta_chunk_`), those of the convolution by
blocks of rows: what is held beyond the result does not grow with their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.recurrent import CHUNK, delta_chunk_, spans

# rows of a block of the convolution: with 4,096 channels in fp32 2 MiB, what a core's cache holds
ROWS = 128
CACHE_BYTES = 1 << 20


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor,
    slots: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The `gated_delta` op: q, k [T, G, K], v [T, H, V], decay, beta [T, H], state [N, K, H, V] ->
    fp32 [T + S K, H, V]
    """
    tokens = v.shape[0]
    out = v.new_empty((tokens + slots.shape[0] * k.shape[2], *v.shape[1:]), dtype=torch.float32)
    states = out[tokens:].view(slots.shape[0], *state.shape[1:])
    parts = spans(starts)
    for i, j in _runs(parts, _together(state.shape)):
        start, stop = parts[i]
        torch.index_select(state, 0, slots[i:j], out=states[i:j])
        if stop - start == 1:
            run = slice(start, start + j - i)
            out[run] = _step_(states[i:j], q[run], k[run], v[run], decay[run], beta[run], scale)
        else:
            for first in range(start, stop, CHUNK):
                part = slice(first, min(first + CHUNK, stop))
                out[part] = delta_chunk_(
                    states[i], q[part], k[part], v[part], decay[part], beta[part], scale
                )
    return out


def _together(state: Sequence[int]) -> int:
    """How many sequences decode at once: as many as have their states in a core's cache while they
    are read and written, or one.
    """
    return max(1, CACHE_BYTES // max(prod(state[1:]) * 4, 1))


def _runs(parts: list[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of sequences that go together: up to `most` of one token each, or one that
    is longer.
    """
    i = 0
    while i < len(parts):
        j = i + 1
        while (
            j < len(parts)
            and j - i < most
            and all(stop - start == 1 for start, stop in (parts[i], parts[j]))
        ):
            j += 1
        yield i, j
        i = j


def _step_(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float
) -> Tensor:
    """One token of each sequence: o [S, H, V]; states [S, K, H, V] are overwritten by the next ones

    S^T k and S^T q are read from the state before it decays, in one product: o = scale (e^decay S^T
    q + (k.q) u), u what k adds.
    """
    (count, groups, size), (heads, value) = q.shape, v.shape[1:]
    each = heads // groups
    both = torch.stack([k, q], 2).float()  # [S, G, 2, K]
    grouped = states.view(count, size, groups, each * value)
    read = (both @ grouped.transpose(1, 2)).view(count, groups, 2, each, value)
    kept, b = decay.exp().view(count, groups, each, 1), beta.reshape(count, groups, each, 1)
    u = b * (v.float().view(count, groups, each, value) - kept * read[:, :, 0])
    dots = (both[:, :, 0] * both[:, :, 1]).sum(-1)[..., None, None]
    states.mul_(kept.view(count, 1, heads, 1))
    grouped.addcmul_(
        both[:, :, 0].transpose(1, 2)[..., None], u.reshape(count, 1, groups, each * value)
    )
    return (scale * (kept * read[:, :, 1] + dots * u)).reshape(count, heads, value)


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


def delta_workspace(
    q: Type,
    k: Type,  # noqa: ARG001
    v: Type,
    decay: Type,  # noqa: ARG001
    beta: Type,  # noqa: ARG001
    state: Type,
    starts: Type,  # noqa: ARG001
    slots: Type,
) -> int:
    """Most bytes beyond the result; with several sequences, for the parts that take most."""
    (tokens, groups, size), (heads, value), count = q.shape, v.shape[1:], slots.shape[0]
    pooled = size * heads * value * 4
    # Per sequence that decodes: k and q, what both read, a few rows of values, and the product's
    # own copy of the states.
    together = min(count, _together(state.shape))
    copied = pooled if together > 1 and groups > 1 else 0
    step = together * (
        2 * groups * size * (4 + q.dtype.itemsize % 4) + 6 * heads * value * 4 + copied
    )
    if tokens == count:
        return step
    c = min(tokens, CHUNK)
    square, rows = heads * c * c * 4, c * heads * value * 4
    read = 2 * c * groups * size * 4 + 2 * groups * c * c * 4 + 2 * rows
    chunk = (
        read
        + max(3 * square + 2 * rows, square + 4 * rows)
        + heads * c * 20
        + (rows if v.dtype.itemsize != 4 else 0)
    )
    return chunk if count == 1 else max(chunk, step)


def conv_workspace(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,  # noqa: ARG001
    slots: Type,
    bias: Type | None = None,  # noqa: ARG001
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


KERNELS: dict[str, Callable[..., Tensor]] = {"gated_delta": gated_delta, "short_conv": short_conv}
WORKSPACES: dict[str, Callable[..., int]] = {
    "gated_delta": delta_workspace,
    "short_conv": conv_workspace,
}
