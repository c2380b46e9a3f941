"""A plan that runs as programs: brings their inputs and their memory, and calls the steps that no
program has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.cpu.native.lower import ARENA, Lowered, Lowering, StepFacts, worth
from mtmd.kernels.cpu.native.pool import Pool, shared_pool
from mtmd.kernels.cpu.native.program import Pointer, Program
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS

if TYPE_CHECKING:
    from mtmd.kernels.backends.backend import Backend
    from mtmd.kernels.scheduler import Plan

Kernel = Callable[..., Tensor]
CPU = torch.device("cpu")


class NativePlan:
    """Ready to run any number of times, from any thread: runs share weights and nothing else.

    `calls` are the steps' functions and what they read; `placed` checks what an input is filled
    with.
    """

    def __init__(
        self,
        lowered: Lowered,
        calls: Sequence[tuple[Kernel, tuple[Node | None, ...], Node]],
        outputs: Sequence[Node],
        placed: Callable[[Node, Tensor, torch.device, bool], Tensor],
        written: Collection[Node],
        pool: Pool,
    ):
        self.lowered, self._calls, self._outputs = lowered, calls, outputs
        self._placed, self._written, self._pool = placed, written, pool
        self._leaves = list(lowered.leaves.items())
        self._known: dict[int, tuple[Tensor, int]] = {}
        """States by root, with their addresses: they are the same from run to run."""
        self._ends: dict[int, list[int]] = {}
        for root in lowered.made.values():
            self._ends.setdefault(lowered.last.get(root, 0), []).append(root)
        self._kept = {
            place.root
            for place in (lowered.places[o] for o in outputs)
            if isinstance(place, Pointer)
        }

    def steps(self, batch: Any) -> Generator[None, None, list[Tensor]]:
        """As the executor's: the outputs, a pause after each part."""
        found = self.lowered
        tensors: list[Tensor | None] = [None] * found.roots
        roots = np.zeros(found.roots, np.int64)
        arena = tensors[ARENA] = torch.empty(found.arena, dtype=torch.uint8)
        roots[ARENA] = arena.data_ptr()
        for node, root in self._leaves:
            value = node.attrs["fill"](batch)
            known = self._known.get(root)
            if known is None or known[0] is not value:
                placed = self._placed(node, value, CPU, node in self._written)
                known = placed, placed.data_ptr()
                if node.attrs.get("state"):
                    self._known[root] = known
            tensors[root], roots[root] = known
        for root, size in found.results.items():
            result = tensors[root] = torch.empty(size, dtype=torch.uint8)
            roots[root] = result.data_ptr()
        for number, part in enumerate(found.parts):
            if isinstance(part, Program):
                # what the frame holds must outlive every thread that is in it
                self._pool.run(part.frame(roots, self._pool.threads, (tensors[:], found)))
            else:
                self._call(part, tensors, roots)
            for root in self._ends.get(number, ()):
                if root not in self._kept:
                    tensors[root] = None
            yield
        return [self._tensor(o, tensors) for o in self._outputs]

    def _call(self, step: int, tensors: list[Tensor | None], roots: np.ndarray) -> None:
        kernel, reads, node = self._calls[step]
        value = kernel(*(None if i is None else self._tensor(i, tensors) for i in reads))
        if Type.of(value).strides != node.type.strides:
            laid = torch.empty_strided(node.shape, node.type.strides, dtype=node.dtype)
            value = laid.copy_(value)
        root = self.lowered.made[node]
        tensors[root], roots[root] = value, value.data_ptr()

    def _tensor(self, node: Node, tensors: Sequence[Tensor | None]) -> Tensor:
        """A value of the run as torch sees it."""
        place = self.lowered.places[node]
        if not isinstance(place, Pointer):
            return self.lowered.weights[node]
        base, kind = tensors[place.root], node.type
        assert base is not None, node
        if place.offset == 0 and base.dtype == kind.dtype and Type.of(base) == kind:
            return base
        if base.dtype != kind.dtype:  # bytes
            extent = 1 + sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
            part = base[place.offset : place.offset + extent * kind.dtype.itemsize]
            return part.view(kind.dtype).as_strided(kind.shape, kind.strides)
        offset = base.storage_offset() + place.offset // kind.dtype.itemsize
        return base.as_strided(kind.shape, kind.strides, offset)


def native_plan(
    plan: Plan,
    kernels: Sequence[Kernel],
    weight: Callable[[Node, Backend], Tensor],
    placed: Callable[[Node, Tensor, torch.device, bool], Tensor],
) -> NativePlan | None:
    """A plan as programs and the calls between them, None where it is not worth it. `kernels` are
    its steps' functions.
    """
    if worth(plan.steps) is not None or {s.backend.space for s in plan.steps} != {"cpu"}:
        return None
    steps = [StepFacts(s.node, s.inputs, s.backend.native) for s in plan.steps]
    backend = plan.steps[0].backend
    lowered = Lowering(steps, plan.outputs, lambda node: weight(node, backend)).run()
    calls = [(k, s.inputs, s.node) for k, s in zip(kernels, plan.steps, strict=True)]
    written = {
        s.inputs[0] for s in plan.steps if s.inputs and s.inputs[0] and OPS[s.node.op].writes_first
    }
    return NativePlan(lowered, calls, plan.outputs, placed, written, shared_pool())
