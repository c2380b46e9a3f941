"""Flash attention on the CPU: rows in blocks, so that no more than a block's scores ever exist.

torch's own CPU flash kernel does the work. What it does not know (bounds, windows) becomes a mask
of block x keys, and keys that no row of the block can see are left out; soft caps and values of
another width than the keys take the explicit way, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.attention import attn_mix, attn_scores, attn_softmax, visible

Limits: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int32]]"  # bounds [1 or B, T, 2]
# Rows of a block: a mask of 256 x 16,384 keys is 16 MiB in fp32.
ROWS = 256


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask_capped: bool = False,
) -> Tensor:
    """The `attention` op: q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]"""
    # Given other strides, or a mask of three dimensions, torch leaves its flash kernel for one that
    # makes all scores.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    batch, rows, heads, width = q.shape
    if bounds is None and not causal and window is None and softcap is None and width == v.shape[3]:
        return _sdpa(q, k, v, mask, scale).contiguous()
    out = q.new_empty(batch, rows, heads, v.shape[3])
    # numpy's calls on few numbers are cheaper than torch's.
    limits = None if bounds is None else bounds.view(-1, rows, 2).numpy()
    for start, stop in _blocks(rows, limits):
        out[:, start:stop] = _block(
            q, k, v, mask, limits, start, stop, scale, causal, window, softcap, mask_capped
        )
    return out


def _blocks(rows: int, limits: Limits | None) -> Iterator[tuple[int, int]]:
    """Stretches of at most ROWS rows, cut where a row and the next see no key in common: there
    another sequence begins.
    """
    ends = set(range(ROWS, rows, ROWS)) | {rows}
    if limits is not None and rows > 1:
        first, last = limits[..., 0], limits[..., 1]
        separate = ((first[:, 1:] > last[:, :-1]) | (last[:, 1:] < first[:, :-1])).all(0)
        ends |= set((separate.nonzero()[0] + 1).tolist())
    start = 0
    for end in sorted(ends):
        yield start, end
        start = end


def workspace(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    *,
    scale: float,  # noqa: ARG001
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask_capped: bool = False,  # noqa: ARG001
) -> int:
    """Most bytes beyond the result; fewer where whole stretches of keys turn out to be out of a
    block's sight.
    """
    batch, rows, heads, width = q.shape
    keys, item = k.shape[1], q.dtype.itemsize
    copies = sum(t.bytes for t in (q, k, v) if t.strides[-1] != 1)
    limited = bounds is not None or causal or window is not None
    if not limited and softcap is None and width == v.shape[3]:
        return copies + _kernel_bytes(q, k, rows)
    block = min(rows, ROWS)
    out = batch * block * heads * v.shape[3] * item
    spread = bounds.shape[0] if bounds is not None and len(bounds.shape) == 3 else 1
    seen = spread * block * keys if limited else 0
    masked = (
        0
        if mask is None
        else max(spread, (1, 1, *mask.shape)[-4]) * (1, *mask.shape)[-3] * block * keys
    )
    if softcap is not None or width != v.shape[3]:
        queries, count = batch * block * heads * width * item, batch * heads * block * keys
        half = (
            0
            if item == 4
            else max(
                count * item, masked * 4 if mask is not None and mask.dtype.itemsize != 4 else 0
            )
        )
        # The products copy keys, then values, where batch and groups are not one dimension in
        # memory.
        return (
            copies
            + out
            + queries
            + count * 4
            + half
            + 2 * seen
            + (max(k.bytes, v.bytes) if batch > 1 else 0)
        )
    bias = seen * item if mask is None else masked * mask.dtype.itemsize
    return copies + max(4 * seen, 2 * seen + bias, seen + bias + out + _kernel_bytes(q, k, block))


def _kernel_bytes(q: Type, k: Type, rows: int) -> int:
    """Return what torch's kernel takes for itself
    (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of torch 2.13): scores and results of a tile
    per thread, a sum per row, and in 16 bits a packed copy of keys and values.

    Its conditions are torch's, as one bound would be too high: the largest tile in place of the
    right one by some 15 % for a limited block of rows, packing of all rows by the whole cache for
    each token that is decoded.
    """
    batch, _, heads, width = q.shape
    half = q.dtype.itemsize == 2
    tile = 256 if rows >= 768 else 64 if rows >= 192 else 32
    packed = (
        2 * k.bytes
        if half and rows >= 192 and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        else 0
    )
    return (
        torch.get_num_threads() * tile * (512 * (6 if half else 4) + (width + 2) * 4)
        + batch * heads * rows * 4
        + packed
    )


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    limits: Limits | None,
    start: int,
    stop: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    mask_capped: bool,
) -> Tensor:
    """Rows start..stop, over the keys that any of them can see."""
    rows, keys = q.shape[1], k.shape[1]
    first, last = 0, keys - 1
    if limits is not None:
        limits = limits[:, start:stop]
        if limits.size == 2:  # a row of a sequence that decodes
            first, last = limits.ravel().tolist()
        else:
            first, last = int(limits[..., 0].min()), int(limits[..., 1].max())
        first, last = max(first, 0), min(last, keys - 1)
    if causal:
        last = min(last, stop - 1 + keys - rows)
    if window is not None:
        first = max(first, start + keys - rows - window + 1)
    if last < first:
        return torch.zeros_like(q[:, start:stop, :, :1]).expand(-1, -1, -1, v.shape[3])
    part, k, v = q[:, start:stop], k[:, first : last + 1], v[:, first : last + 1]
    seen = _seen(limits, start, stop, first, last, rows, keys, causal, window)
    bias = None if mask is None else mask[..., start:stop, first : last + 1]
    if softcap is not None or q.shape[3] != v.shape[3]:
        scores = attn_scores.reference(
            part, k, bias, scale=scale, softcap=softcap, mask_capped=mask_capped
        )
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
        assert attn_softmax.in_place is not None
        return attn_mix.reference(attn_softmax.in_place(scores), v)
    if seen is not None and bias is None:
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    elif seen is not None and bias is not None:
        bias = bias.masked_fill(~seen, -torch.inf)
    return _sdpa(part, k, v, bias, scale)


def _seen(
    limits: Limits | None,
    start: int,
    stop: int,
    first: int,
    last: int,
    rows: int,
    keys: int,
    causal: bool,
    window: int | None,
) -> Tensor | None:
    """bool [1 or B, 1, rows, keys] of the block, None when its rows see all of its keys."""
    seen = None
    if limits is not None and not (limits[..., 0].max() <= first and last <= limits[..., 1].min()):
        seen = visible(
            stop - start,
            last - first + 1,
            torch.from_numpy(limits - first),
            False,
            None,
            torch.device("cpu"),
        )
    if causal or window is not None:
        s = torch.arange(first, last + 1)
        end = torch.arange(start, stop)[:, None] + keys - rows
        near = torch.ones(1, dtype=torch.bool) if window is None else s > end - window
        near = near & (s <= end) if causal else near
        seen = near[None, None] if seen is None else seen & near
    return None if seen is None or bool(seen.all()) else seen


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """torch's kernel, on any layout of heads; it adds masks in fp32 or in q's type, and a row whose
    mask is all -inf gives zeros.
    """
    if bias is not None and bias.dtype != q.dtype:
        bias = bias.float()
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        bias,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


KERNEL = Kernel(flash_attention, workspace=workspace)
