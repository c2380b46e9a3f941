"""Counts of the kernels that a plan launches on a GPU, and of the bytes that each node moves,
counted by running nothing: an op that torch computes is called on meta tensors, and what reaches
torch's dispatcher is counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtmd.kernels.backends.target import Target
from mtmd.kernels.estimate.links import PARTS
from mtmd.kernels.estimate.unpacking import Unpacking, unpacking
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.plan.steps import Step

# Calls of torch that compute nothing on the device, beside views.
NOTHING = frozenset({
    "aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like",
    "aten::new_empty_strided", "aten::detach", "aten::lift_fresh", "aten::_unsafe_view",
    "aten::sym_size", "aten::sym_stride",
})  # fmt: skip


class Cost(NamedTuple):
    """Cost of one node: kernels launched by torch and by Triton, bytes read and written, and what
    kernels take that unpack quantized weights.
    """

    torch: int
    triton: int
    bytes: int
    unpacking: tuple[Unpacking, ...] = ()


def cost(step: Step, target: Target) -> Cost:
    """Return what a step of a plan launches and moves on `target`; nothing if it runs elsewhere."""
    node = step.node
    if node.op == "copy":
        return Cost(1, 0, 2 * node.type.bytes)
    if step.backend is not target:
        return Cost(0, 0, 0)
    if node.op in PARTS:  # a collective is one launch, of the library that moves the values
        return Cost(1, 0, node.type.bytes)
    choice = target.choose(node)
    if choice.kernel is not None:
        count = choice.kernel.launches(*types_of(node), **node.attrs)
        return Cost(0, count, OPS[node.op].bytes(node), unpacking(node, choice.kernel))
    in_place = step.in_place and OPS[node.op].in_place is not None
    count, moved = _counted(node.op, types_of(node), tuple(node.attrs.items()), in_place)
    # An op that says what it moves reads a part of its operands: rows of a table, pages.
    return Cost(count, 0, OPS[node.op].bytes(node) if OPS[node.op].reads_a_part else moved)


def copied_out(plan: Plan) -> list[Cost]:
    """Return what copies of a replayed run's outputs launch and move, beside its steps."""
    return [Cost(1, 0, 2 * output.type.bytes) for output in plan.copied_out]


@lru_cache(maxsize=65536)
def _counted(
    op: str, types: tuple[Type | None, ...], attrs: tuple[tuple[str, Any], ...], in_place: bool
) -> tuple[int, int]:
    """Kernels, and bytes that they read and write."""
    function = OPS[op].in_place if in_place else OPS[op].reference
    assert function is not None
    with torch.inference_mode(False), torch.no_grad():
        values = [t and t.meta() for t in types]
        function(*values, **dict(attrs))  # makes what is kept for the next time
        seen = _Launches()
        with seen:
            function(*values, **dict(attrs))
    return seen.count, seen.bytes


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in NOTHING:
            return result
        given = _tensors((args, kwargs or {}))
        made = _tensors(result)
        if func._schema.name in ("aten::_to_copy", "aten::clone") or made or given:
            self.count += 1
            self.bytes += sum(t.numel() * t.itemsize for t in (*given, *made))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []
