"""The first rank's side: it starts the others, has them do what it does, and notices when one is
gone.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch
from torch import Tensor

from mtmd.base.cores import usable_cores
from mtmd.base.errors import DeviceError
from mtmd.base.group_signals import blocked_signals
from mtmd.base.heartbeat import waiting
from mtmd.environment import Launched
from mtmd.kernels.parallel.distributed import DistributedGroup, check_unused
from mtmd.kernels.parallel.shared_memory import new_memory
from mtmd.llm.batch import Batch
from mtmd.llm.engine.runner import PLANS
from mtmd.llm.state import Snapshot
from mtmd.options.load import LoadOptions
from mtmd.ranks.meeting import KEY, LOCALHOST, launcher_store, new_store, transport
from mtmd.ranks.signs import Watch
from mtmd.ranks.wire import Head, Wire

START_S = 120.0  # for a process that imports torch, perhaps on a busy machine
END_S = 5.0
log = logging.getLogger("mtmd.ranks")
CONTEXT = ("context", "context_slots", "sights")
BATCH = tuple(
    f.name
    for f in dataclasses.fields(Batch)
    if f.name not in ("answers", "cache", "images", "image_at", "adapters", *CONTEXT)
)


class Follower:
    """One of the other ranks, as the first one sees it."""

    def __init__(self, rank: int, wire: Wire, signs: Wire, process: subprocess.Popen[bytes] | None):
        """`wire` for orders and answers, `signs` for signs of life."""
        self.rank, self.wire, self.signs, self.process = rank, wire, signs, process
        self.answers: deque[Head] = deque()
        self.answered = threading.Condition()
        self.gone: str | None = None

    def cut_off(self) -> None:
        """Cut a rank off. Those who wait for it, in a collective or to send to it, get an error at
        once: of one that hangs, nobody would be.
        """
        self.wire.shut()
        if self.process is not None:
            self.process.kill()


class Ranks:
    """The ranks of one model, of which this process is the first. Raises DeviceError where they do
    not start.
    """

    def __init__(self, chosen: LoadOptions, opened_from: Sequence[Any], launched: Launched | None):
        """`launched`: somebody else has started the processes; else they are started here."""
        check_unused()
        self._process = os.getpid()
        self.size, self._lock = chosen.tp, threading.RLock()
        self.on_loss: list[Callable[[DeviceError], None]] = []
        self.fault: DeviceError | None = None
        self._closing, self._loss = False, threading.Event()
        self._watch = Watch({}, lambda *_: None)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._dropped: deque[dict[str, int]] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._caches = self._snapshots = 0
        self._numbers: weakref.WeakKeyDictionary[Snapshot, int] = weakref.WeakKeyDictionary()
        gloo = transport(chosen.device) == "gloo"
        memory = new_memory(self.size) if gloo and launched is None else None
        group: DistributedGroup | None = None
        try:
            store = self._meet(launched, memory)
            self._report("load", options=dataclasses.asdict(chosen), opened_from=opened_from)
            self._listen_to_all()
            with self._watch.work():
                self._wait("here")
                mine = None if memory is None else os.dup(memory)
                self.group = group = self._met(
                    lambda: DistributedGroup(store, 0, self.size, transport(chosen.device), mine)
                )
                self.on_loss.append(lambda _: self.group.give_up())
                self._wait("ready")
        except BaseException:
            self._abandon(group)
            raise
        finally:
            if memory is not None:
                os.close(memory)
        atexit.register(self.close)

    def _abandon(self, group: DistributedGroup | None) -> None:
        """Abandon ranks that were started and did not come to be."""
        self._closing = True
        self._watch.close()
        for process in self._processes.values():
            with suppress(BrokenPipeError), process:  # what it has not read
                process.kill()
        if group is not None:
            group.leave()

    def _listen_to_all(self) -> None:
        by_rank = {f.rank: f for f in self.followers}
        for follower in self.followers:
            threading.Thread(
                target=self._listen,
                args=(follower,),
                name=f"mtmd rank {follower.rank}",
                daemon=True,
            ).start()
        self._watch = Watch(
            {rank: f.signs for rank, f in by_rank.items()},
            lambda rank, why: self._lost(by_rank[rank], why),
        )
        self._watch.start()

    def _met(self, meet: Callable[[], DistributedGroup]) -> DistributedGroup:
        """The group. torch waits for long for a rank that is lost while they meet: another
        thread calls it.
        """
        made: Future[DistributedGroup] = Future()

        def run() -> None:
            try:
                made.set_result(meet())
            except BaseException as error:  # it is raised again where it is waited for
                made.set_exception(error)
            self._loss.set()

        threading.Thread(target=run, name="mtmd ranks meet", daemon=True).start()
        self._loss.wait()
        if made.done():
            return made.result()
        raise DeviceError(str(self.fault))

    def _meet(self, launched: Launched | None, memory: int | None) -> Any:
        """All ranks have begun, and wait for what they are to load. Their store."""
        key = secrets.token_bytes(32)
        address = (launched.address if launched else LOCALHOST, 0)
        with Listener(address, backlog=self.size, authkey=key) as listener:
            store = launcher_store(launched) if launched else new_store(self.size)
            location = {
                "address": list(listener.address),
                "key": key.hex(),
                "store": [LOCALHOST, store.port] if launched is None else None,
                "size": self.size,
                "memory": memory,
            }
            if launched:
                store.set(KEY, json.dumps(location))
            else:
                self._start(location)
            self.followers = self._accept(listener)
        return store

    def _start(self, location: dict[str, Any]) -> None:
        for rank in range(1, self.size):
            with blocked_signals():
                process = subprocess.Popen(
                    [sys.executable, "-m", "mtmd.follower"],
                    stdin=subprocess.PIPE,
                    pass_fds=() if location["memory"] is None else (location["memory"],),
                )
            self._processes[rank] = process
            assert process.stdin is not None
            process.stdin.write(json.dumps(location | {"rank": rank}).encode() + b"\n")
            process.stdin.flush()

    def _accept(self, listener: Listener) -> list[Follower]:
        """Accept the connection of every other rank; each says which it is."""
        result: dict[tuple[int, str], Wire] = {}
        accepted: deque[Connection] = deque()
        done = threading.Event()

        def accept() -> None:
            while not done.is_set():
                # who does not know the key, or goes away, keeps nobody out
                with suppress(OSError, EOFError, AuthenticationError):
                    accepted.append(listener.accept())

        threading.Thread(target=accept, name="mtmd ranks", daemon=True).start()
        end = time.monotonic() + START_S
        try:
            while len(result) < 2 * (self.size - 1):
                while accepted:
                    wire = Wire(accepted.popleft())
                    head, _ = wire.receive()
                    result[int(head["rank"]), str(head["kind"])] = wire
                ended = ((r, p.poll()) for r, p in self._processes.items())
                dead = [(rank, code) for rank, code in ended if code is not None]
                if dead or time.monotonic() > end:
                    why = (
                        f"rank {dead[0][0]} {_ended(dead[0][1])}"
                        if dead
                        else f"{START_S:g} s passed"
                    )
                    started = 1 + len({rank for rank, _ in result})
                    raise DeviceError(f"of {self.size} ranks, {started} have started: {why}")
                time.sleep(0.01)
        finally:
            done.set()
        return [
            Follower(rank, result[rank, "orders"], result[rank, "signs"], self._processes.get(rank))
            for rank in range(1, self.size)
        ]

    def _listen(self, follower: Follower) -> None:
        """Until the follower is gone."""
        try:
            while True:
                head, _ = follower.wire.receive()
                with follower.answered:
                    follower.answers.append(head)
                    follower.answered.notify_all()
                if head["kind"] == "error":
                    self._lost(follower, str(head["text"]))
        except (EOFError, OSError, ValueError):
            code = None
            if follower.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    code = follower.process.wait(1.0)
            self._lost(follower, _ended(code))

    def _lost(self, follower: Follower, why: str) -> None:
        with follower.answered:
            first, follower.gone = follower.gone is None, follower.gone or why
            follower.answered.notify_all()
        if not first or self._closing:
            return
        self.fault = self.fault or DeviceError(
            f"rank {follower.rank} of {self.size} {why}; start the process again"
        )
        log.error("%s", self.fault)
        follower.cut_off()
        self._loss.set()
        for report in self.on_loss:
            report(self.fault)

    def _report(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> None:
        with self._lock:
            if self.fault is not None:
                raise DeviceError(str(self.fault))
            drops = [self._dropped.popleft() for _ in range(len(self._dropped))]
            for follower in self.followers:
                try:
                    follower.wire.send(kind, tensors, drop=drops, **head)
                except (OSError, ValueError) as error:
                    self._lost(follower, f"cannot be reached ({type(error).__name__})")
            if self.fault is not None:
                raise DeviceError(str(self.fault))

    def _wait(self, kind: str) -> None:
        """Wait for an answer of every follower, while they give signs that their work goes on."""
        for follower in self.followers:
            with follower.answered, waiting():
                follower.answered.wait_for(lambda f=follower: f.answers or f.gone is not None)  # type: ignore[misc]
                if follower.gone is not None and not follower.answers:
                    raise DeviceError(f"rank {follower.rank} of {self.size} {follower.gone}")
                answer = follower.answers.popleft()
                if answer["kind"] != kind:
                    raise DeviceError(
                        f"rank {follower.rank} of {self.size} {answer.get('text', 'is lost')}"
                    )

    @contextmanager
    def _together(
        self, key: str, kind: str, tensors: Sequence[Tensor], **head: Any
    ) -> Iterator[None]:
        """Around this rank's part of a run. The first run of a plan begins when all are ready."""
        with self._lock:
            first = key not in self._known
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > PLANS:
                self._known.popitem(last=False)
            try:
                with self._watch.work():
                    self._report(kind, tensors, first=first, **head)
                    if not first:
                        yield
                        return
                    self._wait("ready")
                    with self.group.first_run():
                        yield
            except DeviceError as error:
                raise self._cause(error) from error

    def _cause(self, error: DeviceError) -> DeviceError:
        """Return what became of another rank says more than that it was missed."""
        end = time.monotonic() + 1.0
        while self.fault is None and time.monotonic() < end:
            time.sleep(0.01)
        if self.fault is not None:
            return DeviceError(str(self.fault))
        return DeviceError(f"{error} ({self._watch.reported()})")

    def forward(self, batch: Batch, cache: int) -> Any:
        optional = ("images", "image_at", *CONTEXT)
        names = [*BATCH, *(name for name in optional if getattr(batch, name) is not None)]
        tensors = [torch.as_tensor(getattr(batch, name)) for name in names]
        return self._together(
            f"forward {batch.shape}",
            "forward",
            tensors,
            names=names,
            answers=batch.answers,
            adapters=batch.adapters,
            cache=cache,
        )

    def encode(self, pixels: Tensor) -> Any:
        return self._together(f"encode {tuple(pixels.shape)}", "encode", [pixels])

    @contextmanager
    def checks(self) -> Iterator[None]:
        """Every rank runs the checks of a warm-up."""
        with self._lock, self.group.first_run(), self._watch.work():
            self._report("check")
            try:
                yield
            except DeviceError as error:
                raise self._cause(error) from error

    def new_cache(self) -> CacheMirror:
        with self._lock:
            self._caches += 1
            self._report("cache", number=self._caches)
            mirror = CacheMirror(self, self._caches)
            weakref.finalize(mirror, self._dropped.append, {"cache": self._caches})
            return mirror

    def snapshot(self, cache: int, slot: int, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshots += 1
            self._report("snapshot", cache=cache, slot=slot, number=self._snapshots)
            self._numbers[snapshot] = self._snapshots
            weakref.finalize(snapshot, self._dropped.append, {"snapshot": self._snapshots})

    def restore(self, cache: int, slot: int, snapshot: Snapshot) -> None:
        self._report("restore", cache=cache, slot=slot, number=self._numbers[snapshot])

    def clear(self, cache: int, slot: int) -> None:
        self._report("clear", cache=cache, slot=slot)

    def close(self) -> None:
        """End the others: at once where they do not end by themselves. Not by a child that was
        forked, at its end: they are its parent's.
        """
        if self._process != os.getpid():
            return
        # what waits for a rank that is lost may hold it yet
        stored = self._lock.acquire(timeout=-1 if self.fault is None else END_S)
        try:
            if self._closing:
                return
            self._closing = True
            for follower in self.followers:
                with suppress(OSError, ValueError):
                    follower.wire.send("end")
        finally:
            if stored:
                self._lock.release()
        atexit.unregister(self.close)
        for follower in self.followers:
            if follower.process is not None:
                try:
                    follower.process.wait(END_S)
                except subprocess.TimeoutExpired:
                    follower.process.kill()
                    follower.process.wait()
                assert follower.process.stdin is not None
                follower.process.stdin.close()
            with follower.answered:
                follower.answered.wait_for(lambda f=follower: f.gone is not None, END_S)  # type: ignore[misc]
            follower.wire.close()
        self._watch.close()
        self.group.leave()


class RunnerLead:
    """Describes what a `Runner` asks of the other ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def forward(self, batch: Batch) -> Any:
        assert isinstance(batch.cache.mirror, CacheMirror)
        return self._ranks.forward(batch, batch.cache.mirror.number)

    def new_cache(self) -> CacheMirror:
        return self._ranks.new_cache()


class CacheMirror:
    """The other ranks' parts of one cache."""

    def __init__(self, ranks: Ranks, number: int):
        self._ranks, self.number = ranks, number

    def clear(self, slot: int) -> None:
        self._ranks.clear(self.number, slot)

    def snapshot(self, slot: int, snapshot: Snapshot) -> None:
        self._ranks.snapshot(self.number, slot, snapshot)

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        self._ranks.restore(self.number, slot, snapshot)


def _ended(code: int | None) -> str:
    if code is None:
        return "is gone"
    return f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"


def threads_of_a_rank(chosen: LoadOptions) -> int:
    """CPU threads: what was asked for, or its part of the cores."""
    return chosen.threads or max(1, usable_cores().usable // chosen.tp)
