"""Requests come, are given up and make way at random, over a model that ranks share: each is
answered as if it were alone on one. The first rank leads the others as it leads processes, by the
same words over the same kind of connection; the ranks are threads here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import Pipe
from random import Random
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from ranks import Meeting, ThreadGroup
from test_engine_schedules import FAMILIES, Noise, alone, request

from mtmd.follower import Follower
from mtmd.kernels.backends import Cpu
from mtmd.kernels.parallel.shard import Sharding
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.runner import Runner
from mtmd.ranks import leader
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
        self.fault, self._closing = None, False
        self._dropped, self._known = deque(), OrderedDict()
        self._caches = self._snapshots = 0
        self._numbers = WeakKeyDictionary()
        self.meeting, self.followers = Meeting(size), []
        self.group = PatientGroup(self.meeting, 0)  # type: ignore[assignment]
        self.threads: list[threading.Thread] = []
        self.led: list[Follower] = []
        for rank in range(1, size):
            here, there = Pipe()
            self.followers.append(leader.Follower(rank, Wire(here), None))
            group = PatientGroup(self.meeting, rank)
            loaded: Any = SimpleNamespace(runner=runner_of(name, group, pages), encoder=None)
            self.led.append(Follower(loaded, group, Wire(there)))  # type: ignore[arg-type]
            self._start_thread(self._follow, self.led[-1])
            self._start_thread(self._listen, self.followers[-1])

    def _start_thread(self, work: Any, subject: Any) -> None:
        self.threads.append(threading.Thread(target=work, args=(subject,), daemon=True))
        self.threads[-1].start()

    def _follow(self, led: Follower) -> None:
        try:
            while (message := led.wire.receive())[0]["kind"] != "end":
                with torch.inference_mode():
                    led.follow(*message)
        except BaseException as error:
            led.wire.send("error", text=repr(error))
            self.meeting.barrier.abort()
        led.wire.close()

    def end(self) -> None:
        self._closing = True
        for follower in self.followers:
            follower.wire.send("end")
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def preempted(name: str, size: int, seed: int) -> int:
    """Of eight requests, which are compared; how often one made way."""
    rng = Random(seed)
    pages = rng.choice((9, 11))
    ranks = ThreadRanks(name, size, pages)
    runner = runner_of(name, ranks.group, pages)  # type: ignore[arg-type]
    runner.lead = leader.RunnerLead(ranks)
    subject = Engine(runner)
    subject.batcher.tokens = rng.choice((20, 64))
    asked = []
    for _ in range(8):
        number = rng.randint(0, 11)
        asked.append((number, subject.submit(request(name, number))))
        for _ in range(rng.choice((0, 1, 4))):
            subject.step()
        if rng.random() < 0.2:
            subject.cancel(rng.choice(asked)[1])
    for _ in range(3000):
        if subject.busy:
            subject.step()
    for number, sequence in asked:
        assert sequence.finish in ("length", "cancelled")
        whole = alone(name, number)
        expected = whole if sequence.finish == "length" else whole[: len(sequence.tokens)]
        assert sequence.tokens == expected
    assert subject.batcher.pages.held == 0
    kept = {number for led in ranks.led for number in led.caches}
    ranks.end()
    assert kept == {1}
    assert [g for g in asked if g[1].finish == "cancelled"] or seed != 0
    return sum(sequence.preemptions for _, sequence in asked)


@pytest.mark.parametrize(("name", "size"), [*zip(FAMILIES, (3, 2, 2), strict=True)])
def test_eight_requests_over_ranks(name: str, size: int) -> None:
    assert sum(preempted(name, size, seed) for seed in range(2)) > 0
