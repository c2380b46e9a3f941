"""The ranks of one model as processes: torch.distributed, over gloo on CPUs and NCCL on NVIDIA and
AMD cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mtmd.base.errors import DeviceError
from mtmd.base.heartbeat import waiting
from mtmd.kernels.parallel.shared_memory import SharedMemory

WAIT_S = 8.0  # for the other ranks at a sum; all have the same work
T = TypeVar("T")
FIRST_WAIT_S = 600.0  # in the first run of a plan, where others may still compile


@dataclass
class _Process:
    meets: bool = False  # or did, in vain: torch counts its groups by then


_process = _Process()


def check_unused() -> None:
    """Raises DeviceError where this process is one of several already, or was to be."""
    if _process.meets:
        raise DeviceError(
            "this process was to be one of several ranks, of which one was lost while they met: "
            "start another process"
        )
    if dist.is_initialized():
        raise DeviceError(
            "this process is one of several ranks already, of which torch.distributed has one set "
            "at a time: close the model that has them (model.loaded.close()), or start another "
            "process"
        )


class DistributedGroup:
    """All ranks that meet at `store`. Raises DeviceError, also from every collective, where one
    does not come. `memory`: of `new_memory`, which ranks on one machine have for values on the CPU.
    """

    def __init__(self, store: Any, rank: int, size: int, backend: str, memory: int | None = None):
        self.rank, self.size = rank, size
        self._memory = None if memory is None else SharedMemory(memory, rank, size)
        _process.meets = True
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=FIRST_WAIT_S),
            )
            self._patient: Any = dist.group.WORLD
            self._strict: Any = dist.new_group(timeout=timedelta(seconds=WAIT_S))
        except RuntimeError as error:
            raise DeviceError(f"the {size} ranks did not meet: {_reason(error)}") from error
        _process.meets = False
        self._now = self._patient
        self.bytes = 0
        """Handed to collectives so far, by this rank."""

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Ranks may be far apart meanwhile."""
        self._now = self._patient
        try:
            yield
        finally:
            self._now = self._strict

    def sum(self, x: Tensor) -> Tensor:
        self.bytes += x.nbytes
        memory = self._memory
        if memory is not None and memory.takes(x.nbytes):
            return self._together(lambda _: memory.sum(x, self._patience))
        self._together(lambda group: dist.all_reduce(x, group=group))
        return x

    def gather(self, x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        """Ranks with fewer send what the largest has: every part is of one size on its way."""
        self.bytes += x.nbytes
        maximum, memory = max(sizes), self._memory
        if memory is not None and memory.takes(x.nbytes // x.shape[axis] * maximum):
            return self._together(lambda _: memory.gather(x, axis, sizes, self._patience))
        if x.shape[axis] < maximum:
            shape = [*x.shape]
            shape[axis] = maximum - x.shape[axis]
            x = torch.cat((x, x.new_zeros(shape)), axis)
        parts = [torch.empty_like(x) for _ in sizes]
        self._together(lambda group: dist.all_gather(parts, x, group=group))
        return torch.cat(
            [p.narrow(axis, 0, size) for p, size in zip(parts, sizes, strict=True)], axis
        )

    @property
    def _patience(self) -> float:
        """Seconds."""
        return FIRST_WAIT_S if self._now is self._patient else WAIT_S

    def give_up(self) -> None:
        """A rank is gone: the others do not wait for it."""
        if self._memory is not None:
            self._memory.give_up()

    def _together(self, collective: Callable[[Any], T]) -> T:
        """Run together without a reference to the group in the frames of an error."""
        if self._now is None:
            raise DeviceError(f"{self} has left the others; load the model again")
        try:
            with waiting():
                return collective(self._now)
        except (RuntimeError, ValueError, OSError) as error:  # ValueError: left meanwhile
            raise self._lost(error) from error.with_traceback(None)

    def _lost(self, error: Exception) -> DeviceError:
        if any(word in str(error).lower() for word in ("timeout", "timed out")):
            return DeviceError(
                f"{self} has waited {self._patience:g} s for the others in vain; start the process "
                "again"
            )
        return DeviceError(f"{self} has lost the others: {_reason(error)}; start the process again")

    def leave(self) -> None:
        """When this returns, the threads of the group have ended. They live as long as anything
        refers to it, and let go of tensors: those that do so while the interpreter is torn down
        end the process by SIGABRT (github.com/pytorch/pytorch/pull/179291).
        """
        self._patient = self._strict = self._now = self._memory = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _reason(error: Exception) -> str:
    """torch's messages have the source line first and the callers last."""
    text = str(error).split("\n")[0]
    return text.rpartition("] ")[2][:200] or type(error).__name__
