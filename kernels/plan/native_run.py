"""A plan that runs as programs: brings their inputs and their memory, and calls the steps that no
program has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mtmd.base.cores import usable_cores
from mtmd.base.heartbeat import heart_here, patience
from mtmd.base.throttling import SustainedClock
from mtmd.kernels.cpu.native.pool import Pool, shared_pool
from mtmd.kernels.cpu.native.program import Frame, Pointer, Program, scratch_bytes
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.arena import ARENA
from mtmd.kernels.plan.lower import Lowered, Lowering, StepFacts, facts_of, worth
from mtmd.kernels.plan.steps import LONG_S, SLOWEST
from mtmd.kernels.plan.thread_choice import ThreadChoice
from mtmd.kernels.resources.result_memory import ResultMemory, new_result
from mtmd.kernels.resources.threads import requested_threads

if TYPE_CHECKING:
    from mtmd.kernels.backends.backend import Backend
    from mtmd.kernels.plan.scheduler import Plan

Kernel = Callable[..., Tensor]
Value = Tensor | np.ndarray
CPU = torch.device("cpu")
NUMBERS = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


class Memory:
    """Memory that a run of a plan writes to: its arena and a frame of each program."""

    def __init__(self, plan: NativePlan, threads: int):
        self.arena = new_result(plan.lowered.arena, dtype=torch.uint8)
        size = scratch_bytes(plan.lowered.scratch, threads)
        scratch = new_result(size, dtype=torch.uint8).numpy()
        self.frames: dict[int, Frame] = {
            number: part.frame(threads, scratch)
            for number, part in enumerate(plan.lowered.parts)
            if isinstance(part, Program)
        }
        self.sound = True


class NativePlan:
    """Ready to run any number of times, from any thread: runs share weights and nothing else.

    `calls` are the functions of steps, by number, and what they read; `located` checks what an
    input is filled with. The memory of the last run is kept for the next of the same plan, of few
    plans; a wide plan's is a `ResultMemory`, and goes with the run.
    """

    def __init__(
        self,
        lowered: Lowered,
        calls: Mapping[int, tuple[Kernel, tuple[Node | None, ...], Node]],
        outputs: Sequence[Node],
        located: Callable[[Node, Tensor, torch.device, bool], Tensor],
        written: Collection[Node],
        pool: Callable[[], Pool] = shared_pool,
    ):
        self.lowered, self._calls, self._outputs = lowered, calls, outputs
        self._located, self._written, self._pool = located, written, pool
        self._clock = SustainedClock(usable_cores().quota)
        self._ways: dict[tuple[Pool, int | None], ThreadChoice] = {}
        """By what is asked for, how many threads have turned out to be best."""
        leaves = [(root, node, node.attrs["fill"]) for node, root in lowered.leaves.items()]
        self._states = [leaf for leaf in leaves if leaf[1].attrs.get("state")]
        self._fresh = [leaf for leaf in leaves if not leaf[1].attrs.get("state")]
        self._kinds = {root: (node.dtype, tuple(node.shape)) for root, node, _ in leaves}
        self._results = [(root, t.shape, t.dtype) for root, t in lowered.results.items()]
        self._known: list[tuple[int, Value, int]] = []
        """States by root, with their addresses: those of a cache are the same from run to run."""
        self._ends: dict[int, list[int]] = {}
        for root in lowered.made.values():
            self._ends.setdefault(lowered.last.get(root, 0), []).append(root)
        self._names = [
            f"program {number}" if isinstance(part, Program) else calls[part][2].name
            for number, part in enumerate(lowered.parts)
        ]
        self._saved = {
            location.root
            for location in (lowered.locations[o] for o in outputs)
            if isinstance(location, Pointer)
        }

    @property
    def threads(self) -> ThreadChoice:
        """Number of threads for runs of the calling thread."""
        pool, requested = self._pool(), requested_threads()
        if (pool, requested) not in self._ways:
            fixed = requested == pool.threads or self.lowered.wide  # a run is long, and few come
            choice = ThreadChoice(pool.threads, fixed=fixed)
            self._ways = {**self._ways, (pool, requested): choice}
        return self._ways[pool, requested]

    def steps(self, batch: Any) -> Generator[None, None, list[Tensor]]:
        """Run as the executor's `steps` does: the outputs, a pause after each part."""
        pool = self._pool()
        if not self.lowered.wide:
            memory = pool.take(self) or Memory(self, pool.threads)
            outputs = yield from self._steps(batch, memory, pool, nullcontext)
            if memory.sound and ARENA not in self._saved:
                pool.give(self, memory)
            return outputs
        large = ResultMemory()
        try:
            with large.in_use():
                memory = Memory(self, pool.threads)
            return (yield from self._steps(batch, memory, pool, large.in_use))
        finally:
            large.close()

    def _steps(
        self,
        batch: Any,
        memory: Memory,
        pool: Pool,
        within: Callable[[], AbstractContextManager[None]],
    ) -> Generator[None, None, list[Tensor]]:
        """`within`: what the steps that no program has are called in."""
        results, choice = self.lowered, self.threads
        tensors: list[Value | None] = [None] * results.roots
        roots = [0] * results.roots
        tensors[ARENA], roots[ARENA] = memory.arena, memory.arena.data_ptr()
        known = self._known  # of another thread's run too: a list is never changed
        if self._states and (not known or self._states[0][2](batch) is not known[0][1]):
            known = self._known = [self._fill(batch, *leaf) for leaf in self._states]
        for root, tensor, address in known:
            tensors[root], roots[root] = tensor, address
        for leaf in self._fresh:
            _, tensors[leaf[0]], roots[leaf[0]] = self._fill(batch, *leaf)
        for root, shape, dtype in self._results:
            result = tensors[root] = torch.empty(shape, dtype=dtype)
            roots[root] = result.data_ptr()
        heart = heart_here()
        threads, seconds, undisturbed = choice.next(), 0.0, True
        for number, part in enumerate(results.parts):
            if heart is not None:
                heart.at = self._names[number]
            long_s = results.flops[number] / SLOWEST
            more_s = long_s if long_s > LONG_S else 0.0
            if isinstance(part, Program):
                frame = memory.frames[number]
                # what is held must outlive every thread that is in the frame
                frame.open(roots, (tensors[:], results, memory), alone=threads == 1)
                begun = self._clock.now()
                try:
                    with patience(more_s):
                        undisturbed &= pool.run(frame, threads)
                    seconds += self._clock.since(begun)
                finally:
                    memory.sound = frame.close() and memory.sound
            else:
                with within(), patience(more_s):
                    self._call(part, tensors, roots)
            for root in self._ends.get(number, ()):
                if root not in self._saved:
                    tensors[root] = None
            yield
        if undisturbed:
            choice.took(threads, seconds)
        return [self._tensor(o, tensors) for o in self._outputs]

    def _fill(
        self, batch: Any, root: int, node: Node, fill: Callable[[Any], Value]
    ) -> tuple[int, Value, int]:
        value = fill(batch)
        if isinstance(value, np.ndarray):
            known = (NUMBERS.get(value.dtype), value.shape) == self._kinds[root]
            if known and value.flags.c_contiguous:
                return root, value, value.ctypes.data
            value = torch.from_numpy(value)
        located = self._located(node, value, CPU, node in self._written)
        return root, located, located.data_ptr()

    def _call(self, step: int, tensors: list[Value | None], roots: list[int]) -> None:
        kernel, reads, node = self._calls[step]
        value = kernel(*(None if i is None else self._tensor(i, tensors) for i in reads))
        if Type.of(value).strides != node.type.strides:
            laid = torch.empty_strided(node.shape, node.type.strides, dtype=node.dtype)
            value = laid.copy_(value)
        root = self.lowered.made[node]
        tensors[root], roots[root] = value, value.data_ptr()

    def _tensor(self, node: Node, tensors: Sequence[Value | None]) -> Tensor:
        """A value of the run as torch sees it."""
        location = self.lowered.locations[node]
        if not isinstance(location, Pointer):
            return self.lowered.weights[node]
        base, kind = tensors[location.root], node.type
        assert base is not None, node
        if isinstance(base, np.ndarray):
            base = torch.from_numpy(base)
        if self.lowered.results.get(location.root) == kind:
            return base
        if location.root == ARENA:  # bytes
            extent = 1 + sum((n - 1) * s for n, s in zip(kind.shape, kind.strides, strict=True))
            part = base[location.offset : location.offset + extent * kind.dtype.itemsize]
            return part.view(kind.dtype).as_strided(kind.shape, kind.strides)
        if location.offset == 0 and Type.of(base) == kind:
            return base
        offset = base.storage_offset() + location.offset // kind.dtype.itemsize
        return base.as_strided(kind.shape, kind.strides, offset)


def native_plan(
    plan: Plan,
    kernel: Callable[[int], Kernel],
    weight: Callable[[Node, Backend], Tensor],
    located: Callable[[Node, Tensor, torch.device, bool], Tensor],
) -> NativePlan | None:
    """A plan as programs and the calls between them, None where it is not worth it. `kernel` gives
    the function of a step, by its number.
    """
    if worth(plan.steps) is not None or {s.backend.space for s in plan.steps} != {"cpu"}:
        return None
    steps = [StepFacts(s.node, s.inputs, s.backend.native) for s in plan.steps]
    backend = plan.steps[0].backend
    lowered = Lowering(steps, plan.outputs, lambda node: weight(node, backend)).run()
    plan.note_programs(facts_of(lowered))
    calls = {
        part: (kernel(part), plan.steps[part].inputs, plan.steps[part].node)
        for part in lowered.parts
        if isinstance(part, int)
    }
    written = {
        s.inputs[0] for s in plan.steps if s.inputs and s.inputs[0] and OPS[s.node.op].writes_first
    }
    return NativePlan(lowered, calls, plan.outputs, located, written)
