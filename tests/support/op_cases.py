"""Random inputs for every op: what the tests of shapes, of overwriting and of backends draw
from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.checkpoint.rotary import Rotary, rotary
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.quant_matmul.cases import KINDS, random_blocks
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS, rope_table
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize
from mtmd.kernels.quantization.kv_rows import CACHE_TYPES, CODED, cached_parts, quantize_cache

SIZES = (1, 2, 3, 5, 7, 13, 17, 31, 33)  # awkward on purpose


@dataclass
class Draw:
    """A source of random sizes and values in one dtype. `strided`: operands lie spread out in
    memory, NaN between them.
    """

    rng: Random
    dtype: torch.dtype
    strided: bool

    def size(self, *among: int) -> int:
        return self.rng.choice(among or SIZES)

    def batch(self) -> int:
        return self.rng.randint(1, 5)

    def maybe(self) -> bool:
        return self.rng.random() < 0.5

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        return self.lay(torch.randn(shape, generator=generator).to(dtype or self.dtype))

    def locations(self, count: int, below: int) -> Tensor:
        """int64 [count], all different, in any order."""
        return torch.tensor(self.rng.sample(range(below), count), dtype=torch.int64)

    def blocks(self, rows: int) -> tuple[str, Tensor]:
        """A block type and so many rows of one to three blocks; never strided, for a weight is kept
        as it was read.
        """
        kind = self.rng.choice(KINDS)
        return kind, random_blocks(
            kind, rows, self.rng.randint(1, 3) * BLOCKS[kind].values, self.rng.getrandbits(32)
        )

    def lay(self, tensor: Tensor) -> Tensor:
        """The same values under other strides: dimensions in another order in memory, every other
        element unused.
        """
        if not self.strided or not tensor.ndim:
            return tensor
        order = self.rng.sample(range(tensor.ndim), tensor.ndim)
        step = self.rng.choice((1, 2))
        buffer = torch.full(
            [tensor.shape[d] * (step if d == order[-1] else 1) for d in order],
            torch.nan,
            dtype=tensor.dtype,
        )
        back = [order.index(d) for d in range(tensor.ndim)]
        spread = buffer[..., ::step].permute(back)
        return spread.copy_(tensor)


Case = tuple[list[Tensor | None], dict[str, Any]]


def _add(d: Draw) -> Case:
    shape = [d.batch(), d.size(), d.size()]
    other = shape[d.rng.randint(0, 2) :]
    return [d.values(*shape), d.values(*(1 if d.rng.random() < 0.2 else n for n in other))], {}


def _one(d: Draw) -> Case:
    return [d.values(d.batch(), d.size(), d.size())], {}


def _two(d: Draw) -> Case:
    """Each by itself, or both out of one projection."""
    rows, columns, width = d.batch(), d.size(), d.size()
    if d.maybe():
        return [*d.values(rows, columns, 2 * width).split(width, -1)], {}
    return [d.values(rows, columns, width), d.values(rows, columns, width)], {}


def _scale(d: Draw) -> Case:
    return [d.values(d.batch(), d.size())], {
        "factor": d.rng.choice((0.5, 3.0)),
        "offset": d.rng.choice((0.0, -1.0)),
    }


def _clamp(d: Draw) -> Case:
    return [
        d.values(d.batch(), d.size()),
        *(torch.tensor([limit], dtype=d.dtype) for limit in (-0.5, 0.7)),
    ], {}


def _cast(d: Draw) -> Case:
    return [d.values(d.batch(), d.size())], {"dtype": d.rng.choice((torch.float32, torch.bfloat16))}


def _gelu(d: Draw) -> Case:
    return [d.values(d.batch(), d.size(), d.size())], {
        "approximate": d.rng.choice(("none", "tanh", "quick"))
    }


def _gelu_mul(d: Draw) -> Case:
    return _two(d)[0], {"approximate": d.rng.choice(("none", "tanh", "quick"))}


def _softcap(d: Draw) -> Case:
    return [d.values(d.batch(), d.size())], {"cap": d.rng.choice((1.5, 30.0))}


def _matmul(d: Draw) -> Case:
    inner, outer = d.size(), d.size()
    lead = [d.batch(), d.size()][d.rng.randint(0, 1) :]
    if d.maybe():
        kind, w = d.blocks(outer)
        inner = w.shape[1] // BLOCKS[kind].bytes * BLOCKS[kind].values
        return [d.values(*lead, inner), w, d.values(outer) if d.maybe() else None], {"quant": kind}
    return [
        d.values(*lead, inner),
        d.values(outer, inner),
        d.values(outer) if d.maybe() else None,
    ], {}


def _head_matmul(d: Draw) -> Case:
    heads, inner, outer, turned = d.size(1, 2, 3, 7), d.size(), d.size(), d.maybe()
    x = d.values(d.size(), d.rng.choice((1, heads)), inner)
    if not turned and d.maybe():
        kind, w = d.blocks(heads * outer)
        inner = w.shape[1] // BLOCKS[kind].bytes * BLOCKS[kind].values
        x = d.values(d.size(), heads, inner)
        return [x, w.view(heads, outer, -1)], {"quant": kind}
    w = d.values(heads, inner, outer) if turned else d.values(heads, outer, inner)
    return [x, w], {"turned": turned}


def _lora(d: Draw) -> Case:
    inner, outer, rank = d.size(), d.size(), d.size()
    lead = [d.batch(), d.size()][d.rng.randint(0, 1) :]
    rows = [size if d.maybe() else 1 for size in lead]
    scale = d.values(*rows, 1, dtype=torch.float32)
    x, a, b = d.values(*lead, inner), d.values(rank, inner), d.values(outer, rank)
    return [d.values(*lead, outer), x, a, b, scale], {}


def _rms_norm(d: Draw) -> Case:
    width = d.size()
    return [
        d.values(d.batch(), d.size(), width),
        d.values(width, dtype=torch.float32) if d.maybe() else None,
    ], {"eps": 1e-6}


def _layer_norm(d: Draw) -> Case:
    width = d.size(2, 3, 7, 33)
    return [
        d.values(d.batch(), d.size(), width),
        d.values(width),
        d.values(width) if d.maybe() else None,
    ], {"eps": 1e-6}


def _heads(d: Draw) -> tuple[int, int, int, int, int]:
    groups = d.size(1, 2, 3)
    return (
        d.batch(),
        d.size(1, 2, 7, 33, 65),
        d.size(1, 3, 17, 64),
        groups * d.size(1, 2, 4),
        groups,
    )


def _mask(d: Draw, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    if d.maybe():
        return None
    shape = d.rng.choice(
        (
            (rows, keys),
            (heads, rows, keys),
            (1, rows, keys),
            (batch, heads, rows, keys),
            (batch, 1, rows, keys),
            (1, heads, rows, keys),
            (1, 1, rows, keys),
        )
    )
    mask = d.values(*shape, dtype=d.rng.choice((d.dtype, torch.float32)))
    return mask.masked_fill_(
        torch.rand(shape, generator=torch.Generator().manual_seed(d.rng.getrandbits(32))) < 0.2,
        -torch.inf,
    )


def _bounds(d: Draw, batch: int, rows: int, keys: int) -> Tensor | None:
    if d.maybe():
        return None
    lead = d.rng.choice(((rows,), (batch, rows)))
    generator = torch.Generator().manual_seed(d.rng.getrandbits(32))
    return (
        torch.randint(-2, keys + 2, (*lead, 2), generator=generator).sort(-1).values.int()
    )  # first <= last, at times out of range


def _limits(d: Draw, keys: int) -> dict[str, Any]:
    return {"causal": d.maybe(), "window": d.rng.choice((None, 1, 3, keys))}


def _attention(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    width = d.size(8, 18, 24)
    value = width if d.rng.random() < 0.7 else d.size(4, 9)
    inputs: list[Tensor | None] = [
        d.values(batch, rows, heads, width),
        d.values(batch, keys, groups, width),
        d.values(batch, keys, groups, value),
        _mask(d, batch, heads, rows, keys),
        _bounds(d, batch, rows, keys),
    ]
    return inputs, {
        "scale": width**-0.5,
        "softcap": d.rng.choice((None, None, 2.0)),
        "mask_capped": d.maybe(),
        **_limits(d, keys),
    }


def _attn_scores(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    width = d.size()
    return (
        [
            d.values(batch, rows, heads, width),
            d.values(batch, keys, groups, width),
            _mask(d, batch, heads, rows, keys),
        ],
        {"scale": 0.3, "softcap": d.rng.choice((None, 2.0)), "mask_capped": d.maybe()},
    )


def _attn_softmax(d: Draw) -> Case:
    batch, rows, keys, heads, _ = _heads(d)
    return [
        d.values(batch, heads, rows, keys, dtype=torch.float32),
        _bounds(d, batch, rows, keys),
    ], _limits(d, keys)


def _attn_mix(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    return [
        d.values(batch, heads, rows, keys, dtype=torch.float32),
        d.values(batch, keys, groups, d.size()),
    ], {}


def _rotary(d: Draw, pairs: int) -> Rotary:
    result = rotary(d.rng.choice((1e4, 1e6)), 2 * pairs)
    return result.by_axes([d.rng.randint(0, 2) for _ in range(pairs)]) if d.maybe() else result


def _rope_table(d: Draw) -> Case:
    positions, pairs = (
        torch.randint(0, 5000, (3, d.size()), generator=torch.Generator().manual_seed(1)),
        d.size(1, 4, 9),
    )
    divisors = (
        1 + torch.rand(pairs, generator=torch.Generator().manual_seed(2)) if d.maybe() else None
    )
    return [positions, divisors], {"rotary": _rotary(d, pairs)}


def _rope(d: Draw) -> Case:
    tokens, parts = d.size(), d.size(1, 1, 2)
    pairs = parts * d.size(1, 4, 9)
    positions = torch.randint(0, 5000, (3, tokens), generator=torch.Generator().manual_seed(1))
    lead = [d.batch()] if d.maybe() else []
    width = 2 * pairs + (0 if parts > 1 else d.size(0, 0, 3))
    return (
        [
            d.values(*lead, tokens, d.size(1, 2, 5), width),
            rope_table.reference(positions, rotary=_rotary(d, pairs)),
        ],
        {"pairs": d.rng.choice(("half", "adjacent")), "parts": parts},
    )


def _add_norm(d: Draw) -> Case:
    shape, normed = (*([d.batch()] if d.maybe() else []), d.size(), d.size()), d.maybe()
    return [
        d.values(*shape),
        d.values(*shape),
        d.values(shape[-1], dtype=torch.float32),
        d.values(shape[-1], dtype=torch.float32) if normed else None,
    ], {"eps": 1e-6, "y_eps": 1e-5 if normed else None}


def _add_layer_norm(d: Draw) -> Case:
    shape = (*([d.batch()] if d.maybe() else []), d.size(), d.size())
    return [
        d.values(*shape),
        d.values(*shape),
        d.values(shape[-1]),
        d.values(shape[-1]) if d.maybe() else None,
        d.values(shape[-1]) if d.maybe() else None,
    ], {"eps": 1e-5}


def _sigmoid_gate(d: Draw) -> Case:
    shape = (*([d.batch()] if d.maybe() else []), d.size(), d.size())
    gate = d.values(*shape) if d.maybe() else d.values(*shape[:-1], 1)
    return [d.values(*shape), gate, d.values(*shape) if d.maybe() else None], {}


def _gated_norm(d: Draw) -> Case:
    tokens, heads, width = d.size(), d.size(), d.size()
    gate = d.values(tokens, heads * width).unflatten(1, (heads, width))
    x = d.values(tokens, heads, width, dtype=torch.float32)
    return [x, d.values(width, dtype=torch.float32), gate], {"eps": 1e-6}


def _delta_gates(d: Draw) -> Case:
    tokens, heads = d.size(), d.size()
    dt, a = (d.values(heads, dtype=torch.float32) for _ in "da")
    return [d.values(tokens, heads), dt, a, d.values(tokens, heads) if d.maybe() else None], {}


def _half(d: Draw) -> Case:
    return [d.values(2, d.size(), d.size())], {"which": d.rng.randint(0, 1)}


def _rope_columns(d: Draw) -> Case:
    pairs, heads, before = d.size(1, 4, 12), d.size(1, 2, 3), d.size(1, 2) - 1
    head, tokens = 2 * pairs + d.size(1, 2, 3) - 1, d.size()
    width = (before + heads) * head + d.size()
    table = rope_table.reference(torch.arange(tokens).expand(3, -1) * 37, rotary=_rotary(d, pairs))
    x = d.values(*([d.batch()] if d.maybe() else []), tokens, width)
    start = before * head
    attrs = {"start": start, "stop": start + heads * head, "head": head}
    return [x, table], attrs | {"pairs": d.rng.choice(("half", "adjacent"))}


def _rope_store(d: Draw) -> Case:
    (cache, k, v, slots), how = _kv_store(d)
    assert cache is not None and k is not None and v is not None
    width = k.shape[-1] + k.shape[-1] % 2  # even, for whole pairs
    halves = cached_parts(cache.shape[0], how.get("quant"))
    cache, k, v = (
        d.values(*shape, width) for shape in ((halves, *cache.shape[1:3]), k.shape[:2], v.shape[:2])
    )
    cache = quantize_cache(cache, how["quant"]) if how else cache
    pairs, eps = d.rng.randint(1, width // 2), d.rng.choice((None, 1e-6))
    table = rope_table.reference(torch.arange(len(k)).expand(3, -1) * 37, rotary=_rotary(d, pairs))
    norm = d.values(width, dtype=torch.float32) if eps and d.maybe() else None
    return [cache, k, v, slots, table, norm], {
        "eps": eps,
        "v_eps": d.rng.choice((None, 1e-5)),
        "pairs": d.rng.choice(("half", "adjacent")),
        **how,
    }


def _matmul_gelu(d: Draw) -> Case:
    attrs: dict[str, Any] = {"approximate": d.rng.choice(("none", "tanh", "quick"))}
    return _activated(d, d.size(), attrs)


def _matmul_gated(d: Draw) -> Case:
    return _activated(d, 2 * d.size(), {"act": d.rng.choice(("silu", "none", "tanh", "quick"))})


def _activated(d: Draw, outer: int, attrs: dict[str, Any]) -> Case:
    width = d.size()
    lead = [d.batch()] if d.maybe() else []
    bias = d.values(outer) if d.maybe() else None
    if d.maybe():
        kind, w = d.blocks(outer)
        width = w.shape[1] // BLOCKS[kind].bytes * BLOCKS[kind].values
        x = d.values(*lead, d.size(), width).mul_(_scale_to_one(width, (w, kind)))
        return [x, w, bias], attrs | {"quant": kind}
    return [d.values(*lead, d.size(), width), d.values(outer, width).mul_(0.2), bias], attrs


def _scale_to_one(width: int, *weights: tuple[Tensor, str]) -> float:
    """What to multiply normal values by for their products with these blocks to be about 1, on the
    geometric mean. The weights of one type are a thousand times those of another, and gated units
    are products of two: in fp16 they would overflow, or lie below 2^-14, where it has fewer bits
    and NMSE tells nothing.
    """
    sizes = [float(dequantize(w, kind).square().mean().sqrt()) for w, kind in weights]
    return float(prod(sizes) ** (-1 / len(sizes)) * width**-0.5)


def _patch_embed(d: Draw) -> Case:
    size, width = d.size(1, 2, 7), d.size()
    return [
        d.values(d.batch(), 3, size * d.size(1, 2, 3), size * d.size(1, 2, 5)),
        d.values(width, 3, size, size),
        d.values(width) if d.maybe() else None,
    ], {}


def _pool2d(d: Draw) -> Case:
    kernel, size, uneven = d.size(1, 2, 3), (d.size(1, 2, 3), d.size(1, 2, 5)), d.maybe()
    grid = size[0] * kernel + uneven, size[1] * kernel
    return [d.values(d.batch(), grid[0] * grid[1], d.size())], {"grid": grid, "size": size}


def _conv2d(d: Draw) -> Case:
    grid = d.size(1, 1, 6), d.size(2, 5, 7)
    kernel = d.size(1, 2, 3) if grid[0] > 1 else 1, d.size(1, 2, 3)
    stride = d.size(1, 1, 2), d.size(1, 2, 3)
    padding = *(d.size(0, 1) for _ in "tb"), *(d.size(1, 2) for _ in "lr")
    groups = d.size(1, 1, 2, 5)
    inner, outer = d.rng.choice(((1, 1), (1, 2), (3, 1), (4, 7)))
    if groups == 1:
        inner, outer = d.size(), d.size()
    return [
        d.values(d.batch(), grid[0] * grid[1], groups * inner),
        d.values(groups * outer, inner, *kernel),
        d.values(groups * outer) if d.maybe() else None,
    ], {"grid": grid, "stride": stride, "padding": padding, "groups": groups}


def _channel_attention(d: Draw) -> Case:
    shape = d.batch(), d.size(), d.size(1, 2, 5), d.size(1, 3, 8)
    return [d.values(*shape) for _ in "qkv"], {"scale": shape[1] ** -0.5}


def _windows(d: Draw) -> Case:
    grid, size = (d.size(1, 3, 5), d.size(2, 3, 6)), d.size(1, 2, 3)
    return [d.values(d.batch(), grid[0] * grid[1], d.size())], {"grid": grid, "size": size}


def _from_windows(d: Draw) -> Case:
    grid, size = (d.size(1, 3, 5), d.size(2, 3, 6)), d.size(1, 2, 6)
    count = d.batch() * -(-grid[0] // size) * -(-grid[1] // size)
    return [d.values(count, size * size, d.size())], {"grid": grid, "size": size}


def _relative_keys(d: Draw) -> Case:
    grid, rows = (d.size(1, 2, 3), d.size(1, 2, 5)), d.maybe()
    heads, width = d.size(1, 2, 5), d.size(1, 3, 8)
    count = grid[0] * grid[1] - (0 if rows else d.rng.randrange(grid[1]))
    return [d.values(d.batch(), count, heads, width)], {"grid": grid, "rows": rows}


def _relative_queries(d: Draw) -> Case:
    (q,), attrs = _relative_keys(d)
    assert q is not None
    tables: list[torch.Tensor | None] = []
    for i, size in enumerate(attrs["grid"]):
        if i == 0 and not attrs["rows"]:
            tables.append(None)
        elif d.maybe():  # of each head
            tables.append(d.values(2 * size - 1, *q.shape[2:]))
        else:
            tables.append(d.values(2 * d.size(size, size + 2) - 1, q.shape[3]))
    return [q, *tables], {"grid": attrs["grid"], "scale": d.rng.choice((0.125, 0.3))}


def _patches(d: Draw) -> Case:
    size, rows, columns = d.size(1, 2, 4), d.size(1, 2, 3), d.size(1, 2, 3)
    return [d.values(d.batch(), 3, rows * size, columns * size)], {"size": size}


def _unshuffle(d: Draw) -> Case:
    batch, factor = d.batch(), d.size(1, 2, 3)
    grid = tuple(d.size(1, 2, 5) * factor + d.rng.randrange(factor) for _ in range(2))
    return (
        [d.values(batch, grid[0] * grid[1], d.size())],
        {"grid": grid, "factor": factor, "channels_first": d.maybe()},
    )


def _resize2d(d: Draw) -> Case:
    grid, mode = (d.size(1, 2, 5), d.size(1, 3, 7)), d.rng.choice(("bilinear", "bicubic"))
    more = d.rng.choice(({}, {"align_corners": True}, {"antialias": True}))
    return [d.values(grid[0] * grid[1], d.size())], {
        "grid": grid,
        "size": (d.size(1, 2, 9), d.size(1, 4, 6)),
        "mode": mode,
        **more,
    }


def _concat(d: Draw) -> Case:
    shape, axis = [d.batch(), d.size(), d.size()], d.rng.randint(0, 2)
    other = [d.size() if i == axis else n for i, n in enumerate(shape)]
    return [d.values(*shape), d.values(*other)], {"axis": axis}


def _prepend(d: Draw) -> Case:
    width = d.size()
    return [d.values(d.batch(), d.size(), width), d.values(width)], {}


def _embed(d: Draw) -> Case:
    rows, scale = d.size(), d.rng.choice((1.0, 33.94112549695428))
    tokens = torch.randint(0, rows, (d.size(),), generator=torch.Generator().manual_seed(1))
    if d.maybe():
        kind, table = d.blocks(rows)
        return [tokens, table], {"scale": scale, "quant": kind, "dtype": name_of(d.dtype)}
    return [tokens, d.values(rows, d.size())], {"scale": scale}


@dataclass(frozen=True)
class Alone:
    """A group whose other ranks have what this one has."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        return x.mul_(self.size)

    def gather(self, x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        assert set(sizes) == {x.shape[axis]}
        return torch.cat([x] * self.size, axis)


def _all_reduce(d: Draw) -> Case:
    return [d.values(d.batch(), d.size())], {"group": Alone(0, d.rng.randint(1, 3))}


def _all_gather(d: Draw) -> Case:
    shape, axis, ranks = (d.batch(), d.size()), d.rng.randint(0, 1), d.rng.randint(1, 3)
    group = Alone(d.rng.randrange(ranks), ranks)
    return [d.values(*shape)], {"group": group, "axis": axis, "sizes": (shape[axis],) * ranks}


def _part(d: Draw) -> Case:
    shape, axis = (d.batch() + 2, d.size() + 2), d.rng.randint(0, 1)
    size = shape[axis]
    ranges = ((0, 1), (size - 1, size)) if d.maybe() else ((1, size),)
    return [d.values(*shape)], {"axis": axis, "ranges": ranges}


def _without(d: Draw) -> Case:
    shape = d.batch(), d.size()
    return [d.values(*shape), d.values(*shape)], {}


def _embed_part(d: Draw) -> Case:
    operands, attrs = _embed(d)
    tokens, *rest = operands
    assert tokens is not None
    return [tokens + 3, *rest], attrs | {"first": d.rng.choice((0, 2, 3))}


def _location_rows(d: Draw) -> Case:
    rows, width = d.size(), d.size()
    count = d.rng.randint(0, rows)
    return [
        d.values(rows, width),
        d.values(count, width, dtype=d.rng.choice((d.dtype, torch.float32))),
        d.locations(count, rows),
    ], {}


def _take_rows(d: Draw) -> Case:
    rows = d.size()
    lead = [d.batch()] if d.maybe() else []
    return [d.values(*lead, rows, d.size()), d.locations(d.rng.randint(0, rows), rows)], {}


def _kv_store(d: Draw) -> Case:
    slots, groups, width = d.size(), d.size(1, 3), d.size()
    tokens = d.rng.randint(1, slots)
    k, v = d.values(tokens, groups, width), d.values(tokens, groups, width)
    cache, how = _stored(d, d.values(d.size(1, 2, 2), slots, groups, width))
    return [cache, k, v, d.locations(tokens, slots)], how


def _stored(d: Draw, cache: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A cache, every other time in quantized rows."""
    if d.maybe():
        return cache, {}
    kind = d.rng.choice(CACHE_TYPES if len(cache) == 2 else CODED)
    return quantize_cache(cache, kind), {"quant": kind}


def _gather_pages(d: Draw) -> Case:
    size, count = d.size(1, 2, 4), d.size(1, 2, 5)
    pages = torch.tensor([d.rng.randrange(count) for _ in range(d.size(1, 2, 7))])
    head = d.size()
    halves = d.size(1, 2, 2)
    cache, how = _stored(d, d.values(halves, count * size, d.size(1, 3), head))
    if how:
        how |= {"head": head, "dtype": name_of(d.dtype)}
    return [cache, pages], {"which": d.rng.randrange(halves), "size": size, **how}


def _paged_attention(d: Draw) -> Case:
    """A few sequences, each with pages of its own, and a table with pages that nobody sees."""
    size, groups, width = d.size(4, 16, 32), d.size(1, 2, 3), d.size(16, 18, 24, 40)
    new = [d.size(0, 1, 1, 1, 3, 17) for _ in range(d.size(1, 2, 5))] + [1]
    before = [d.size(0, 1, 15, 16, 70) for _ in new]
    counts = [-(-(b + n) // size) for b, n in zip(before, new, strict=True)]
    spare, window = d.size(0, 1, 4), d.rng.choice((None, None, 1, 7, 40))
    stored = sum(counts) + spare + 1
    bounds, base = [], 0
    for b, n, count in zip(before, new, counts, strict=True):
        for own in range(base + b, base + b + n):
            first = base if window is None else max(base, own - window + 1)
            bounds.append((first, base + b + n - 1 if d.maybe() else own))
        base += count * size
    pairs, eps = d.rng.choice((None, width // 2, 3)), d.rng.choice((None, 1e-6))
    table = (
        rope_table.reference(torch.arange(sum(new)).expand(3, -1) * 7, rotary=_rotary(d, pairs))
        if pairs
        else None
    )
    norm = d.values(width, dtype=torch.float32) if eps and d.maybe() else None
    cache, how = _stored(d, d.values(d.size(1, 2, 2), stored * size, groups, width))
    return [
        d.values(1, sum(new), groups * d.size(1, 2, 4), width),
        cache,
        d.locations(sum(counts) + spare, stored),
        torch.tensor(bounds, dtype=torch.int32),
        torch.tensor([0, *new]).cumsum(0),
        table,
        norm,
    ], {
        "size": size,
        "scale": width**-0.5,
        "softcap": d.rng.choice((None, None, 2.0)),
        "eps": eps,
        "pairs": d.rng.choice(("half", "adjacent")),
        **how,
    }


def _kv_half(d: Draw) -> Case:
    return [d.values(2, d.size(), d.size(1, 3), d.size())], {"which": d.rng.randint(0, 1)}


def _reshape(d: Draw) -> Case:
    batch, rows, heads, width = d.batch(), d.size(), d.size(1, 2, 3), d.size()
    shape = d.rng.choice(
        (
            (batch, rows, heads * width),
            (batch * rows, heads, width),
            (batch, -1),
            (1, batch * rows, heads, width),
        )
    )
    return [d.values(batch, rows, heads, width)], {"shape": shape}


def _rows(d: Draw) -> Case:
    x = d.values(*(d.batch() if i else d.size() for i in range(d.size(1, 2, 3))))
    start, stop = sorted(d.rng.sample(range(x.shape[0] + 1), 2))
    return [x], {"start": start, "stop": stop}


def _columns(d: Draw) -> Case:
    x = d.values(*(d.batch() for _ in range(d.size(0, 1, 2))), d.size())
    start, stop = sorted(d.rng.sample(range(x.shape[-1] + 1), 2))
    return [x], {"start": start, "stop": stop}


def _l2_norm(d: Draw) -> Case:
    return [d.values(d.batch(), d.size(), d.size())], {"eps": 1e-6}


def _match_magnitude(d: Draw) -> Case:
    tokens, rows, width = d.batch(), d.size(), d.size()
    given = d.values(tokens, 1 if d.maybe() else rows, width)
    return [d.values(tokens, rows, width), given], {"floor": d.rng.choice((1e-5, 1.0))}


def _gaussian_topk(d: Draw) -> Case:
    return [d.values(d.batch(), d.size(), d.size())], {"deviations": d.rng.choice((1.645, -0.5))}


def _cumulative_norm(d: Draw) -> Case:
    channels = d.size()
    x = d.values(d.batch(), d.size(), d.rng.randint(1, 4) * channels)
    return [x, d.values(channels)], {"eps": 1e-3}


def _add_mixed(d: Draw) -> Case:
    tokens, streams, made, width = d.batch(), d.batch(), d.batch(), d.size()
    shapes = (tokens, made, width), (tokens, streams, width), (tokens, made, streams)
    return [d.values(*shape) for shape in shapes], {}


def _altup(d: Draw) -> Case:
    tokens, streams, width, routed = d.batch(), d.batch(), d.size(), d.batch()
    corrects = d.maybe()
    shapes = (routed, width), (streams if corrects else streams**2, routed)
    y = d.values(tokens, width) if corrects else None
    norm = d.values(width, dtype=torch.float32)
    attrs = {"active": d.rng.randrange(streams), "eps": 1e-6, "scale": 0.5}
    return [d.values(tokens, streams, width), norm, *(d.values(*s) for s in shapes), y], attrs


def _laurel(d: Draw) -> Case:
    shape = (d.batch(), d.size())
    x, y, u, v = (d.values(*shape) for _ in "xyuv")
    y_norm, v_norm, w = (d.values(shape[1], dtype=torch.float32) for _ in "yvw")
    return [x, y, y_norm, u, v, v_norm, w], {"eps": 1e-6, "factor": 0.7}


def _sequences(d: Draw) -> tuple[int, int, Tensor, Tensor]:
    """Tokens, slots in the pool, starts and slots of a few sequences, some of them without
    tokens.
    """
    lengths = [d.size(0, 1, 1, 2, 5, 17, 40, 70) for _ in range(d.size(1, 2, 3, 5))]
    pool = len(lengths) + d.rng.randint(0, 2)
    return (
        sum(lengths),
        pool,
        torch.tensor([0, *lengths]).cumsum(0),
        d.locations(len(lengths), pool),
    )


def _short_conv(d: Draw) -> Case:
    tokens, pool, starts, slots = _sequences(d)
    channels, width = d.size(), d.size(2, 3, 4)
    return (
        [
            d.values(tokens, channels),
            d.values(channels, width),
            d.values(pool, width - 1, channels),
            starts,
            slots,
            d.values(channels) if d.maybe() else None,
        ],
        {"activation": d.rng.choice(("none", "silu"))},
    )


def _linear_attention(d: Draw) -> Case:
    tokens, pool, starts, slots = _sequences(d)
    groups, key, value = d.size(1, 2, 3), d.size(1, 3, 8, 24), d.size(1, 5, 16, 40)
    heads = groups * d.size(1, 2, 3)
    q, k = (
        F.normalize(d.values(tokens, groups, key).float(), dim=-1).to(d.dtype) for _ in range(2)
    )
    decay, beta = (d.values(tokens, heads, dtype=torch.float32) for _ in range(2))
    return (
        [
            d.lay(q),
            d.lay(k),
            d.values(tokens, heads, value),
            d.lay(-decay.square()),
            d.lay(beta.sigmoid()),
            d.values(pool, key, heads, value, dtype=torch.float32),
            starts,
            slots,
        ],
        {"scale": key**-0.5, "delta": d.maybe()},
    )


def _state_store(d: Draw) -> Case:
    pool, inner = d.size(), [d.size() for _ in range(d.size(1, 2, 3))]
    count = d.rng.randint(0, pool)
    return [
        d.values(pool, *inner),
        d.values(count * inner[0], *inner[1:]),
        d.locations(count, pool),
    ], {}


def _moe(d: Draw) -> Case:
    tokens, experts = d.size(), d.size(1, 2, 5, 8)
    grouped = {"groups": 2, "top_groups": d.rng.choice((1, 2))} if experts == 8 else {}
    routing = Routing(
        d.rng.randint(1, 4 if grouped else experts),
        d.maybe(),
        score=d.rng.choice(("softmax", "sigmoid")),
        eps=d.rng.choice((0.0, 1e-6)),
        scale=d.rng.choice((1.0, 2.5)),
        group_best=d.rng.choice((1, 2)),
        on_input=d.maybe(),
        **grouped,
    )
    attrs = {"routing": routing, "act": d.rng.choice(("silu", "gelu_tanh", "relu"))}
    router = d.values(tokens, experts, dtype=d.rng.choice((d.dtype, torch.float32)))
    shares: list[Tensor | None] = [
        d.lay(d.values(experts, dtype=torch.float32).sigmoid()) if d.maybe() else None,
        d.lay(d.values(experts, dtype=torch.float32)) if d.maybe() else None,
    ]
    if d.maybe():
        width, ffn = d.size(), d.size()
        return [
            d.values(tokens, width),
            router,
            d.values(experts, ffn, width),
            d.values(experts, ffn, width),
            d.values(experts, width, ffn),
            *shares,
        ], attrs
    kinds = {f"{part}_quant": d.rng.choice(KINDS) for part in ("gate", "up", "down")}
    seeds = [d.rng.getrandbits(32) for _ in kinds]
    tables = [
        random_blocks(kind, experts * 256, 256, seed).view(experts, 256, -1)
        for kind, seed in zip(kinds.values(), seeds, strict=True)
    ]
    gate_and_up = list(zip(tables, kinds.values(), strict=True))[:2]
    return [
        d.values(tokens, 256).mul_(_scale_to_one(256, *gate_and_up)),
        router,
        *tables,
        *shares,
    ], attrs | kinds


MAKERS: dict[str, Callable[[Draw], Case]] = {
    "add": _add,
    "add_layer_norm": _add_layer_norm,
    "add_norm": _add_norm,
    "add_rows": _location_rows,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "attention": _attention,
    "attn_mix": _attn_mix,
    "attn_scores": _attn_scores,
    "attn_softmax": _attn_softmax,
    "cast": _cast,
    "clamp": _clamp,
    "columns": _columns,
    "concat": _concat,
    "delta_gates": _delta_gates,
    "embed": _embed,
    "embed_part": _embed_part,
    "laurel": _laurel,
    "linear_attention": _linear_attention,
    "gated_norm": _gated_norm,
    "gather_pages": _gather_pages,
    "gelu": _gelu,
    "gelu_mul": _gelu_mul,
    "half": _half,
    "head_matmul": _head_matmul,
    "kv_half": _kv_half,
    "kv_store": _kv_store,
    "l2_norm": _l2_norm,
    "match_magnitude": _match_magnitude,
    "gaussian_topk": _gaussian_topk,
    "cumulative_norm": _cumulative_norm,
    "add_mixed": _add_mixed,
    "altup": _altup,
    "layer_norm": _layer_norm,
    "lora": _lora,
    "matmul": _matmul,
    "matmul_gated": _matmul_gated,
    "matmul_gelu": _matmul_gelu,
    "moe": _moe,
    "mul": _add,
    "paged_attention": _paged_attention,
    "part": _part,
    "channel_attention": _channel_attention,
    "conv2d": _conv2d,
    "patch_embed": _patch_embed,
    "place_rows": _location_rows,
    "pool2d": _pool2d,
    "prepend": _prepend,
    "from_windows": _from_windows,
    "relative_keys": _relative_keys,
    "relative_queries": _relative_queries,
    "relu": _one,
    "reshape": _reshape,
    "resize2d": _resize2d,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_columns": _rope_columns,
    "rope_store": _rope_store,
    "rope_table": _rope_table,
    "rows": _rows,
    "scale": _scale,
    "short_conv": _short_conv,
    "sigmoid": _one,
    "sigmoid_gate": _sigmoid_gate,
    "silu": _one,
    "silu_mul": _two,
    "softcap": _softcap,
    "softplus": _one,
    "state_store": _state_store,
    "take_rows": _take_rows,
    "patches": _patches,
    "unshuffle": _unshuffle,
    "windows": _windows,
    "without": _without,
}


def draw(op: str, seed: int, dtype: torch.dtype = torch.float32, strided: bool = False) -> Case:
    """Operands and attributes of one random case."""
    return MAKERS[op](Draw(Random(f"{op} {seed}"), dtype, strided))


def node_of(op: str, inputs: list[Tensor | None], attrs: dict[str, Any]) -> Node:
    """The op on graph inputs that have exactly these tensors' types."""
    leaves = [
        None if t is None else Node("input", (), Type.of(t), {}, f"in{i}")
        for i, t in enumerate(inputs)
    ]
    return OPS[op](*leaves, name=f"{op}.case", **attrs)


def copies(inputs: list[Tensor | None], device: str | None = None) -> list[Tensor | None]:
    """The operands again, with the same strides, in memory of their own, there or on a device."""
    return [
        None
        if t is None
        else torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, device=device or t.device
        ).copy_(t)
        for t in inputs
    ]
