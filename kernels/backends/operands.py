"""Operands that an op can be tried with: random numbers, and places, positions and bounds that lie
within its tables, spread out so that a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.quantization.kv_rows import cached_parts, quantize_cache

MAX_ROWS, MAX_KEYS, MAX_OUTPUTS = 64, 256, 256  # of attention, and of a weight
MAX_PAGES = 16
SPARE_STATES, SPARE_PAGES = 2, 3  # that no sequence of the batch has
# What each row of the result takes of its own rows of operands alone.
BY_ROWS = (
    *("add", "mul", "scale", "clamp", "cast", "gelu", "silu", "relu", "sigmoid", "softplus"),
    *("gelu_mul", "silu_mul", "softcap", "rms_norm", "layer_norm", "l2_norm"),
    *("add_norm", "add_layer_norm", "gaussian_topk", "sigmoid_gate"),
    *("matmul", "matmul_gelu", "matmul_gated"),
)
Named = Mapping[str, "Type | None"]
Sizes = Sequence[int]


def smaller(op: str, named: Named, options: Mapping[str, Any]) -> dict[str, Type | None]:
    """The same with fewer rows where an op takes any number of them: of a weight or a table, of
    attention's queries and keys, and of what sequences keep.
    """
    result = _cut(named, {name: maximum for name, maximum in _maximum(op).items() if name in named})
    return _cut(result, _saved(result, options))


def fewer_rows(op: str, named: Named) -> dict[str, Type | None]:
    """The same with at most `MAX_ROWS` along each dimension but the last, where that changes
    nothing of what is computed for each row.
    """
    if op == "rope":  # x [..., T, H, K], table [T, 2, R]
        return _cut(
            named,
            {"x": lambda t: (*(0,) * (len(t.shape) - 3), MAX_ROWS, 0, 0)}
            | {"table": lambda _: (MAX_ROWS, 0, 0)},
        )
    if op not in BY_ROWS:
        return dict(named)
    rows = [name for name in named if name not in ("w", "bias")]
    return _cut(named, {n: lambda t: (*(MAX_ROWS,) * (len(t.shape) - 1), 0) for n in rows})


def _cut(named: Named, maximum: Mapping[str, Callable[[Type], Sizes]]) -> dict[str, Type | None]:
    """Cut dimensions of some operands to at most so much, 0 for as it is; strides are not kept, as
    `operands` makes all contiguous.
    """
    result = dict(named)
    for name, of in maximum.items():
        kind = result.get(name)
        if kind is not None:
            shape = tuple(min(s, m or s) for s, m in zip(kind.shape, of(kind), strict=True))
            result[name] = Type.contiguous(shape, kind.dtype)
    return result


def _saved(named: Named, options: Mapping[str, Any]) -> dict[str, Callable[[Type], Sizes]]:
    """Return of a cache [2, S, G, K], or a pool of states [N, ...], what the places that are named
    need, and some more.
    """
    if (slots := named.get("slots")) is not None:
        count = slots.count + (MAX_ROWS if named.get("cache") is not None else SPARE_STATES)
    elif (pages := named.get("pages")) is not None:
        count = (pages.count + SPARE_PAGES) * int(options["size"])
    else:
        return {}
    return {
        "cache": lambda t: (0, count, *(0,) * (len(t.shape) - 2)),
        "state": lambda t: (count, *(0,) * (len(t.shape) - 1)),
    }


def _maximum(op: str) -> dict[str, Callable[[Type], Sizes]]:
    if op in ("matmul", "matmul_gelu", "matmul_gated"):
        return {
            "w": lambda t: (MAX_OUTPUTS, *(0,) * (len(t.shape) - 1)),
            "bias": lambda _: (MAX_OUTPUTS,),
        }
    if op in ("embed", "embed_part"):
        return {"table": lambda t: (MAX_OUTPUTS, *(0,) * (len(t.shape) - 1))}
    if op == "attention":
        keys = {name: lambda _: (0, MAX_KEYS, 0, 0) for name in ("k", "v")}
        return keys | {
            "q": lambda _: (0, MAX_ROWS, 0, 0),
            "mask": lambda t: (*(0,) * (len(t.shape) - 2), MAX_ROWS, MAX_KEYS),
            "bounds": lambda t: (*(0,) * (len(t.shape) - 2), MAX_ROWS, 0),
        }
    if op == "gather_pages":
        return {"pages": lambda _: (MAX_PAGES,)}
    if op == "paged_attention":
        return {
            "q": lambda _: (0, MAX_ROWS, 0, 0),
            "pages": lambda _: (MAX_PAGES,),
            "bounds": lambda _: (MAX_ROWS, 0),
            "table": lambda _: (MAX_ROWS, 0, 0),
        }
    return {}


def operands(op: str, named: Named, options: Mapping[str, Any]) -> list[Tensor | None]:
    """Return operands in the order of `named`; on the CPU, contiguous."""
    generator = torch.Generator().manual_seed(0)
    result: list[Tensor | None] = []
    for name, kind in named.items():
        if kind is None:
            result.append(None)
        elif kind.dtype.is_floating_point:
            result.append(torch.randn(kind.shape, generator=generator).to(kind.dtype))
        else:
            result.append(_whole(op, name, kind, named, options).to(kind.dtype))
    return result


def _whole(op: str, name: str, kind: Type, named: Named, options: Mapping[str, Any]) -> Tensor:
    if name == "positions":
        return torch.arange(kind.count).view(kind.shape)
    if name == "starts":
        tokens, parts = _tokens(named), kind.count - 1
        return torch.arange(kind.count) * tokens // parts
    if name == "bounds":
        return _bounds(kind, _keys(op, named, options))
    if name == "cache":
        return _quantized(kind, named, options)
    if name in ("at", "slots", "pages", "tokens"):
        rows = _rows(name, named, options)
        return (rows - 1 - torch.arange(kind.count)).remainder(rows).view(kind.shape)
    return torch.zeros(kind.shape)


def _quantized(kind: Type, named: Named, options: Mapping[str, Any]) -> Tensor:
    """A cache of random numbers in rows of `quant`."""
    heads = named.get("k") or named.get("q")
    head = int(options["head"]) if heads is None else heads.shape[-1]
    generator = torch.Generator().manual_seed(1)
    quant = options["quant"]
    numbers = torch.randn(
        (cached_parts(kind.shape[0], quant), *kind.shape[1:3], head), generator=generator
    )
    return quantize_cache(numbers, quant)


def _bounds(kind: Type, keys: int) -> Tensor:
    """Each row sees other keys: up to a third of them less at either end."""
    row = torch.arange(kind.shape[-2])
    first = row % max(1, keys // 3)
    last = keys - 1 - (2 * row) % max(1, keys // 3)
    return torch.stack((first, last), -1).expand(kind.shape)


def _keys(op: str, named: Named, options: Mapping[str, Any]) -> int:
    kind = {"attention": "k", "attn_softmax": "scores", "paged_attention": "pages"}[op]
    table = named[kind]
    assert table is not None
    if op == "paged_attention":
        return table.count * int(options["size"])
    return table.shape[1 if op == "attention" else 3]


def _tokens(named: Named) -> int:
    """q [1, T, H, K] or [T, H, K], or x [T, C]."""
    kind = named.get("q") or named["x"]
    assert kind is not None
    return kind.shape[1] if len(kind.shape) == 4 else kind.shape[0]


def _rows(name: str, named: Named, options: Mapping[str, Any]) -> int:
    for table, axis in (("cache", 1), ("state", 0), ("table", 0), ("x", -2)):
        kind = named.get(table)
        if kind is not None:
            rows = kind.shape[axis]
            return rows // int(options["size"]) if name == "pages" else rows
    return 1
