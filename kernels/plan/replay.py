"""A plan's runs as replays of one that was recorded: nothing is launched by the host but the copy
of its inputs and the recording.

Inputs have memory of their own for that, in which every run finds them: all that come from the host
side by side, so that one copy brings them. States that a run writes in place (caches) are read
where they lie; for another cache a run is recorded anew. Outputs are copied for the caller, but for
those that lie in a state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mtmd.kernels.backends.recording import Recorder, Recording, Staging
from mtmd.kernels.errors import DeviceError
from mtmd.kernels.graph import Node, filled
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan import scheduler
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.text import mib

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
    if (taken := sum(plan.run_bytes.values())) > scheduler.MOST_RECORDED:
        most = mib(scheduler.MOST_RECORDED)
        return f"its values take {mib(taken)}, of which up to {most} are kept"
    return None


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
        in_states: Sequence[bool],
    ):
        """`in_states`: of each output, whether it lies in a state."""
        self._states = [(s, n) for s, n in inputs if n.attrs.get("state")]
        self._inputs = [(s, n) for s, n in inputs if not n.attrs.get("state")]
        self._template, self._run, self._recorder = template, run, recorder
        self._check, self._device, self._in_states = check, device, tuple(in_states)
        self._before, self._lock = BEFORE, Lock()
        self._places: dict[Node, Tensor] = {}  # on the device
        self._hosted: dict[Node, Tensor] = {}  # of those, what the host writes
        self._staging: Staging | None = None
        self._recording: Recording | None = None
        self._key: tuple[int, ...] = ()
        self.recorded = self.replayed = 0
        self.failure: str | None = None
        """Why recording failed; runs go on without."""

    def outputs(self, batch: Any) -> list[Tensor] | None:
        """Of one batch, in memory of their own or a state's; None where the run is to be made as
        ever.
        """
        with self._lock:
            if self.failure is not None:
                return None
            if self._before:
                self._before -= 1
                return None
            states = [self._filled(node, batch) for _, node in self._states]
            self._fill({node: self._filled(node, batch) for _, node in self._inputs})
            key = tuple(state.data_ptr() for state in states)
            if self._recording is None or key != self._key:
                self._recording, self._key = self._record(states), key
            if self._recording is None:
                return None
            try:
                self._recording.replay()
            except torch.AcceleratorError as error:
                raise DeviceError(f"{BROKEN} ({_line(error)}); start the process again") from error
            self.replayed += 1
            return [
                output if in_state else output.clone()
                for output, in_state in zip(self._recording.outputs, self._in_states, strict=True)
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
                late.append((self._places[node], value))
        self._staging.upload()
        for place, value in late:
            place.copy_(value)

    def _lay_out(self, values: Mapping[Node, Tensor]) -> None:
        hosted = {n: v for n, v in values.items() if v.device.type == "cpu"}
        offsets, size = [], 0
        for node in hosted:
            offsets.append(size)
            size += -(-node.type.bytes // ALIGN) * ALIGN
        self._staging = self._recorder.staging(size)
        for node, offset in zip(hosted, offsets, strict=True):
            self._hosted[node], self._places[node] = (
                side[offset : offset + node.type.bytes].view(node.dtype).view(node.shape)
                for side in (self._staging.host, self._staging.device)
            )
        for node in values:
            if node not in hosted:
                self._places[node] = torch.empty(node.shape, dtype=node.dtype, device=self._device)

    def _record(self, states: Sequence[Tensor]) -> Recording | None:
        values = list(self._template)
        for (slot, _), state in zip(self._states, states, strict=True):
            values[slot] = state
        for slot, node in self._inputs:
            values[slot] = self._places[node]
        try:
            recording = self._recorder.record(lambda: self._run(values))
        except torch.OutOfMemoryError as error:
            # What was half recorded holds memory that nothing gives back.
            raise DeviceError(
                f"the device ran out of memory while a run was recorded ({_line(error)}); start "
                "the process again with a smaller context (--context) or fewer answers at once"
            ) from error
        except torch.AcceleratorError as error:
            raise DeviceError(f"{BROKEN} ({_line(error)}); start the process again") from error
        except RuntimeError as error:
            self.failure = _line(error)
            log.warning("runs are not recorded, and launched one by one: %s", self.failure)
            return None
        self.recorded += 1
        return recording


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
