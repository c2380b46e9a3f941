"""Who is waited for and for how long: by signs that come or do not, and by whether work goes on. Time
passes by what a look is told, not by a clock.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from test_engine_schedules import alone, request
from thread_ranks import ThreadRanks, runner_of

from mtmd.base.errors import DeviceError
from mtmd.base.heartbeat import Heartbeat, waiting
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.engine import Engine
from mtmd.ranks import leader, signs
from mtmd.ranks.signs import SIGN_S, SILENT_S, STILL_S, Signs, Watch
from mtmd.ranks.wire import Wire

LONG = 10_000  # looks: some hours


class Looks:
    """A watch of ranks 1 and 2 whose signs the test gives, and whom it has lost."""

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}
        here: Any = None
        self.watch = Watch({1: here, 2: here}, self.lost.__setitem__)
        self.beats = 0

    def sign(self, rank: int, **changed: Any) -> None:
        head = {"doing": "preparing x", "at": "w", "beats": 0, "waits": False, "more_s": 0.0}
        self.watch.hear(rank, head | changed)

    def look(self, **of_the_first: Any) -> None:
        """The second is at work all the time."""
        self.beats += 1
        self.sign(2, beats=self.beats)
        if of_the_first:
            self.sign(1, **of_the_first)
        self.watch.look(SIGN_S)


def test_a_rank_that_gives_no_sign_is_lost_and_named() -> None:
    looks = Looks()
    with looks.watch.work():
        looks.look(beats=1, doing="preparing a batch of 7 tokens", at="blk.3.ffn_up.weight")
        for _ in range(int(SILENT_S / SIGN_S) - 1):
            looks.look()
        assert not looks.lost
        assert (
            "rank 1: preparing a batch of 7 tokens, at blk.3.ffn_up.weight"
            in looks.watch.reported()
        )
        assert f"heard of {SILENT_S - SIGN_S:.0f} s ago" in looks.watch.reported()
        looks.look()
        looks.look()
    assert [*looks.lost] == [1]
    assert "not responded for 8 s, last preparing a batch of 7 tokens" in looks.lost[1]
    assert "at blk.3.ffn_up.weight" in looks.lost[1]


def test_a_rank_whose_work_goes_on_is_waited_for() -> None:
    looks = Looks()
    with looks.watch.work():
        for number in range(LONG):
            looks.look(beats=number // 100)
    assert not looks.lost


@pytest.mark.parametrize("more_s", [0.0, 500.0])
def test_a_rank_whose_work_stands_still_hangs(more_s: float) -> None:
    looks = Looks()
    with looks.watch.work():
        looks.look(beats=5)
        for _ in range(int((STILL_S + more_s) / SIGN_S) - 1):
            looks.look(beats=5, more_s=more_s, at="kernel multiply")
        assert not looks.lost
        looks.look(beats=5, more_s=more_s, at="kernel multiply")
    assert f"hangs: it has stood still for {STILL_S + more_s:.0f} s" in looks.lost[1]
    assert "preparing x, at kernel multiply" in looks.lost[1]


@pytest.mark.parametrize("idle", [{"waits": True}, {"doing": None}])
def test_a_rank_that_waits_for_others_does_not_hang(idle: dict[str, Any]) -> None:
    looks = Looks()
    with looks.watch.work():
        for _ in range(LONG):
            looks.look(beats=5, **idle)
    assert not looks.lost


def test_nobody_is_missed_between_two_pieces_of_work() -> None:
    looks = Looks()
    for _ in range(LONG):
        looks.look()
    with looks.watch.work():
        for _ in range(int(SILENT_S / SIGN_S) - 1):
            looks.look()
        assert not looks.lost


def test_a_look_that_comes_late_counts_as_one_in_time() -> None:
    """This process was stopped, and the others with it."""
    looks = Looks()
    with looks.watch.work():
        looks.watch.look(3600.0)
        assert not looks.lost


def test_who_waits_for_the_others_is_not_taken_for_one_that_hangs() -> None:
    looks, heart = Looks(), Heartbeat()

    def first() -> None:
        heart.count_this_thread()
        with looks.watch.work():
            looks.look(beats=1)
            assert heart.beats == 0
            with waiting():
                looks.look(beats=1)
            assert heart.beats == 1 and not heart.waits

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert heart.beats == 1


def test_what_a_rank_tells_and_when_it_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "SIGN_S", 0.01)
    monkeypatch.setattr(signs, "SILENT_S", 0.2)
    here, there = (Wire(end) for end in Pipe())
    heart, ended, why = Heartbeat(), threading.Event(), list[str | None]()

    def gone(reason: str | None) -> None:
        why.append(reason)
        ended.set()

    heart.beats, heart.at = 3, "blk.0.attn_q"
    given = Signs(there, heart, gone)
    with given.work("running a batch"):
        while (head := here.receive()[0])["doing"] is None:
            pass
        assert head["beats"] == 3 and head["at"] == "blk.0.attn_q" and not head["waits"]
        assert ended.wait(60)  # nobody answers
    assert why[0] is not None and "nothing of the first" in why[0] and "running a batch" in why[0]

    here, there = (Wire(end) for end in Pipe())
    ended.clear()
    Signs(there, heart, gone)
    here.close()
    assert ended.wait(60) and why[1:] == [None]


def test_a_rank_that_takes_no_signs_does_not_stop_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signs are given while nothing is to be done, too: one that is stopped then fills up."""
    monkeypatch.setattr(signs, "SIGN_S", 0.001)
    (here, there), looked = (Wire(end) for end in Pipe()), threading.Semaphore(0)
    monkeypatch.setattr(Watch, "look", lambda *_: looked.release())
    os.set_blocking(here.connection.fileno(), False)
    with pytest.raises(BlockingIOError):
        while True:
            here.send("sign")
    os.set_blocking(here.connection.fileno(), True)
    watch = Watch({1: here}, lambda *_: None)
    watch.start()
    assert looked.acquire(timeout=60) and looked.acquire(timeout=60)
    watch.close()
    there.close()


def test_nobody_waits_in_torch_for_a_rank_that_is_lost_while_ranks_meet() -> None:
    ranks, never = ThreadRanks("windows, blocks", 2, 9), threading.Event()

    def meet() -> Any:
        threading.Thread(target=ranks._miss, args=(1, "is stopped")).start()
        never.wait()

    with pytest.raises(DeviceError, match="rank 1 of 2 is stopped"):
        ranks._met(meet)
    never.set()
    ranks.end()


def test_a_first_run_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a follower that prepares for several times as many looks as one without a sign has: each
    of them finds a sign of it. How long that takes is not asked.
    """
    monkeypatch.setattr(signs, "SIGN_S", 0.01)
    monkeypatch.setattr(signs, "SILENT_S", 600.0)
    result, long_enough = 0, threading.Event()
    own = Watch.look

    def look(self: Watch, passed_s: float) -> None:
        nonlocal result
        result += all(o.came and o.head["doing"] for o in self._others.values())
        own(self, passed_s)
        if result > 3 * SILENT_S / SIGN_S:
            long_enough.set()

    monkeypatch.setattr(Watch, "look", look)
    ranks = ThreadRanks("windows, blocks", 2, 9)
    prepared: list[BatchShape] = []
    for led in ranks.led:
        prepare = led.loaded.runner.prepare

        def slowly(shape: BatchShape, prepare: Any = prepare) -> None:
            assert long_enough.wait(60)
            prepared.append(shape)
            prepare(shape)

        monkeypatch.setattr(led.loaded.runner, "prepare", slowly)
    runner = runner_of("windows, blocks", ranks.group, 9)  # type: ignore[arg-type]
    runner.lead = leader.RunnerLead(ranks)
    subject = Engine(runner)
    sequence = subject.submit(request("windows, blocks", 0))
    while subject.busy:
        subject.step()
    assert sequence.tokens == alone("windows, blocks", 0) and prepared and ranks.fault is None
    ranks.end()


def test_a_forked_child_does_not_end_the_ranks_of_its_parent() -> None:
    """At its end it lets go of the model that it had from it."""
    reported: list[str] = []
    ranks: Any = leader.Ranks.__new__(leader.Ranks)
    ranks._process, ranks._lock = os.getppid(), threading.RLock()
    ranks.fault, ranks._closing = None, False
    ranks.followers = [SimpleNamespace(wire=SimpleNamespace(send=reported.append))]
    ranks.close()
    assert not reported and not ranks._closing
