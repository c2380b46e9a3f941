"""A model that ranks share, which are threads: the first leads the others as it leads processes, by
the same words over the same kind of connections.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from ranks import Meeting, ThreadGroup
from test_engine_schedules import FAMILIES, Noise

from mtmd.base.heartbeat import Heartbeat
from mtmd.follower import Follower
from mtmd.kernels.backends import Cpu
from mtmd.kernels.parallel.shard import Sharding
from mtmd.llm.engine.runner import Runner
from mtmd.ranks import leader
from mtmd.ranks.signs import Signs, Watch
from mtmd.ranks.wire import Wire


class PatientGroup(ThreadGroup):
    def first_run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def give_up(self) -> None:
        self._meeting.barrier.abort()


def runner_of(name: str, group: ThreadGroup, pages: int) -> Runner:
    family = FAMILIES[name]
    runner = Runner(
        family,
        Noise(family),
        [Cpu(native=False)],
        dtype=torch.float32,
        context=256,
        sequences=3,
        sharding=Sharding(group),
    )
    runner.pages, runner.sharding = pages, Sharding(group)  # whose states have these pages
    return runner


class ThreadRanks(leader.Ranks):
    """Whose other ranks are threads, each with a `Follower` of its own."""

    def __init__(self, name: str, size: int, pages: int):
        self.size, self._lock = size, threading.RLock()
        self.on_loss = [lambda _: self.group.give_up()]
        self.fault, self._closing, self._loss = None, False, threading.Event()
        self._dropped, self._known = deque(), OrderedDict()
        self._caches = self._snapshots = 0
        self._numbers = WeakKeyDictionary()
        self.meeting, self.followers = Meeting(size), []
        self.group = PatientGroup(self.meeting, 0)  # type: ignore[assignment]
        self.threads: list[threading.Thread] = []
        self.led: list[Follower] = []
        ends = {rank: Pipe() for rank in range(1, size)}
        self._watch = Watch({rank: Wire(here) for rank, (here, _) in ends.items()}, self._miss)
        for rank in range(1, size):
            here, there = Pipe()
            signs = Signs(Wire(ends[rank][1]), Heartbeat(), lambda _: None)
            self.followers.append(leader.Follower(rank, Wire(here), Wire(ends[rank][0]), None))
            group = PatientGroup(self.meeting, rank)
            loaded: Any = SimpleNamespace(runner=runner_of(name, group, pages), encoder=None)
            self.led.append(Follower(loaded, group, Wire(there), signs))  # type: ignore[arg-type]
            self._start_thread(self._follow, self.led[-1])
            self._start_thread(self._listen, self.followers[-1])
        self._watch.start()

    def _miss(self, rank: int, why: str) -> None:
        self._lost(self.followers[rank - 1], why)

    def _start_thread(self, work: Any, subject: Any) -> None:
        self.threads.append(threading.Thread(target=work, args=(subject,), daemon=True))
        self.threads[-1].start()

    def _follow(self, led: Follower) -> None:
        led.signs.heart.count_this_thread()
        try:
            while (message := led.wire.receive())[0]["kind"] != "end":
                with torch.inference_mode():
                    led.follow(*message)
        except EOFError:  # it was cut off
            pass
        except BaseException as error:
            led.wire.send("error", text=repr(error))
            self.meeting.barrier.abort()
        led.wire.close()

    def end(self) -> None:
        self._closing = True
        for follower in self.followers:
            with suppress(OSError):
                follower.wire.send("end")
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        self._watch.close()
