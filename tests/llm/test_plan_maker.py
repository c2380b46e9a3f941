"""Plans made beside: decoding goes on meanwhile, prompts come in afterwards, whatever happens to the
plan.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import test_engine as small

from mtmd.base.errors import ModelError
from mtmd.base.heartbeat import Heartbeat
from mtmd.llm import plan_maker
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.engine import Engine
from mtmd.llm.plan_maker import Deferral, PlanMaker

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
    monkeypatch.setattr(plan_maker, "PATIENCE_S", 600.0)  # a test says when it is over


# ------------------------------------------------------------------------------ the maker alone


def test_what_is_asked_for_goes_before_what_is_foreseen(gate: Gate) -> None:
    plans = PlanMaker(gate)
    plans.foresee(SHAPES[:3])
    assert plans.foreseen == 3 and not gate.begun, "nobody has said that there is time"
    plans.set_idle(True)
    assert until(lambda: gate.begun)
    plans.ask(SHAPES[5])
    plans.ask(SHAPES[5])
    assert plans.is_asked(SHAPES[5]) and plans.is_asked(SHAPES[0]) and not plans.is_asked(SHAPES[6])
    gate.may.set()
    assert until(lambda: plans.made == 4)
    assert gate.begun == [SHAPES[0], SHAPES[5], *SHAPES[1:3]] and not plans.is_asked(SHAPES[5])
    assert len(set(gate.threads)) == 1 and plans.slowest_s >= 0


def test_what_is_foreseen_waits_while_others_are_busy(gate: Gate) -> None:
    gate.may.set()
    plans = PlanMaker(gate)
    plans.foresee(SHAPES[:3])
    plans.set_idle(False)
    plans.ask(SHAPES[7])
    assert until(lambda: plans.made == 1) and gate.begun == SHAPES[7:]
    plans.set_idle(True)
    assert until(lambda: plans.made == 4) and plans.foreseen == 0


def test_the_thread_ends_when_nothing_comes_and_another_begins(gate: Gate) -> None:
    gate.may.set()
    plans = PlanMaker(gate)
    for shape in SHAPES[:2]:
        plans.ask(shape)
        assert until(lambda: plans._thread is None)
    assert gate.begun == SHAPES[:2] and len(set(gate.threads)) == 2


def test_closing_lets_a_plan_end_and_begins_no_other(gate: Gate) -> None:
    plans = PlanMaker(gate)
    plans.ask(SHAPES[0])
    assert until(lambda: gate.begun)
    plans.ask(SHAPES[1])
    plans.close()
    plans.ask(SHAPES[2])
    plans.foresee(SHAPES[3:])
    gate.may.set()
    plans.join()
    assert gate.begun == SHAPES[:1] and plans.made == 1 and not plans.is_asked(SHAPES[1])


def test_an_error_of_one_that_was_foreseen_is_told_and_of_one_asked_for_left_to_who_needs_it(
    gate: Gate,
) -> None:
    told: list[Exception] = []
    gate.may.set()
    gate.error = ModelError("no such op")
    plans = PlanMaker(gate, failed=told.append)
    plans.ask(SHAPES[0])
    assert until(lambda: gate.begun and not plans.is_asked(SHAPES[0])) and not told
    plans.foresee(SHAPES[1:])
    plans.set_idle(True)
    assert until(lambda: told) and told == [gate.error]
    assert gate.begun == SHAPES[:2] and not plans.foreseen and plans.made == 0


def test_who_makes_a_plan_waits_for_one_that_is_begun_and_for_no_other(gate: Gate) -> None:
    plans = PlanMaker(gate)
    plans.ask(SHAPES[0])
    assert until(lambda: gate.begun)
    plans.ask(SHAPES[1])
    plans.take(SHAPES[1])
    plans.take(SHAPES[2])
    assert not plans.is_asked(SHAPES[1])
    taken = threading.Thread(target=plans.take, args=(SHAPES[0],))
    taken.start()
    taken.join(0.05)
    assert taken.is_alive()
    gate.may.set()
    taken.join(60)
    assert not taken.is_alive() and gate.begun == SHAPES[:1]


def test_signs_of_life_are_those_of_who_waits_and_of_nobody_else(gate: Gate) -> None:
    """A hang of the maker is one of who waits for it; work of the maker hides no other hang."""
    plans, waiting, free = PlanMaker(gate), Heartbeat(), Heartbeat()
    plans.ask(SHAPES[0])
    assert until(lambda: gate.begun)

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


def test_a_plan_is_waited_for_and_another_and_then_none(gate: Gate) -> None:
    deferral = Deferral(PlanMaker(gate))
    assert not deferral.lasts and deferral.begin(SHAPES[0]) and deferral.lasts
    gate.may.set()
    assert until(lambda: not deferral.lasts)
    assert not deferral.begin(SHAPES[0]), "made and thrown away, or failed"
    assert deferral.begin(SHAPES[1]) and not deferral.begin(SHAPES[2])
    deferral.end()
    assert not deferral.lasts and deferral.begin(SHAPES[2])


def test_nobody_waits_for_long(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = PlanMaker(gate)
    deferral = Deferral(plans)
    assert deferral.begin(SHAPES[0]) and deferral.lasts
    monkeypatch.setattr(plan_maker, "PATIENCE_S", 0.0)
    assert not deferral.lasts and plans.is_asked(SHAPES[0]) and not deferral.begin(SHAPES[1])
    plans.slowest_s = 600.0
    assert deferral.lasts, "plans take long"


def test_a_thread_that_ends_leaves_the_plan_of_the_next_alone(gate: Gate) -> None:
    plans = PlanMaker(gate)
    last, ended = plans._next, threading.Event()

    def then_another_is_asked_for() -> object:
        found = last()
        if found is None and len(gate.begun) == 1:
            gate.may.clear()
            plans.ask(SHAPES[1])
            assert until(lambda: len(gate.begun) == 2)
            threading.Timer(0.05, ended.set).start()
        return found

    with patch.object(plans, "_next", then_another_is_asked_for):
        gate.may.set()
        plans.ask(SHAPES[0])
        assert ended.wait(60) and until(lambda: not gate.threads[0].is_alive())
        assert plans.is_asked(SHAPES[1]), "it is being made: nobody is to make it again meanwhile"
        gate.may.set()
        assert until(lambda: plans.made == 2)
        plans.close()
        plans.join()


def test_where_no_thread_can_be_had_nobody_waits_for_one(gate: Gate) -> None:
    plans = PlanMaker(gate)
    deferral = Deferral(plans)
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread")):
        deferral.begin(SHAPES[0])
        plans.foresee(SHAPES[1:2])
    assert not deferral.lasts and not plans.is_asked(SHAPES[0])
    plans.join()
    gate.may.set()
    plans.ask(SHAPES[2])
    assert until(lambda: plans.made == 1)
    plans.close()
    plans.join()


def test_a_thread_that_fails_leaves_nobody_waiting(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    plans = PlanMaker(gate, Mock(side_effect=MemoryError))
    plans.ask(SHAPES[0])
    assert until(lambda: plans._thread is None)
    assert not plans.is_asked(SHAPES[0]) and not gate.begun


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")
def test_a_fork_finds_nothing_locked(gate: Gate) -> None:
    """It waits for the plan that is being made; the child has a maker of its own."""
    plans = PlanMaker(gate)
    plans.ask(SHAPES[0])
    assert until(lambda: gate.begun)
    threading.Timer(0.05, gate.may.set).start()
    child = os.fork()
    if not child:
        try:
            plans.ask(SHAPES[1])
            os._exit(0 if until(lambda: plans.made == 2, 30) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0 and plans.made == 1


# ------------------------------------------------------------------------------- in an engine


def with_plans(gate: Gate, **chosen: Any) -> Engine:
    subject = small.engine(**chosen)
    gate.make = subject.runner.prepare
    plans = PlanMaker(gate)
    return Engine(subject.runner, plans=plans)


def answering(subject: Engine, count: int = 2, length: int = 90) -> list[Any]:
    """Sequences that have begun to answer, with all plans of their own; beside them, batches of 40
    rows are read, of which there is none.
    """
    result = [subject.submit(small.request(7, n, length)) for n in range(count)]
    while any(len(s.tokens) < 5 for s in result):
        subject.step()
    subject.batcher._beside = lambda _: 40
    return result


def deferred(subject: Engine, gate: Gate) -> None:
    """Steps until a plan is asked for, and none until it is being made: answers would end."""
    before = subject.deferred
    while subject.deferred == before:
        subject.step()
    assert until(lambda: bool(gate.begun))


def test_tokens_come_while_a_plan_is_made_and_the_prompt_after_it(gate: Gate) -> None:
    subject = with_plans(gate)
    first = answering(subject)
    held_up, written = subject.held_up, [len(s.tokens) for s in first]
    late = subject.submit(small.request(70, 3, 6))
    deferred(subject, gate)
    plain, read = len(subject.beside._plain), late.done
    for _ in range(20):
        subject.step()
    assert all(len(s.tokens) >= n + 20 for s, n in zip(first, written, strict=True))
    assert late.done == read == 0 and subject.deferred >= 20
    assert len(subject.beside._plain) >= min(plain + 20, 32), "steps of decoding as any other"
    assert subject.held_up == held_up and len(gate.begun) == 1
    gate.may.set()
    small.run(subject)
    assert late.tokens == small.alone(length=70, first=3, count=6)
    for n, sequence in enumerate(first):
        assert sequence.tokens == small.alone(length=7, first=n, count=90)
    assert {thread.name for thread in gate.threads} == {"mtmd plans"}


def test_what_waits_is_not_counted_as_read(gate: Gate) -> None:
    subject = with_plans(gate)
    answering(subject)
    for owner in "ab":
        subject.submit(replace(small.request(70, 3, 6), owner=owner))
    deferred(subject, gate)
    had = dict(subject.batcher._read._had)
    for _ in range(10):
        subject.step()
    assert subject.batcher._read._had == had
    gate.may.set()
    small.run(subject)
    assert subject.batcher.pages.held == 0


def test_a_prompt_gets_in_though_every_batch_has_a_new_shape(gate: Gate) -> None:
    """Two plans are waited for, and then it is made as ever."""
    subject = with_plans(gate)
    gate.may.set()
    gate.make = lambda _: None  # nor is it there when it is made
    answering(subject)
    assert subject._deferral is not None
    waited_for = subject._deferral._shapes
    subject.batcher._beside = lambda _: 40 + 8 * len(waited_for)
    late, deferred = subject.submit(small.request(70, 3, 6)), subject.deferred
    while not late.done:
        subject.step()
    assert subject.deferred >= deferred + 2 and len(gate.begun) == 2


def test_a_prompt_waits_for_a_slow_plan_no_longer_than_said(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = with_plans(gate)
    answering(subject)
    late = subject.submit(small.request(70, 3, 6))
    deferred(subject, gate)
    held_up = subject.held_up
    monkeypatch.setattr(plan_maker, "PATIENCE_S", 0.0)
    threading.Timer(0.1, gate.may.set).start()
    while not late.done:
        subject.step()
    assert gate.may.is_set() and len(gate.begun) == 1 and subject.held_up == held_up + 1


def test_a_step_without_prompts_in_between_changes_nothing(gate: Gate) -> None:
    subject = with_plans(gate)
    answering(subject)
    subject.batcher._beside = rows = Mock(return_value=40)
    late = subject.submit(small.request(70, 3, 6))
    deferred(subject, gate)
    deferral = subject._deferral
    assert deferral is not None and len(deferral._shapes) == 1
    rows.return_value = 0
    subject.step()
    assert len(deferral._shapes) == 1, "it is still waited for"
    subject.cancel(late)
    subject.step()
    assert not deferral._shapes, "nobody waits any more"


def test_an_error_comes_where_it_came_before(gate: Gate) -> None:
    """Made beside, the plan fails, and in the batch again: who asked hears of it, and no other."""
    subject = with_plans(gate)
    gate.may.set()
    gate.error = error = ModelError("no such op")
    first = answering(subject)
    late, prepare = subject.submit(small.request(70, 3, 6)), subject.runner.prepare

    def fails(shape: BatchShape) -> None:
        if shape.tokens >= 38:  # not where the others are read again, each by itself
            raise error
        prepare(shape)

    with patch.object(subject.runner, "prepare", fails):
        small.run(subject)
    assert (late.finish, late.error) == ("error", error)
    assert [(s.finish, s.error) for s in first] == [("length", None)] * 2


def test_who_leaves_while_a_plan_is_made_is_gone(gate: Gate) -> None:
    subject = with_plans(gate)
    first = answering(subject)
    late = subject.submit(small.request(70, 3, 6))
    deferred(subject, gate)
    subject.cancel(late)
    for _ in range(5):
        subject.step()
    assert subject.batcher.pages.held == sum(len(s.pages) for s in first)
    other = subject.submit(small.request(70, 4, 6))
    for sequence in first:
        subject.cancel(sequence)
    gate.may.set()
    small.run(subject)
    assert other.tokens == small.alone(length=70, first=4, count=6)


def test_where_nobody_waits_for_a_token_plans_are_made_at_once(gate: Gate) -> None:
    subject = with_plans(gate)
    late = subject.submit(small.request(70, 3, 6))
    small.run(subject)
    assert late.finish == "length" and not gate.begun and not subject.deferred


def test_a_maker_is_used_only_where_plans_may_be_made_beside(gate: Gate) -> None:
    subject = small.engine()
    subject.runner.lead = object()  # type: ignore[assignment]
    with patch.object(type(subject.runner), "new_cache", lambda _: subject.cache):
        assert Engine(subject.runner, plans=PlanMaker(gate)).plans is None
