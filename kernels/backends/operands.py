"""Operands that an op can be tried with: random numbers, and places, positions and bounds that lie
within its tables, spread out so that a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.graph import Type

MOST_ROWS, MOST_KEYS, MOST_OUTPUTS = 64, 256, 256  # of attention, and of a weight
Named = Mapping[str, "Type | None"]


def smaller(op: str, named: Named) -> dict[str, Type | None]:
    """The same with fewer rows where an op takes any number of them: of a weight or a table, and of
    attention's queries and keys.
    """
    found = dict(named)
    for name, most in _most(op).items():
        kind = found.get(name)
        if kind is not None and kind.is_contiguous:
            shape = tuple(min(s, m or s) for s, m in zip(kind.shape, most(kind), strict=True))
            found[name] = Type.contiguous(shape, kind.dtype)
    return found


def _most(op: str) -> dict[str, Any]:
    if op in ("matmul", "matmul_gelu"):
        return {
            "w": lambda t: (MOST_OUTPUTS, *(0,) * (len(t.shape) - 1)),
            "bias": lambda _: (MOST_OUTPUTS,),
        }
    if op in ("embed", "embed_part"):
        return {"table": lambda t: (MOST_OUTPUTS, *(0,) * (len(t.shape) - 1))}
    if op == "attention":
        keys = {name: lambda _: (0, MOST_KEYS, 0, 0) for name in ("k", "v")}
        return keys | {
            "q": lambda _: (0, MOST_ROWS, 0, 0),
            "mask": lambda t: (*(0,) * (len(t.shape) - 2), MOST_ROWS, MOST_KEYS),
            "bounds": lambda t: (*(0,) * (len(t.shape) - 2), MOST_ROWS, 0),
        }
    return {}


def operands(op: str, named: Named, options: Mapping[str, Any]) -> list[Tensor | None]:
    """In the order of `named`; on the CPU."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor | None] = []
    for name, kind in named.items():
        if kind is None:
            found.append(None)
        elif kind.dtype.is_floating_point:
            found.append(torch.randn(kind.shape, generator=generator).to(kind.dtype))
        else:
            found.append(_whole(op, name, kind, named, options).to(kind.dtype))
    return found


def _whole(op: str, name: str, kind: Type, named: Named, options: Mapping[str, Any]) -> Tensor:
    if name == "positions":
        return torch.arange(kind.count).view(kind.shape)
    if name == "starts":
        tokens, parts = _tokens(named), kind.count - 1
        return torch.arange(kind.count) * tokens // parts
    if name == "bounds":
        return _bounds(kind, _keys(op, named, options))
    if name in ("at", "slots", "pages", "tokens"):
        rows = _rows(name, named, options)
        return (rows - 1 - torch.arange(kind.count)).remainder(rows).view(kind.shape)
    return torch.zeros(kind.shape)


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
