"""A plan's runs as replays of one that was recorded: nothing is launched by the host but the copy
of its inputs and the recording.

Inputs have memory of their own for that, in which every run finds them: all that come from the host
side by side, so that one copy brings them. States that a run writes in place (caches) and weights
are read where they lie; for another cache, and once weights were moved, a run is recorded anew.
Outputs that lie in a state are found there in the state that a run is given, and no recording keeps
one that nobody has any more. Others are part of what is replayed: they end where those of all
recordings do, so that no recording keeps memory for its own, and are copied from there for the
caller.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtmd.base.errors import DeviceError
from mtmd.base.text import mib
from mtmd.kernels.backends.cuda_graphs import Recorder, Recording, Staging, results_bytes
from mtmd.kernels.graph import Node, filled
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan import scheduler
from mtmd.kernels.plan.scheduler import Plan

# Runs before one is recorded: a shape that does not come again is not worth it, and kernels are
# compiled, and libraries choose theirs, in the first.
BEFORE = 2
ALIGN = 256

BROKEN = "the device has failed in a recorded run, and nothing runs on it any more"

Check: TypeAlias = "Callable[[Node, Tensor], None]"
log = logging.getLogger("mtmd.replay")


def why_not(plan: Plan, by_torch: Callable[[Node], bool]) -> str | None:
    """None where runs of a plan can be recorded, else why not. `by_torch`: which nodes their op's
    reference runs, and no kernel.
    """
    spaces = {step.backend.space for step in plan.steps}
    if len(spaces) != 1 or plan.copies:
        return f"it runs in several memories: {', '.join(sorted(spaces))}"
    nodes = (step.node for step in plan.steps)
    waiting = [node for node in nodes if OPS[node.op].waits and by_torch(node)]
    if waiting:
        return (
            f"{waiting[0].name} ({waiting[0].op}) and {len(waiting) - 1} others wait for the device"
        )
    if (taken := sum(plan.run_bytes.values())) > scheduler.MAX_RECORDED:
        maximum = mib(scheduler.MAX_RECORDED)
        return f"its values take {mib(taken)}, of which up to {maximum} are kept"
    return None


def recordings_bytes(queue: Iterable[tuple[Plan, int]]) -> dict[str, int]:
    """Return what recordings of one queue keep, by memory: the values of the largest that is
    recorded, and memory for results. `queue`: its largest plans, each with how many times as large
    those like it may be. Of plans that are too large to be recorded, smaller ones are, whose
    results are taken to be smaller by as much as their values.
    """
    values, results = Counter[str](), Counter[str]()
    for plan, times in queue:
        if plan.is_where_runs_are_recorded:
            for space, size in plan.run_bytes.items():
                saved = min(times * size, scheduler.MAX_RECORDED)
                values[space] = max(values[space], saved)
                returned = size_of(plan.outside_states) * saved // max(size, 1)
                results[space] = max(results[space], returned)
    return {space: size + 2 * results_bytes(results[space]) for space, size in values.items()}


@dataclass(frozen=True)
class _InState:
    """Describes an output that lies in a state: in which, and how. offset: from its first value."""

    state: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def locate(cls, value: Tensor, states: Sequence[Tensor]) -> _InState:
        memory = [state.untyped_storage().data_ptr() for state in states]
        number = memory.index(value.untyped_storage().data_ptr())
        offset = int(value.storage_offset() - states[number].storage_offset())
        return cls(number, value.shape, value.stride(), offset)

    def of(self, states: Sequence[Tensor]) -> Tensor:
        state = states[self.state]
        return state.as_strided(self.shape, self.strides, state.storage_offset() + self.offset)


class Replay:
    """`run` computes the outputs from a list with the inputs' values at their slots, and leaves the
    list as it is. One replay at a time: from any thread, one waits for the other.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[int, Node]],
        template: Sequence[Tensor | None],
        run: Callable[[list[Tensor | None]], list[Tensor]],
        recorder: Recorder,
        check: Check,
        device: torch.device,
        outputs: Sequence[Node],
        moved: Callable[[], int],
    ):
        """`moved`: how often weights were moved so far."""
        self._states = [(s, n) for s, n in inputs if n.attrs.get("state")]
        self._inputs = [(s, n) for s, n in inputs if not n.attrs.get("state")]
        self._template, self._run, self._recorder = template, run, recorder
        self._check, self._device, self._outputs = check, device, tuple(outputs)
        self._moved = moved
        self._before, self._lock = BEFORE, Lock()
        # Those that have run it: libraries have handles for each, which cannot be made meanwhile
        self._threads: set[int] = set()
        self._locations: dict[Node, Tensor] = {}  # on the device
        self._hosted: dict[Node, Tensor] = {}  # of those, what the host writes
        self._staging: Staging | None = None
        self._recording: Recording | None = None
        self._in_states: dict[Node, _InState] = {}  # outputs
        self._key: tuple[int, ...] = ()
        self.recorded = self.replayed = 0
        self.failure: str | None = None
        """Why recording failed; runs go on without."""

    def outputs(self, batch: Any) -> list[Tensor] | None:
        """Return the outputs of one batch, in memory of their own or a state's; None where the run
        is to be made as ever.
        """
        with self._lock:
            if self.failure is not None:
                return None
            here = get_ident()
            if self._before:
                self._before -= 1
                self._threads.add(here)
                return None
            states = [self._filled(node, batch) for _, node in self._states]
            key = (self._moved(), *(state.data_ptr() for state in states))
            new = self._recording is None or key != self._key
            if new and here not in self._threads:
                self._threads.add(here)
                return None
            self._fill({node: self._filled(node, batch) for _, node in self._inputs})
            if new:
                self._recording, self._key = self._record(states), key
            if self._recording is None:
                return None
            try:
                self._recording.replay()
            except torch.AcceleratorError as error:
                raise DeviceError(f"{BROKEN} ({_line(error)}); start the process again") from error
            self.replayed += 1
            copied = iter(self._recording.outputs)
            return [
                self._in_states[node].of(states) if node.is_in_state else next(copied).clone()
                for node in self._outputs
            ]

    def _filled(self, node: Node, batch: Any) -> Tensor:
        value = filled(node, batch)
        self._check(node, value)
        return value

    def _fill(self, values: Mapping[Node, Tensor]) -> None:
        if self._staging is None:
            self._lay_out(values)
        assert self._staging is not None
        self._staging.wait()
        late = []
        for node, value in values.items():
            if node in self._hosted and value.device.type == "cpu":
                self._hosted[node].copy_(value)
            else:
                late.append((self._locations[node], value))
        self._staging.upload()
        for location, value in late:
            location.copy_(value)

    def _lay_out(self, values: Mapping[Node, Tensor]) -> None:
        hosted = [node for node, value in values.items() if value.device.type == "cpu"]
        self._staging = self._recorder.staging(size_of(hosted))
        self._hosted = _side_by_side(hosted, self._staging.host)
        self._locations = _side_by_side(hosted, self._staging.device)
        for node in values:
            if node not in self._hosted:
                self._locations[node] = torch.empty(
                    node.shape, dtype=node.dtype, device=self._device
                )

    def _record(self, states: Sequence[Tensor]) -> Recording | None:
        values = list(self._template)
        for (slot, _), state in zip(self._states, states, strict=True):
            values[slot] = state
        for slot, node in self._inputs:
            values[slot] = self._locations[node]
        returned = [node for node in self._outputs if not node.is_in_state]
        locations = _side_by_side(returned, self._recorder.results(size_of(returned)))
        in_states = {}

        def run() -> list[Tensor]:
            copied = []
            for node, value in zip(self._outputs, self._run(values), strict=True):
                if node in locations:
                    copied.append(locations[node].copy_(value))
                else:
                    in_states[node] = _InState.locate(value, states)
            return copied

        try:
            recording = self._recorder.record(run)
        except torch.OutOfMemoryError as error:
            # What was half recorded holds memory that nothing gives back.
            raise DeviceError(
                f"the device ran out of memory while a run was recorded ({_line(error)}); start "
                "the process again with a smaller context (--context) or fewer answers at once"
            ) from error
        except RuntimeError as error:
            if isinstance(error, torch.AcceleratorError) and not _is_of_recording(error):
                raise DeviceError(f"{BROKEN} ({_line(error)}); start the process again") from error
            self.failure = _line(error)
            log.warning("runs are not recorded, and launched one by one: %s", self.failure)
            return None
        self.recorded, self._in_states = self.recorded + 1, in_states
        return recording


def _is_of_recording(error: Exception) -> bool:
    """Return whether the device is sound, and only what was asked of it cannot be recorded (codes
    900 to 908 of CUDA's runtime).
    """
    return "captur" in str(error)


def size_of(nodes: Iterable[Node]) -> int:
    """Bytes of their values, side by side."""
    return sum(-(-node.type.bytes // ALIGN) * ALIGN for node in nodes)


def _side_by_side(nodes: Iterable[Node], memory: Tensor) -> dict[Node, Tensor]:
    """Return where the value of each lies in such memory."""
    locations, offset = {}, 0
    for node in nodes:
        location = memory[offset : offset + node.type.bytes]
        locations[node], offset = (
            location.view(node.dtype).view(node.shape),
            offset + size_of([node]),
        )
    return locations


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
