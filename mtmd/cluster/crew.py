"""Actors on a Ray cluster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.base.text import one_line
from mtmd.cluster.connect import Seats, told
from mtmd.cluster.job import Ended, Given
from mtmd.cluster.places import without_secrets
from mtmd.cluster.schedule import AT_ONCE, Task
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.listing import Listed, Shard, list_shard
from mtmd.cluster.units import Unit
from mtmd.cluster.worker import Failed, Job, Worker

LISTED_AT_ONCE = 64
DOUBT_S, ASK_S = 60.0, 0.2
WHY_CHARS = 300


class RayCrew:
    """A crew of `seats` for `job`; `ray` is connected."""

    def __init__(self, ray: Any, job: Job, seats: Seats):
        self._ray, self._job, self._seats = ray, job, seats
        self._worker = ray.remote(Worker)
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, Task | None]] = {}
        self._doubts: dict[int, float] = {}
        """Of actors that do not answer, until when they are asked whether they live."""

    def start(self, host_bytes: int) -> int:
        number = next(self._numbers)
        asked: dict[str, Any] = {"num_cpus": self._seats.cpus, "max_concurrency": AT_ONCE + 1}
        if self._seats.gpus:
            asked["num_gpus"] = self._seats.gpus
        if host_bytes:  # as the first one has found a place, more than there is can be no need
            most = max((node.get("memory", 0) for node in nodes(self._ray)), default=0)
            asked["memory"] = min(host_bytes, int(most))
        actor = self._worker.options(scheduling_strategy="SPREAD", **asked).remote(
            self._job, self._seats.threads
        )
        self._actors[number] = actor
        self._calls[actor.begin.remote()] = number, None
        self._calls[actor.load.remote()] = number, None
        return number

    def give(self, actor: int, task: Task, unit: Unit, rows: Sequence[Any]) -> None:
        if actor in self._doubts:  # it gives back what it has, this too
            return
        handle = self._actors[actor]
        if task.write:
            call = handle.write.remote(unit, rows)
        elif task.row is not None:
            call = handle.answer.remote(unit.items[task.row])
        else:
            call = handle.run.remote(unit)
        self._calls[call] = actor, task

    def wait(self, seconds: float) -> list[Given | Ended]:
        ray, found = self._ray, list[Given | Ended]()
        late = [actor for actor, until in self._doubts.items() if time.monotonic() > until]
        if late:
            return [self._end(actor, None) for actor in late]
        if not ray.wait(list(self._calls), num_returns=1, timeout=seconds)[0]:
            return found
        for call in ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
            if call not in self._calls:  # of an actor that has ended just now
                continue
            actor, task = self._calls.pop(call)
            try:
                result = ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                self._ask_again(actor)
            except ray.exceptions.RayError as error:
                found.append(self._end(actor, error))
            else:
                if actor in self._doubts:  # which may have lost what it had
                    found.append(self._end(actor, None))
                else:
                    found.append(Given(actor, task, result))
        return found

    def _ask_again(self, actor: int) -> None:
        """Of an actor that does not answer, whether it lives: its connection breaks before it is
        said that its process, or its machine, has ended.
        """
        self._doubts.setdefault(actor, time.monotonic() + DOUBT_S)
        time.sleep(ASK_S)
        self._forget_calls(actor)
        self._calls[self._actors[actor].__ray_ready__.remote()] = actor, None

    def _end(self, actor: int, error: Exception | None) -> Ended:
        """Also where it lives, out of reach: what it still writes is what another one would."""
        self._ray.kill(self._actors.pop(actor))
        self._forget_calls(actor)
        self._doubts.pop(actor, None)
        if error is None:
            return Ended(actor, "it could not be reached", blame=False)
        return Ended(actor, one_line(reason(error), WHY_CHARS), is_to_blame(error))

    def _forget_calls(self, actor: int) -> None:
        for call in [call for call, (of, _) in self._calls.items() if of == actor]:
            del self._calls[call]

    def lacks(self) -> str:
        needs = f"{self._seats.cpus} CPUs"
        needs += f" and {self._seats.gpus} GPUs" if self._seats.gpus else ""
        return f"each takes {needs}, and the cluster has {told(nodes(self._ray))}"


def reason(error: Exception) -> str:
    """Without the stack of another machine."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False) and lines:
        return lines[-1]
    return " ".join(line for line in lines if not line.startswith(("class_name:", "actor_id:")))


def is_to_blame(error: Exception) -> bool:
    """Whether what an actor did may be why it ended: not where its machine is gone, or out of
    reach. What it raised is its own.
    """
    if hasattr(error, "cause"):
        return True
    gone = getattr(error, "preempted", False) or "its node has died" in str(error)
    return not (gone or type(error).__name__ == "ActorUnavailableError")


def nodes(ray: Any) -> list[dict[str, float]]:
    """What each machine has that is there."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def listing(ray: Any, shards: Sequence[Shard], columns: Columns) -> Iterator[Listed]:
    """The pictures of each tar or Parquet file, in order, listed by many machines. Raises
    OptionError and DeviceError.
    """
    listed = ray.remote(_listed)
    waiting, calls = iter(shards), deque[tuple[str, Any]]()
    while True:
        while len(calls) < LISTED_AT_ONCE and (shard := next(waiting, None)) is not None:
            calls.append((shard[0], listed.remote(shard, columns)))
        if not calls:
            return
        source, call = calls.popleft()
        try:
            found = ray.get(call)
        except ray.exceptions.RayError as error:
            raise DeviceError(
                f"{without_secrets(source)}: cannot be listed, its process ended "
                f"({one_line(reason(error), WHY_CHARS)}); --resume goes on"
            ) from error
        if isinstance(found, Failed):
            raise found.error()
        yield found


def _listed(shard: Shard, columns: Columns) -> Listed | Failed:
    try:
        return list_shard(shard, columns)
    except MtmdError as error:
        return Failed(str(error), isinstance(error, OptionError))
