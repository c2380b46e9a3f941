"""What an op is: one Python function on torch tensors, which is its meaning, its reference and its fallback.

Calling an op on nodes builds a node; `op.reference` computes. The shape rule is the reference itself, run on meta tensors and
remembered per types and attributes, so that the two cannot disagree.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mtmd.kernels.errors import PlacementError
from mtmd.kernels.graph import Node, Type

OPS: dict[str, Op] = {}


class Op:
    """A named operation. `flops(node)` counts multiply and add as two; `bytes(node)` is the least traffic it can need: each operand
    read once and the result written, unless the op says otherwise.

    `in_place`, where an op has one, is the same function overwriting its first input; the planner uses it when nothing else
    still reads that input.
    """

    def __init__(self, reference: Callable[..., torch.Tensor], flops: Callable[[Node], int] | None, traffic: Callable[[Node], int] | None,
                 in_place: Callable[..., torch.Tensor] | None, view: bool):
        self.name, self.reference, self.in_place, self.is_view = reference.__name__, reference, in_place, view
        self._flops, self._traffic = flops, traffic
        if self.name in OPS:
            raise ValueError(f"op {self.name} registered twice")
        OPS[self.name] = self
        functools.update_wrapper(self, reference)

    def __call__(self, *inputs: Node | None, name: str = "", **attrs: Any) -> Node:
        types = tuple(None if i is None else i.type for i in inputs)
        try:
            result, alias = _infer(self.name, types, tuple(attrs.items()))
        except (RuntimeError, ValueError, IndexError) as error:
            given = ", ".join(str(t) if t else "nothing" for t in types)
            why = " ".join(str(error).split())  # torch's messages have line breaks
            raise PlacementError(f"{self.name} {name or '(unnamed)'} cannot take ({given}) with {attrs}: {why}") from error
        return Node(self.name, inputs, result, attrs, name, alias)

    def flops(self, node: Node) -> int:
        return self._flops(node) if self._flops else 0

    def bytes(self, node: Node) -> int:
        if self._traffic:
            return self._traffic(node)
        if node.alias:
            return 0
        return node.type.bytes + sum(i.type.bytes for i in node.operands)


@functools.lru_cache(maxsize=65536)
def _infer(op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...]) -> tuple[Type, bool]:
    with torch.inference_mode(False), torch.no_grad():
        values = [None if t is None else t.meta() for t in types]
        result = OPS[op].reference(*values, **dict(attrs))
    shares = [v is not None and v.untyped_storage()._cdata == result.untyped_storage()._cdata for v in values]
    need(not any(shares[1:]), f"{op} returns an input other than its first")
    return Type.of(result), any(shares)


def op(*, flops: Callable[[Node], int] | None = None, traffic: Callable[[Node], int] | None = None,
       in_place: Callable[..., torch.Tensor] | None = None, view: bool = False) -> Callable[[Callable[..., torch.Tensor]], Op]:
    """Register a function as an op. `view`: it only looks at its input differently, and runs wherever that lies."""
    return lambda reference: Op(reference, flops, traffic, in_place, view)


def need(ok: bool, message: str) -> None:
    """Refuse a graph that cannot be meant."""
    if not ok:
        raise ValueError(message)
