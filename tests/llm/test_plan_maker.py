"""Plans of batches that are likely to come, made ahead on a thread of their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock, patch

import pytest
import test_engine as small

from mtmd.base.errors import ModelError
from mtmd.base.heartbeat import Heartbeat
from mtmd.llm import plan_maker
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.engine import Engine
from mtmd.llm.plan_maker import PlanMaker

SHAPES = [BatchShape(tokens) for tokens in range(1, 9)]


def until(true: Callable[[], object], within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class Gate:
    """Makes plans, each when it is let."""

    def __init__(self, make: Callable[[BatchShape], object] = lambda _: None):
        self.make, self.may = make, threading.Event()
        self.begun: list[BatchShape] = []
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None

    def __call__(self, shape: BatchShape) -> None:
        self.threads.append(threading.current_thread())
        self.begun.append(shape)
        assert self.may.wait(60)
        if self.error is not None:
            raise self.error
        self.make(shape)


@pytest.fixture
def gate() -> Iterator[Gate]:
    result = Gate()
    yield result
    result.may.set()
    assert until(lambda: not any(t.is_alive() for t in result.threads if t.name == "mtmd plans"))


@pytest.fixture(autouse=True)
def ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_maker, "IDLE_S", 0.2)
    monkeypatch.setattr(plan_maker, "LOOK_S", 0.01)


def started(gate: Gate, shapes: list[BatchShape]) -> PlanMaker:
    """A maker that has nothing else to do, and works on the first of its shapes."""
    plans = PlanMaker(gate)
    plans.foresee(shapes)
    plans.set_idle(True)
    assert until(lambda: gate.begun)
    return plans


def test_plans_are_made_only_while_there_is_nothing_else_to_do(gate: Gate) -> None:
    plans = PlanMaker(gate)
    plans.foresee(SHAPES[:3])
    assert plans.foreseen == 3 and not gate.begun
    plans.set_idle(True)
    assert until(lambda: gate.begun)
    plans.set_idle(False)
    gate.may.set()
    assert until(lambda: plans.made == 1) and plans.foreseen == 2
    plans.set_idle(True)
    assert until(lambda: plans.made == 3) and plans.foreseen == 0
    assert gate.begun == SHAPES[:3] and len(set(gate.threads)) == 1


def test_the_thread_ends_when_nothing_comes_and_another_begins(gate: Gate) -> None:
    gate.may.set()
    plans = PlanMaker(gate)
    plans.set_idle(True)
    for shape in SHAPES[:2]:
        plans.foresee([shape])
        assert until(lambda: plans._thread is None)
    assert gate.begun == SHAPES[:2] and len(set(gate.threads)) == 2


def test_closing_lets_a_plan_end_and_begins_no_other(gate: Gate) -> None:
    plans = started(gate, SHAPES[:2])
    plans.close()
    plans.foresee(SHAPES[3:])
    gate.may.set()
    plans.join()
    assert gate.begun == SHAPES[:1] and plans.made == 1 and not plans.foreseen


def test_after_an_error_no_more_plans_are_made(gate: Gate) -> None:
    failed: list[Exception] = []
    gate.may.set()
    gate.error = ModelError("no such op")
    plans = PlanMaker(gate, failed=failed.append)
    plans.foresee(SHAPES)
    plans.set_idle(True)
    assert until(lambda: failed) and failed == [gate.error]
    assert gate.begun == SHAPES[:1] and not plans.foreseen and plans.made == 0


def test_a_plan_that_is_being_made_is_waited_for_and_no_other(gate: Gate) -> None:
    plans = started(gate, SHAPES[:2])
    plans.take(SHAPES[1])
    plans.take(SHAPES[2])
    taken = threading.Thread(target=plans.take, args=(SHAPES[0],))
    taken.start()
    taken.join(0.05)
    assert taken.is_alive()
    gate.may.set()
    taken.join(60)
    assert not taken.is_alive()


def test_without_a_thread_batches_make_their_own_plans(gate: Gate) -> None:
    plans = PlanMaker(gate)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")):
        plans.foresee(SHAPES[1:2])
    assert not plans.foreseen
    plans.take(SHAPES[1])
    plans.join()
    gate.may.set()
    plans.set_idle(True)
    plans.foresee(SHAPES[2:3])
    assert until(lambda: plans.made == 1)
    plans.close()
    plans.join()


def test_a_thread_that_fails_leaves_nobody_waiting(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    plans = PlanMaker(gate, Mock(side_effect=MemoryError))
    plans.foresee(SHAPES[:1])
    assert until(lambda: plans._thread is None)
    plans.take(SHAPES[0])
    assert not gate.begun


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_fork_finds_nothing_locked(gate: Gate) -> None:
    """It waits for the plan that is being made; the child has a maker of its own."""
    plans = started(gate, SHAPES[:1])
    threading.Timer(0.05, gate.may.set).start()
    child = os.fork()
    if not child:
        try:
            plans.foresee(SHAPES[1:2])
            os._exit(0 if until(lambda: plans.made == 2, 30) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0 and plans.made == 1


def test_signs_of_life_are_those_of_who_waits_and_of_nobody_else(gate: Gate) -> None:
    """A hang of the maker is one of who waits for it; work of the maker hides no other hang."""
    plans, waiting, free = started(gate, SHAPES[:1]), Heartbeat(), Heartbeat()

    def take() -> None:
        waiting.count_this_thread()
        plans.take(SHAPES[0])

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.05)
    assert waiting.beats == 0, "the maker stands still"
    plans._heart.beats += 1
    assert until(lambda: waiting.beats) and free.beats == 0
    gate.may.set()
    thread.join(60)


# ------------------------------------------------------------------------------- in an engine


def test_a_maker_is_used_only_where_plans_may_be_made_beside(gate: Gate) -> None:
    subject = small.engine()
    subject.runner.lead = object()  # type: ignore[assignment]
    with patch.object(type(subject.runner), "new_cache", lambda _: subject.cache):
        assert Engine(subject.runner, plans=PlanMaker(gate)).plans is None
