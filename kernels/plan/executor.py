"""Runs a plan: straight through its steps, values let go at their last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mtmd.base.errors import DeviceMemoryError, PlacementError
from mtmd.base.heartbeat import beat, heart_here, patience
from mtmd.base.text import mib
from mtmd.kernels.backends.backend import Backend, Run
from mtmd.kernels.backends.side_stream import Mark
from mtmd.kernels.graph import Node, Type, filled
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.graph_replay import Replay, why_not
from mtmd.kernels.plan.row_blocks import Chain
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.plan.steps import LONG_S, SLOWEST, STORES
from mtmd.kernels.resources.result_memory import ResultMemory, new_result

if TYPE_CHECKING:
    from mtmd.kernels.plan.native_run import NativePlan
    from mtmd.kernels.plan.thread_choice import ThreadChoice

T = TypeVar("T")
Observer = Callable[[Node, Tensor, list[Tensor | None]], None]


@contextmanager
def memory_for(what: str, needed: Callable[[], int]) -> Iterator[None]:
    """Turns the several ways in which torch and numpy run out of memory into a DeviceMemoryError
    that tells the bytes.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _shortage(what, needed()) from error
    except RuntimeError as error:
        # The CPU's allocator and Metal's have no error class of their own.
        if not any(words in str(error) for words in ("allocate memory", "out of memory")):
            raise
        raise _shortage(what, needed()) from error


def _shortage(what: str, needed: int) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{what} needs {mib(needed)} that the device does not have; use a smaller context "
        "(--context), fewer or smaller images, the dtype bf16 (--dtype bf16) or another device"
    )


class Residency:
    """Weights where plans need them: read once per memory space, shared by every plan of a
    model.
    """

    def __init__(self) -> None:
        # Sources are held with their tensors: an id is unique only as long as its object lives.
        self._stored: dict[tuple[int, str, torch.dtype, str], tuple[Any, Tensor]] = {}
        self._lock = Lock()
        self.bytes: Counter[str] = Counter()
        self.moved = 0
        """How often weights were moved: runs that were recorded read them where they were."""

    def get(self, node: Node, backend: Backend) -> Tensor:
        with self._lock:
            key = _key(node, backend)
            if key not in self._stored:
                # Whoever quantizes or joins weights writes to them: also where a run has asked
                with (
                    memory_for(f"weight {node.name}", lambda: node.type.bytes),
                    torch.inference_mode(False),
                ):
                    if "parts" in node.attrs:
                        tensor = self._joint(node, backend)
                    else:
                        tensor = self._read(node).to(backend.device)
                        self.bytes[backend.space] += tensor.nbytes
                self._stored[key] = node.attrs["source"], tensor
            return self._stored[key][1]

    def _joint(self, node: Node, backend: Backend) -> Tensor:
        """Several parameters as one, row after row. Each of them is a part of it from then on, for
        plans that read it by itself, and for those that already do.
        """
        joint = torch.empty(node.shape, dtype=node.dtype, device=backend.device)
        rows = joint.split([part.shape[0] for part in node.attrs["parts"]])
        for part, location in zip(node.attrs["parts"], rows, strict=True):
            key = _key(part, backend)
            stored = self._stored.get(key)
            if stored is None:
                location.copy_(self._read(part))
                self.bytes[backend.space] += location.nbytes
                self._stored[key] = part.attrs["source"], location
            else:
                location.copy_(stored[1])
                stored[1].data = location
                self.moved += 1
        return joint

    @staticmethod
    def _read(node: Node) -> Tensor:
        beat(node.name)
        value: Tensor = node.attrs["source"].read(node.name, node.dtype)
        beat()
        return value


def _key(node: Node, backend: Backend) -> tuple[int, str, torch.dtype, str]:
    return id(node.attrs["source"]), node.name, node.dtype, backend.space


class _ByNode:
    """A plan as a loop over its steps."""

    def __init__(self, plan: Plan, residency: Residency):
        slots: dict[tuple[Node, str] | Node, int] = {}
        self.inputs: list[tuple[int, Node, torch.device, bool]] = []
        written = {
            (s.inputs[0], s.backend.space)
            for s in plan.steps
            if s.node.op != "copy" and OPS[s.node.op].writes_first
        }
        self.template: list[Tensor | None] = []
        for (node, space), backend in plan.leaves.items():
            slots[node, space] = len(self.template)
            if node.op == "input":
                self.inputs.append(
                    (len(self.template), node, backend.device, (node, space) in written)
                )
            self.template.append(residency.get(node, backend) if node.op == "weight" else None)
        # One list of slots holds every value of a run, so that a run is a loop over tuples of
        # numbers with nothing to look up.
        self.program: list[tuple[Run, tuple[int, ...], int, tuple[int, ...], Node]] = []
        nothing = len(self.template)  # the slot of an absent input, always None
        self.template.append(None)
        for step in plan.steps:
            beat(step.node.name)
            slots[step.node] = len(self.template)
            self.template.append(None)
            reads = tuple(
                nothing if i is None else slots[(i, step.backend.space) if i.is_leaf else i]
                for i in step.inputs
            )
            self.program.append(
                (
                    _kernel(step.node, step.backend, step.in_place),
                    reads,
                    slots[step.node],
                    tuple(slots[f] for f in step.frees),
                    step.node,
                )
            )
        self.chains = self._prepare_chains(plan, slots, residency)
        self.long = {
            node: seconds
            for node in (s.node for s in plan.steps if s.node.op != "copy")
            if (seconds := OPS[node.op].flops(node) / SLOWEST) > LONG_S
        }
        self.outputs = [slots[o] for o in plan.outputs]
        self.taken: dict[int, int] = {}
        """Bytes that each step took of a run's `ResultMemory` when it ran last."""

    @staticmethod
    def _prepare_chains(
        plan: Plan, slots: dict[tuple[Node, str] | Node, int], residency: Residency
    ) -> dict[int, _ChainRun]:
        """Prepare chains, by the number of their first step."""
        result = {}
        for chain, plans in zip(plan.chains, plan.blocks, strict=True):
            result[chain.first] = _ChainRun(
                chain,
                {rows: Executor(plan, residency) for rows, plan in plans.items()},
                tuple(slots[i] for i in chain.inputs),
                slots[chain.result],
                tuple(slots[f] for s in chain.steps for f in s.frees),
            )
        return result


class Executor:
    """One plan, ready to run any number of times, from any thread: runs share weights and nothing
    else.
    """

    def __init__(self, plan: Plan, residency: Residency):
        self.plan = plan
        self.replay: Replay | None = None
        """Runs that are replayed; None where they are launched one by one, and why."""
        self._residency = residency
        self._native: NativePlan | None = None
        self._may_be_native = any(s.backend.native and s.node.op in STORES for s in plan.steps)
        self._lock = Lock()
        if not self._may_be_native:
            _ = self._by_node
        self.not_replayed = self._make_replay()

    @cached_property
    def _by_node(self) -> _ByNode:
        """Made when it is first needed where there may be programs, which need none of it."""
        return _ByNode(self.plan, self._residency)

    def run(self, batch: Any, observe: Observer | None = None) -> list[Tensor]:
        """The outputs for one batch, whatever the graph's inputs understand by it.

        `observe(node, value, inputs)` is called after every node, in order; inputs that a step
        overwrote hold its result by then.
        """
        with torch.inference_mode():
            return finish(self._steps(batch, observe))

    @torch.inference_mode()
    def steps(
        self, batch: Any, observe: Observer | None = None
    ) -> Generator[None, None, list[Tensor]]:
        """Run a plan as `run` does, a node at a time: whoever drives it may do other work in
        between, or close it and leave the rest undone.
        """
        return (yield from self._steps(batch, observe))

    def _steps(self, batch: Any, observe: Observer | None) -> Generator[None, None, list[Tensor]]:
        with memory_for("this run", lambda: sum(self.plan.compute_bytes.values())):
            if observe is None and (native := self._programs()) is not None:
                return (yield from native.steps(batch))
            if observe is None and self.replay is not None:
                outputs = self.replay.outputs(batch)
                if outputs is not None:
                    yield
                    return outputs
            memory = ResultMemory()
            try:
                return (yield from self._run(batch, observe, memory))
            finally:
                memory.close()

    def _run(
        self, batch: Any, observe: Observer | None, memory: ResultMemory, *, whole: bool = True
    ) -> Generator[None, None, list[Tensor]]:
        """`whole`: nothing but this run takes from its memory."""
        steps = self._by_node
        values = list(steps.template)
        values_of: dict[Node, Tensor] = {}
        for slot, node, device, is_written in steps.inputs:
            if node not in values_of:
                values_of[node] = filled(node, batch)
            values[slot] = _located(node, values_of[node], device, is_written)
        chains = steps.chains if observe is None else {}
        room = self.plan.room if whole and observe is None else {}
        inside = 0  # a chain, before the step of this number
        heart = heart_here()
        for number, (kernel, reads, result, frees, node) in enumerate(steps.program):
            if number < inside:
                continue
            if number in room:
                memory.leave(room[number] + steps.taken.get(number, 0))
            if whole:
                before = memory.highest = memory.used
            if number in chains:
                yield from chains[number].steps(values, memory)
                inside = chains[number].chain.stop
                if whole:
                    steps.taken[number] = memory.highest - before
                continue
            inputs = [values[i] for i in reads]
            if heart is not None:
                heart.at = node.name
            with memory.in_use():
                if node in steps.long:
                    with patience(steps.long[node]):
                        value = kernel(*inputs)
                else:
                    value = kernel(*inputs)
            values[result] = value
            if whole:
                steps.taken[number] = memory.highest - before
            if observe is not None:
                observe(node, value, inputs)
            del inputs, value  # what is freed now must not live on in a generator that rests
            for slot in frees:
                values[slot] = None
            yield
        return [values[i] for i in steps.outputs]  # type: ignore[misc]

    def _make_replay(self) -> str | None:
        recorders = (step.backend.recorder for step in self.plan.steps)
        recorder = next((r for r in recorders if r is not None), None)
        if recorder is None:
            return "its device records nothing"
        steps, residency = self._by_node, self._residency
        kernels = {node: kernel for kernel, *_, node in steps.program}

        def by_torch(node: Node) -> bool:
            function = getattr(kernels[node], "func", kernels[node])
            return function in (OPS[node.op].reference, OPS[node.op].in_place)

        reason = why_not(self.plan, by_torch)
        if reason is None:
            device = self.plan.steps[0].backend.device
            written = {node: is_written for _, node, _, is_written in steps.inputs}
            self.replay = Replay(
                [(slot, node) for slot, node, *_ in steps.inputs],
                steps.template,
                partial(_launched, steps.program, steps.outputs),
                recorder,
                lambda node, value: _check(node, value, device, written[node]),
                device,
                self.plan.outputs,
                lambda: residency.moved,
            )
        return reason

    def prepare(self) -> None:
        """All that the first run would make otherwise, but for what it writes to."""
        if self._programs() is None:
            _ = self._by_node

    @property
    def is_prepared(self) -> bool:
        """Known at once, also while another thread prepares it."""
        return self._native is not None or not self._may_be_native

    @property
    def threads(self) -> ThreadChoice | None:
        """Return the number of threads by which machine code runs it, None before there is some and
        where none is.
        """
        native = self._native
        return None if native is None else native.threads

    def _programs(self) -> NativePlan | None:
        """The plan as programs, where it is one of few rows on a backend that has them. They are
        made when they are first needed: looking on goes node by node.
        """
        if not self._may_be_native:
            return None
        with self._lock:
            if self._native is None and self._may_be_native:
                from mtmd.kernels.plan.native_run import native_plan

                self._native = native_plan(
                    self.plan,
                    lambda step: self._by_node.program[step][0],
                    self._residency.get,
                    _located,
                )
                self._may_be_native = self._native is not None
            return self._native


def _launched(
    program: Sequence[tuple[Run, tuple[int, ...], int, tuple[int, ...], Node]],
    outputs: Sequence[int],
    values: list[Tensor | None],
) -> list[Tensor]:
    """The outputs, from a list that holds the inputs. No method: a recording that held its executor
    would be freed as garbage, at any time, and its memory with it.
    """
    for kernel, reads, result, frees, _ in program:
        values[result] = kernel(*(values[i] for i in reads))
        for slot in frees:
            values[slot] = None
    return [values[i] for i in outputs]  # type: ignore[misc]


@dataclass(frozen=True)
class _ChainRun:
    """A chain with its blocks ready to run, and the slots that it reads, fills and empties."""

    chain: Chain
    blocks: dict[int, Executor]
    reads: tuple[int, ...]
    result: int
    frees: tuple[int, ...]

    def steps(
        self, values: list[Tensor | None], memory: ResultMemory
    ) -> Generator[None, None, None]:
        """Run as the executor's `steps` does, over one block after the other."""
        chain, kind = self.chain, self.chain.result.type
        given = [
            value.view(chain.rows, *shape)
            for slot, shape in zip(self.reads, chain.row_shapes, strict=True)
            if (value := values[slot]) is not None
        ]
        with memory.in_use():
            whole = new_result(*kind.shape, dtype=kind.dtype)
        lines = whole.view(chain.rows, -1)
        for start, stop in chain.parts:
            block = self.blocks[stop - start]
            parts = [v[start:stop] for v in given]
            (made,) = yield from block._run(parts, None, memory, whole=False)
            lines[start:stop] = made.view(stop - start, -1)
            del made
        values[self.result] = whole
        for slot in self.frees:
            values[slot] = None


def finish(steps: Generator[Mark | None, None, T]) -> T:
    """Drive steps to their end."""
    while True:
        try:
            waits = next(steps)
            if waits is not None:
                waits.wait()
            beat()
        except StopIteration as done:
            value: T = done.value
            return value


def _located(node: Node, value: Tensor, device: torch.device, written: bool) -> Tensor:
    """An input as the plan expects it. What is written in place is not copied, which would lose
    what is written.
    """
    _check(node, value, device, False)
    if value.device == device and value.is_contiguous():
        return value  # as most are, in every step of decoding
    located = value.to(device).contiguous()
    if written and located is not value:
        raise PlacementError(
            f"state {node.name} lies on {value.device} with strides {value.stride()}, expected "
            f"contiguous on {device}, "
            "where it is written"
        )
    return located


def _check(node: Node, value: Tensor, device: torch.device, written: bool) -> None:
    """Check that an input is what the plan is made for, and, where it is `written`, lies where that
    is.
    """
    if value.shape != node.shape or value.dtype != node.dtype:
        raise PlacementError(
            f"input {node.name} was filled with {Type.of(value)}, the plan is made for "
            f"{node.type}; "
            "make a plan for this size"
        )
    if written and (value.device != device or not value.is_contiguous()):
        raise PlacementError(
            f"state {node.name} lies on {value.device} with strides {value.stride()}, expected "
            f"contiguous on {device}, "
            "where it is written"
        )


def _kernel(node: Node, backend: Backend, in_place: bool) -> Run:
    if node.op == "copy":
        return lambda value: value.to(backend.device, copy=True)
    return backend.lower(node, in_place)
