"""Flash attention on the CPU: rows in blocks, so that no more than a block's scores ever exist.

torch's own CPU flash kernel does the work inside a block; what it does not know (bounds, windows, soft caps) becomes a mask of
block x keys, and keys that no row of the block can see are left out. A single row, the decode step, is two small products.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.ops.attention import attn_mix, attn_scores, attn_softmax, visible

ROWS = 256  # rows of a block; a mask of 256 x 16,384 keys is 16 MiB in fp32


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, bounds: Tensor | None = None, *, scale: float,
                    causal: bool = False, window: int | None = None, softcap: float | None = None) -> Tensor:
    """The `attention` op: q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]"""
    batch, rows, heads, _ = q.shape
    plain = mask is None and bounds is None and not causal and window is None and softcap is None
    if plain and q.shape[2] == k.shape[2] and q.shape[3] == v.shape[3]:
        return _sdpa(q, k, v, None, scale).contiguous()
    out = q.new_empty(batch, rows, heads, v.shape[3])
    for start in range(0, rows, ROWS):
        stop = min(start + ROWS, rows)
        out[:, start:stop] = _block(q, k, v, mask, bounds, start, stop, scale, causal, window, softcap)
    return out


def workspace(batch: int, rows: int, keys: int, heads: int, masked: bool, softcap: bool) -> int:
    """Bytes beyond the result: one block's mask, or its scores where a soft cap rules torch's kernel out."""
    block = min(rows, ROWS) * keys
    if softcap or rows == 1:
        return 3 * batch * heads * block * 4
    return batch * block * 5 if masked else 0


def _block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bounds: Tensor | None, start: int, stop: int, scale: float,
           causal: bool, window: int | None, softcap: float | None) -> Tensor:
    """Rows start..stop, over the keys that any of them can see."""
    rows, keys = q.shape[1], k.shape[1]
    limits = None if bounds is None else bounds.view(-1, rows, 2)[:, start:stop]
    first, last = 0, keys - 1
    if limits is not None:
        first, last = max(first, int(limits[..., 0].min())), min(last, int(limits[..., 1].max()))
    if causal:
        last = min(last, stop - 1 + keys - rows)
    if window is not None:
        first = max(first, start + keys - rows - window + 1)
    if last < first:
        return torch.zeros_like(q[:, start:stop, :, :1]).expand(-1, -1, -1, v.shape[3])
    part, k, v = q[:, start:stop], k[:, first:last + 1], v[:, first:last + 1]
    seen = _seen(limits, start, stop, first, last, rows, keys, causal, window)
    bias = None if mask is None else mask[..., start:stop, first:last + 1]
    if softcap is not None or stop - start == 1 or q.shape[3] != v.shape[3]:
        scores = attn_scores.reference(part, k, bias, scale=scale, softcap=softcap)
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
        assert attn_softmax.in_place is not None
        return attn_mix.reference(attn_softmax.in_place(scores), v)
    if seen is not None:
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf) if bias is None else bias.masked_fill(~seen, -torch.inf)
    out = _sdpa(part, k, v, bias, scale)
    return out if seen is None else out.masked_fill(~seen.any(-1).transpose(1, 2)[..., None], 0)


def _seen(limits: Tensor | None, start: int, stop: int, first: int, last: int, rows: int, keys: int, causal: bool,
          window: int | None) -> Tensor | None:
    """bool [1 or B, 1, rows, keys] of the block, None when its rows see all of its keys."""
    if limits is not None:
        limits = limits - first
    seen = visible(stop - start, last - first + 1, limits, False, None, torch.device("cpu"))
    if causal or window is not None:
        s = torch.arange(first, last + 1)
        end = torch.arange(start, stop)[:, None] + keys - rows
        near = torch.ones(1, dtype=torch.bool) if window is None else s > end - window
        near = near & (s <= end) if causal else near
        seen = near[None, None] if seen is None else seen & near
    return None if seen is None or bool(seen.all()) else seen


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    bias = None if bias is None else bias.to(q.dtype)
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)
