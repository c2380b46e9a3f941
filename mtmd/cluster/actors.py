"""Actors of a Ray cluster: started, given tasks, and watched."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.base.text import one_line
from mtmd.batch.output import Row
from mtmd.cluster.connect import PoolSize, describe, nodes
from mtmd.cluster.locations import without_secrets
from mtmd.cluster.manifest import Unit
from mtmd.cluster.schedule import UNITS_PER_ACTOR, Task
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.listing import Listed, Shard, list_shard
from mtmd.cluster.worker import Failed, Job, Loaded, Worker, Written

MAX_LISTING = 64  # shards at once
MAX_DOUBTS = 32  # actors that are asked at once
DOUBT_S, PAUSE_S = 60.0, 0.2
REASON_CHARS = 300


@dataclass(frozen=True)
class Result:
    """The value of a call to an actor; `task` is None for those of its start: the name of its
    machine, and that it has loaded.
    """

    actor: int
    task: Task | None
    value: str | Loaded | Written | Row | Failed


@dataclass(frozen=True)
class Ended:
    """The actor is gone. `blame`: its work may be the cause."""

    actor: int
    reason: str
    blame: bool


class Actors:
    """Actors of `size` for `job`; `ray` is connected."""

    def __init__(self, ray: Any, job: Job, size: PoolSize):
        self._ray, self._job, self._size = ray, job, size
        self._worker = ray.remote(Worker)
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, Task | None]] = {}
        self._threads = ThreadPoolExecutor(MAX_DOUBTS, "mtmd actors")
        self._doubts: dict[int, Future[Exception | None]] = {}
        """By actor whose connection broke, why."""

    def start(self, host_bytes: int) -> int:
        """Start one, which loads, and return its number. `host_bytes` of memory are reserved, as
        far as a machine has so many.
        """
        number, resources = next(self._numbers), dict[str, Any]()
        if self._size.gpus:
            resources["num_gpus"] = self._size.gpus
        if host_bytes:
            maximum = max((node.get("memory", 0) for node in nodes(self._ray)), default=0)
            resources["memory"] = min(host_bytes, int(maximum))
        actor = self._worker.options(
            scheduling_strategy="SPREAD",
            max_concurrency=UNITS_PER_ACTOR + 1,
            num_cpus=self._size.cpus,
            **resources,
        ).remote(self._job, self._size.threads)
        self._actors[number] = actor
        self._calls[actor.host.remote()] = number, None
        self._calls[actor.load.remote()] = number, None
        return number

    def give(self, actor: int, task: Task, unit: Unit) -> None:
        if actor in self._doubts:  # it loses this task with the others
            return
        handle = self._actors[actor]
        if task.row is None:
            call = handle.run.remote(unit)
        else:
            call = handle.answer.remote(unit.items[task.row])
        self._calls[call] = actor, task

    def wait(self, seconds: float) -> list[Result | Ended]:
        """Return what has happened since the last call, at once where there is something."""
        ray = self._ray
        known = [actor for actor, why in self._doubts.items() if why.done()]
        events: list[Result | Ended] = [
            self._end(actor, self._doubts.pop(actor).result()) for actor in known
        ]
        if not self._calls:
            time.sleep(0 if events else PAUSE_S)
            return events
        ray.wait(list(self._calls), num_returns=1, timeout=0 if events else seconds)
        for call in ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0]:
            if call not in self._calls:  # of an actor that has ended just now
                continue
            actor, task = self._calls.pop(call)
            try:
                value = ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                self._forget_calls(actor)
                self._doubts[actor] = self._threads.submit(self._cause, self._actors[actor])
            except ray.exceptions.RayError as error:
                events.append(self._end(actor, error))
            else:
                events.append(Result(actor, task, value))
        return events

    def needs(self) -> str:
        """Return what an actor that has no machine may be waiting for."""
        gpus = f" and {self._size.gpus} GPUs" if self._size.gpus else ""
        return (
            f"each takes {self._size.cpus} CPUs{gpus}, and the cluster has "
            f"{describe(nodes(self._ray))}"
        )

    def _end(self, actor: int, error: Exception | None) -> Ended:
        """End an actor, also one that lives out of reach: what it still writes is never written
        over by another one.
        """
        handle = self._actors.pop(actor)
        self._forget_calls(actor)
        self._ray.kill(handle)
        if error is None:
            return Ended(actor, "it could not be reached", blame=False)
        return Ended(actor, one_line(reason(error), REASON_CHARS), may_be_work(error))

    def _forget_calls(self, actor: int) -> None:
        self._calls = {call: of for call, of in self._calls.items() if of[0] != actor}

    def _cause(self, handle: Any) -> Exception | None:
        """Return why the connection to an actor broke, which Ray knows a little later; None where
        it lives, or is out of reach.
        """
        ray, end = self._ray, time.monotonic() + DOUBT_S
        while (left := end - time.monotonic()) > 0:
            try:
                ray.get(handle.__ray_ready__.remote(), timeout=left)
                return None
            except ray.exceptions.GetTimeoutError:
                return None
            except ray.exceptions.ActorUnavailableError:
                time.sleep(PAUSE_S)
            except ray.exceptions.RayError as error:
                return cast(Exception, error)
        return None


def reason(error: Exception) -> str:
    """Return why an actor ended, without the stack of another machine."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False) and lines:
        return lines[-1]
    return " ".join(line for line in lines if not line.startswith(("class_name:", "actor_id:")))


def may_be_work(error: Exception) -> bool:
    """Return whether an actor's work may be why it ended: always where it raised, never where its
    machine is gone.
    """
    if hasattr(error, "cause"):
        return True
    return not (getattr(error, "preempted", False) or "its node has died" in str(error))


def list_on_cluster(ray: Any, shards: Sequence[Shard], columns: Columns) -> Iterator[Listed]:
    """Yield the pictures of each tar or Parquet file, in order, listed by many machines. Raises
    OptionError and DeviceError.
    """
    listed = ray.remote(_list_shard)
    waiting, calls = iter(shards), deque[tuple[str, Any]]()
    while True:
        while len(calls) < MAX_LISTING and (shard := next(waiting, None)) is not None:
            calls.append((shard[0], listed.remote(shard, columns)))
        if not calls:
            return
        source, call = calls.popleft()
        try:
            result = ray.get(call)
        except ray.exceptions.RayError as error:
            raise DeviceError(
                f"{without_secrets(source)}: cannot be listed, its process ended "
                f"({one_line(reason(error), REASON_CHARS)}); --resume goes on"
            ) from error
        if isinstance(result, Failed):
            raise result.error()
        yield result


def _list_shard(shard: Shard, columns: Columns) -> Listed | Failed:
    try:
        return list_shard(shard, columns)
    except MtmdError as error:
        return Failed(str(error), isinstance(error, OptionError))
