"""Attention, as one op (flash) and as the three it is made of (explicit).

Layout is [B, T, H, K] throughout, so that heads are a plain reshape of a projection's result.
Grouped heads: q has H heads, k and v have G, and q head h reads k, v head h // (H / G).

Which keys s a row t may see is any conjunction of
- `causal`: s <= t + S - T (the last row sees everything)
- `window`: s > t + S - T - window
- `bounds` [T, 2] or [B, T, 2], int32: bounds[t, 0] <= s <= bounds[t, 1]. Causal rows behind a
  cache, sliding windows and image
  blocks that see each other in both directions are all intervals: a row of cache slot p in a block
  that ends at slot e, under a window w, has bounds (p - w + 1, e).
`mask` [T, S], [H, T, S] or [B, H, T, S] (B, H may be 1) is added to the scores, after the soft cap
c * tanh(score / c), or before it with `mask_capped`, as conformers add relative positions: -inf
hides no key then, bounds do. Relative positions of a grid need no mask (`relative.py`). A row that
sees nothing gives zeros. Keys and values that a row may not see still have to be finite: they are
multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.gather import gather_pages
from mtmd.kernels.ops.norm import rms_norm
from mtmd.kernels.ops.op import need, need_cache, need_floats, need_positions, op, same_as_first
from mtmd.kernels.ops.rope import PAIRS, rope
from mtmd.kernels.quantization.kv_rows import BLOCK, cached_parts


def _flops(node: Node) -> int:
    """Count the keys that a row sees at most: what is known of its bounds may say so as `keys`."""
    q, k, _, _, bounds = (*node.inputs, None, None, None)[:5]
    assert q is not None and k is not None
    batch, rows, heads, _ = q.shape
    seen = k.shape[1] if bounds is None else min(k.shape[1], bounds.attrs.get("keys", k.shape[1]))
    return 2 * batch * heads * rows * seen * (q.shape[-1] + node.shape[-1])


def _check_operands(q: Type, k: Type, mask: Type | None) -> None:
    need(
        len(q.shape) == len(k.shape) == 4
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and q.shape[2] % k.shape[2] == 0,
        f"q {list(q.shape)}, k {list(k.shape)}",
    )
    need_floats(q)
    need(q.dtype == k.dtype, f"q is {q}, k {k}: of two types")
    batch, rows, heads, _ = q.shape
    need(
        mask is None
        or (
            mask.dtype.is_floating_point
            and mask.shape[-2:] == (rows, k.shape[1])
            and len(mask.shape) <= 4
            and all(
                m in (1, size) for m, size in zip(mask.shape[-3::-1], (heads, batch), strict=False)
            )
        ),
        f"mask {None if mask is None else list(mask.shape)} does not add to scores "
        f"{[batch, heads, rows, k.shape[1]]}",
    )


def _check_bounds(batch: int, rows: int, bounds: Type | None) -> None:
    need(
        bounds is None
        or (bounds.shape in ((rows, 2), (batch, rows, 2)) and bounds.dtype == torch.int32),
        f"bounds {bounds} for {rows} rows in a batch of {batch}, expected i32 [{rows}, 2] or "
        f"[{batch}, {rows}, 2]",
    )


def _shape(
    q: Type,
    k: Type,
    v: Type,
    mask: Type | None = None,
    bounds: Type | None = None,
    **attrs: object,  # noqa: ARG001
) -> Type:
    _check_operands(q, k, mask)
    _check_bounds(q.shape[0], q.shape[1], bounds)
    need(len(v.shape) == 4 and k.shape[:3] == v.shape[:3], f"k {list(k.shape)}, v {list(v.shape)}")
    need_floats(v)
    return Type.contiguous((*q.shape[:3], v.shape[3]), v.dtype)


@op(shape=_shape, flops=_flops)
def attention(
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
    """softmax(q k^T * scale) v

    q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V], contiguous
    """
    scores = attn_scores.reference(
        q, k, mask, scale=scale, softcap=softcap, mask_capped=mask_capped
    )
    return attn_mix.reference(_softmax(scores, bounds, causal=causal, window=window), v)


def _scores_shape(q: Type, k: Type, mask: Type | None = None, **attrs: object) -> Type:  # noqa: ARG001
    _check_operands(q, k, mask)
    return Type.contiguous((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), torch.float32)


@op(shape=_scores_shape, flops=lambda n: 2 * n.type.count * n.inputs[0].shape[-1])  # type: ignore[union-attr]
def attn_scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    mask_capped: bool = False,
) -> Tensor:
    """q k^T * scale, capped, plus mask, in fp32          -> [B, H, T, S]"""
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.transpose(1, 2).reshape(batch, groups, heads // groups * rows, width)
    scores = (
        (grouped @ k.permute(0, 2, 3, 1)).view(batch, heads, rows, k.shape[1]).float().mul_(scale)
    )
    if mask is not None and mask_capped:
        scores.add_(mask)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    return scores if mask is None or mask_capped else scores.add_(mask)


def visible(
    rows: int,
    keys: int,
    bounds: Tensor | None,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    """bool [1 or B, 1, T, S]: which keys each row may see; None when that is all of them."""
    if bounds is None and not causal and window is None:
        return None
    s = torch.arange(keys, device=device)
    last = torch.arange(rows, device=device)[:, None] + (keys - rows)
    seen = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (s <= last)
    if window is not None:
        seen = seen & (s > last - window)
    if bounds is not None:
        limits = bounds.view(-1, 1, rows, 2)
        seen = seen & (s >= limits[..., :1]) & (s <= limits[..., 1:])
    return seen


def _softmax(
    scores: Tensor, bounds: Tensor | None = None, *, causal: bool = False, window: int | None = None
) -> Tensor:
    seen = visible(scores.shape[2], scores.shape[3], bounds, causal, window, scores.device)
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)).exp_()
    total = scores.sum(-1, keepdim=True)
    return scores.div_(total.masked_fill_(total == 0, 1))


def _softmax_shape(scores: Type, bounds: Type | None = None, **attrs: object) -> Type | None:  # noqa: ARG001
    need(len(scores.shape) == 4, f"scores {list(scores.shape)}")
    _check_bounds(scores.shape[0], scores.shape[2], bounds)
    return same_as_first(scores)


@op(shape=_softmax_shape, flops=lambda n: 5 * n.type.count, in_place=_softmax)
def attn_softmax(
    scores: Tensor, bounds: Tensor | None = None, *, causal: bool = False, window: int | None = None
) -> Tensor:
    """Softmax over the keys each row may see          scores [B, H, T, S]"""
    return _softmax(scores.clone(), bounds, causal=causal, window=window)


def _mix_shape(weights: Type, v: Type) -> Type:
    need(
        len(weights.shape) == len(v.shape) == 4
        and weights.shape[0] == v.shape[0]
        and weights.shape[3] == v.shape[1]
        and weights.shape[1] % v.shape[2] == 0,
        f"weights {list(weights.shape)}, v {list(v.shape)}",
    )
    need_floats(weights, v)
    return Type.contiguous(
        (weights.shape[0], weights.shape[2], weights.shape[1], v.shape[3]), v.dtype
    )


@op(shape=_mix_shape, flops=lambda n: 2 * n.type.count * n.inputs[0].shape[-1])  # type: ignore[union-attr]
def attn_mix(weights: Tensor, v: Tensor) -> Tensor:
    """weights v

    weights [B, H, T, S], v [B, S, G, V] -> [B, T, H, V], contiguous, in v's type
    """
    batch, heads, rows, keys = weights.shape
    groups = v.shape[2]
    grouped = weights.to(v.dtype).reshape(batch, groups, heads // groups * rows, keys)
    mixed = (grouped @ v.transpose(1, 2)).view(batch, heads, rows, v.shape[3])
    return mixed.transpose(1, 2).contiguous()


def _channels_shape(q: Type, k: Type, v: Type, *, scale: float) -> Type:  # noqa: ARG001
    need(len(q.shape) == 4 and q.shape == k.shape == v.shape, f"q {q}, k {k}, v {v}")
    need_floats(q, k, v)
    need(q.dtype == k.dtype == v.dtype, f"q is {q}, k {k}, v {v}: of several types")
    return Type.contiguous(q.shape, q.dtype)


@op(shape=_channels_shape, flops=lambda n: 4 * n.type.count * n.type.shape[3])
def channel_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention of channels to each other, within each group: softmax(q^T k * scale) v^T, turned
    back (arXiv:2204.03645)

    q, k, v [B, T, G, K] -> [B, T, G, K], contiguous
    """
    scores = (q.permute(0, 2, 3, 1) @ k.transpose(1, 2)).float().mul_(scale)
    weights = torch.softmax(scores, -1).to(v.dtype)  # of every channel there is a score
    return (v.transpose(1, 2) @ weights.transpose(2, 3)).transpose(1, 2).contiguous()


def _paged_shape(
    q: Type,
    cache: Type,
    pages: Type,
    bounds: Type,
    starts: Type,
    table: Type | None = None,
    q_norm: Type | None = None,
    *,
    size: int,
    scale: float,  # noqa: ARG001
    softcap: float | None = None,  # noqa: ARG001
    eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
    quant: str | None = None,
) -> Type:
    need_floats(q, table, q_norm)
    need(pairs in PAIRS, f"pairs {pairs!r}, expected one of {', '.join(PAIRS)}")
    need_positions(pages)
    need_positions(starts)
    need(
        len(q.shape) == len(cache.shape) == 4
        and q.shape[0] == 1
        and q.shape[2] % cache.shape[2] == 0,
        f"q {q}, cache {cache}",
    )
    need_cache(cache, cache.shape[2], q.shape[3], quant)
    need(cache.shape[1] % size == 0, f"cache {list(cache.shape)} in pages of {size}")
    need(starts.shape[0] > 1, f"starts {list(starts.shape)}: of no sequence")
    _check_bounds(1, q.shape[1], bounds)
    need(bounds.shape == (q.shape[1], 2), f"bounds {list(bounds.shape)}")
    need(
        table is None
        or (
            len(table.shape) == 3
            and table.shape[:2] == (q.shape[1], 2)
            and 2 * table.shape[2] <= q.shape[3]
            and table.shape[2] % parts == 0
            and (parts == 1 or 2 * table.shape[2] == q.shape[3])
        ),
        f"q {q} in {parts} parts, table {table}",
    )
    need(
        q_norm is None or (eps is not None and q_norm.shape == q.shape[3:]),
        f"q {q}, norm {q_norm} with eps {eps}",
    )
    return Type.contiguous(q.shape, q.dtype)


def _paged_keys(node: Node) -> int:
    """The most keys that a token sees: all of the table, or the window that its bounds have."""
    _, _, pages, bounds = node.inputs[:4]
    assert pages is not None and bounds is not None
    rows: int = pages.shape[0] * int(node.attrs["size"])
    window = bounds.attrs.get("window")
    return rows if window is None else min(rows, int(window))


def _paged_flops(node: Node) -> int:
    return 4 * node.type.count * _paged_keys(node)


def _paged_traffic(node: Node) -> int:
    """q and the result, and the keys and values of the table's pages once; under a window, what
    each sequence sees of them.
    """
    q, cache, pages, _, starts = node.inputs[:5]
    assert q is not None and cache is not None and pages is not None and starts is not None
    seen = _paged_keys(node) + -(-q.shape[1] // (starts.shape[0] - 1))
    rows = min(pages.shape[0] * int(node.attrs["size"]), seen * (starts.shape[0] - 1))
    return q.type.bytes + node.type.bytes + rows * cache.type.bytes // cache.shape[1]


def _paged_workspace(node: Node) -> int:
    """Keys and values gathered, and in fp32 where they were quantized, scores in fp32 and again in
    other types, which keys each row sees, and q normed and turned, in fp32.
    """
    q, cache, pages = node.inputs[:3]
    assert q is not None and cache is not None and pages is not None
    rows = pages.shape[0] * int(node.attrs["size"])
    gathered = 2 * rows * cache.shape[2] * cache.shape[3] * cache.dtype.itemsize
    if cache.dtype != q.dtype:
        gathered += 6 * rows * cache.shape[2] * (q.shape[3] + BLOCK) * 4
    scores = q.shape[1] * q.shape[2] * rows
    return 2 * gathered + 16 * scores + 8 * q.shape[1] * rows + 32 * q.type.count


@op(shape=_paged_shape, flops=_paged_flops, traffic=_paged_traffic, workspace=_paged_workspace)
def paged_attention(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    bounds: Tensor,
    starts: Tensor,  # noqa: ARG001 - kernels ask for it, to keep sequences apart
    table: Tensor | None = None,
    q_norm: Tensor | None = None,
    *,
    size: int,
    scale: float,
    softcap: float | None = None,
    eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
    quant: str | None = None,
) -> Tensor:
    """`attention` of q to the keys and values of a cache's pages, one after another

    q [1, T, H, K], cache [2, S, G, K], pages [P], bounds int32 [T, 2] in rows of the P * size
    gathered, starts [sequences + 1] where each sequence begins among the tokens -> [1, T, H, K]

    Keys of a cache [1, S, G, K] are its values, too.

    With `eps` each head of q is RMS-normed first, by `q_norm` [K] or ones; with `table` [T, 2, R]
    it is turned then (`rope`). `quant` names the type of rows of a cache u8 [2, S, G, bytes of a
    head], or those of keys and of values of a cache [1, S, G, bytes of both] (`kv_rows`).
    """
    if eps is not None:
        q = rms_norm.reference(q, q_norm, eps=eps)
    if table is not None:
        q = rope.reference(q, table, pairs=pairs, parts=parts)
    head = q.shape[3] if quant else None
    keys, values = (
        gather_pages.reference(
            cache, pages, which=w, size=size, dtype=name_of(q.dtype), quant=quant, head=head
        )
        for w in (0, cached_parts(cache.shape[0], quant) - 1)
    )
    return attention.reference(q, keys, values, None, bounds, scale=scale, softcap=softcap)
