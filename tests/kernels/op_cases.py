"""Random inputs for every op: what the tests of shapes, of overwriting and of backends draw from."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS

SIZES = (1, 2, 3, 5, 7, 13, 17, 31, 33)  # awkward on purpose


@dataclass
class Draw:
    """A source of random sizes and values in one dtype. `strided`: operands lie spread out in memory, NaN between them."""
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

    def places(self, count: int, below: int) -> Tensor:
        """int64 [count], all different, in any order."""
        return torch.tensor(self.rng.sample(range(below), count), dtype=torch.int64)

    def lay(self, tensor: Tensor) -> Tensor:
        """The same values under other strides: dimensions in another order in memory, every other element unused."""
        if not self.strided or not tensor.ndim:
            return tensor
        order = self.rng.sample(range(tensor.ndim), tensor.ndim)
        step = self.rng.choice((1, 2))
        buffer = torch.full([tensor.shape[d] * (step if d == order[-1] else 1) for d in order], torch.nan, dtype=tensor.dtype)
        back = [order.index(d) for d in range(tensor.ndim)]
        spread = buffer[..., ::step].permute(back)
        return spread.copy_(tensor)


Case = tuple[list[Tensor | None], dict[str, Any]]


def _add(d: Draw) -> Case:
    shape = [d.batch(), d.size(), d.size()]
    other = shape[d.rng.randint(0, 2):]
    return [d.values(*shape), d.values(*(1 if d.rng.random() < 0.2 else n for n in other))], {}


def _gelu(d: Draw) -> Case:
    return [d.values(d.batch(), d.size(), d.size())], {"approximate": d.rng.choice(("none", "tanh"))}


def _gelu_mul(d: Draw) -> Case:
    shape = d.batch(), d.size(), d.size()
    return [d.values(*shape), d.values(*shape)], {"approximate": d.rng.choice(("none", "tanh"))}


def _softcap(d: Draw) -> Case:
    return [d.values(d.batch(), d.size())], {"cap": d.rng.choice((1.5, 30.0))}


def _matmul(d: Draw) -> Case:
    inner, outer = d.size(), d.size()
    lead = [d.batch(), d.size()][d.rng.randint(0, 1):]
    return [d.values(*lead, inner), d.values(outer, inner), d.values(outer) if d.maybe() else None], {}


def _rms_norm(d: Draw) -> Case:
    width = d.size()
    return [d.values(d.batch(), d.size(), width), d.values(width, dtype=torch.float32)], {"eps": 1e-6}


def _layer_norm(d: Draw) -> Case:
    width = d.size(2, 3, 7, 33)
    return [d.values(d.batch(), d.size(), width), d.values(width), d.values(width)], {"eps": 1e-6}


def _heads(d: Draw) -> tuple[int, int, int, int, int]:
    groups = d.size(1, 2, 3)
    return d.batch(), d.size(1, 2, 7, 33, 65), d.size(1, 3, 17, 64), groups * d.size(1, 2, 4), groups


def _mask(d: Draw, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    if d.maybe():
        return None
    shape = d.rng.choice(((rows, keys), (heads, rows, keys), (1, rows, keys), (batch, heads, rows, keys), (batch, 1, rows, keys),
                          (1, heads, rows, keys), (1, 1, rows, keys)))
    mask = d.values(*shape, dtype=d.rng.choice((d.dtype, torch.float32)))
    return mask.masked_fill_(torch.rand(shape, generator=torch.Generator().manual_seed(d.rng.getrandbits(32))) < 0.2, -torch.inf)


def _bounds(d: Draw, batch: int, rows: int, keys: int) -> Tensor | None:
    if d.maybe():
        return None
    lead = d.rng.choice(((rows,), (batch, rows)))
    generator = torch.Generator().manual_seed(d.rng.getrandbits(32))
    return torch.randint(-2, keys + 2, (*lead, 2), generator=generator).sort(-1).values.int()  # first <= last, at times out of range


def _limits(d: Draw, keys: int) -> dict[str, Any]:
    return {"causal": d.maybe(), "window": d.rng.choice((None, 1, 3, keys))}


def _attention(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    width = d.size(8, 18, 24)
    value = width if d.rng.random() < 0.7 else d.size(4, 9)
    inputs: list[Tensor | None] = [d.values(batch, rows, heads, width), d.values(batch, keys, groups, width),
                                   d.values(batch, keys, groups, value), _mask(d, batch, heads, rows, keys), _bounds(d, batch, rows, keys)]
    return inputs, {"scale": width**-0.5, "softcap": d.rng.choice((None, None, 2.0)), **_limits(d, keys)}


def _attn_scores(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    width = d.size()
    return ([d.values(batch, rows, heads, width), d.values(batch, keys, groups, width), _mask(d, batch, heads, rows, keys)],
            {"scale": 0.3, "softcap": d.rng.choice((None, 2.0))})


def _attn_softmax(d: Draw) -> Case:
    batch, rows, keys, heads, _ = _heads(d)
    return [d.values(batch, heads, rows, keys, dtype=torch.float32), _bounds(d, batch, rows, keys)], _limits(d, keys)


def _attn_mix(d: Draw) -> Case:
    batch, rows, keys, heads, groups = _heads(d)
    return [d.values(batch, heads, rows, keys, dtype=torch.float32), d.values(batch, keys, groups, d.size())], {}


def _rope(d: Draw) -> Case:
    tokens = d.size()
    positions = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(1))
    return ([d.values(tokens, d.size(1, 2, 5), d.size(2, 8, 18)), positions],
            {"base": d.rng.choice((1e4, 1e6)), "factor": d.rng.choice((1.0, 8.0))})


def _patch_embed(d: Draw) -> Case:
    size, width = d.size(1, 2, 7), d.size()
    return [d.values(d.batch(), 3, size * d.size(1, 2, 3), size * d.size(1, 2, 5)), d.values(width, 3, size, size),
            d.values(width) if d.maybe() else None], {}


def _pool2d(d: Draw) -> Case:
    kernel, rows, columns = d.size(1, 2, 3), d.size(1, 2, 3), d.size(1, 2, 5)
    return [d.values(d.batch(), rows * columns * kernel**2, d.size())], {"grid": (rows * kernel, columns * kernel), "kernel": kernel}


def _embed(d: Draw) -> Case:
    rows = d.size()
    return ([torch.randint(0, rows, (d.size(),), generator=torch.Generator().manual_seed(1)), d.values(rows, d.size())],
            {"scale": d.rng.choice((1.0, 33.94112549695428))})


def _place_rows(d: Draw) -> Case:
    rows, width = d.size(), d.size()
    count = d.rng.randint(0, rows)
    return [d.values(rows, width), d.values(count, width, dtype=d.rng.choice((d.dtype, torch.float32))), d.places(count, rows)], {}


def _take_rows(d: Draw) -> Case:
    rows = d.size()
    return [d.values(rows, d.size()), d.places(d.rng.randint(0, rows), rows)], {}


def _kv_store(d: Draw) -> Case:
    slots, groups, width = d.size(), d.size(1, 3), d.size()
    tokens = d.rng.randint(1, slots)
    k, v = d.values(tokens, groups, width), d.values(tokens, groups, width)
    return [d.values(2, slots, groups, width), k, v, d.places(tokens, slots)], {}


def _kv_half(d: Draw) -> Case:
    return [d.values(2, d.size(), d.size(1, 3), d.size())], {"which": d.rng.randint(0, 1)}


def _reshape(d: Draw) -> Case:
    batch, rows, heads, width = d.batch(), d.size(), d.size(1, 2, 3), d.size()
    shape = d.rng.choice(((batch, rows, heads * width), (batch * rows, heads, width), (batch, -1), (1, batch * rows, heads, width)))
    return [d.values(batch, rows, heads, width)], {"shape": shape}


MAKERS: dict[str, Callable[[Draw], Case]] = {
    "add": _add, "attention": _attention, "attn_mix": _attn_mix, "attn_scores": _attn_scores, "attn_softmax": _attn_softmax,
    "embed": _embed, "gelu": _gelu, "gelu_mul": _gelu_mul, "kv_half": _kv_half, "kv_store": _kv_store, "layer_norm": _layer_norm,
    "matmul": _matmul, "patch_embed": _patch_embed, "place_rows": _place_rows, "pool2d": _pool2d, "reshape": _reshape,
    "rms_norm": _rms_norm, "rope": _rope, "softcap": _softcap, "take_rows": _take_rows,
}


def draw(op: str, seed: int, dtype: torch.dtype = torch.float32, strided: bool = False) -> Case:
    """Operands and attributes of one random case."""
    return MAKERS[op](Draw(Random(f"{op} {seed}"), dtype, strided))


def node_of(op: str, inputs: list[Tensor | None], attrs: dict[str, Any]) -> Node:
    """The op on graph inputs that have exactly these tensors' types."""
    leaves = [None if t is None else Node("input", (), Type.of(t), {}, f"in{i}") for i, t in enumerate(inputs)]
    return OPS[op](*leaves, name=f"{op}.case", **attrs)


def copies(inputs: list[Tensor | None]) -> list[Tensor | None]:
    """The operands again, with the same strides, in memory of their own."""
    return [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in inputs]
