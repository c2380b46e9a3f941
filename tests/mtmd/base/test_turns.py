"""Whose turn it is: nobody's many stand before another's one, and nothing stands idle."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from mtmd.base import turns as turns_module
from mtmd.base.turns import (
    Turns,
    acquire_turn,
    current_owner,
    prioritized,
    release_turn,
    set_owner,
    turn_released,
)


def play(turns: Turns, requested: list[tuple[str, int]], at_once: int) -> list[str]:
    """Owners in the order in which they had their turns; all wait before the first is let in."""
    order, lock, now, go = list[str](), threading.Lock(), Counter[str](), threading.Event()
    ready = threading.Event()

    def hold() -> None:
        with ExitStack() as resources:
            for _ in range(1 if turns._slots.total_weight else turns._slots.count):
                resources.enter_context(turns.one(turns._slots.total_weight or 1))
            ready.set()
            go.wait()

    def work(owner: str, weight: int) -> None:
        set_owner(owner)
        with turns.one(weight):
            with lock:
                order.append(owner)
                now["here"] += 1
                assert now["here"] <= at_once and current_owner() == owner
            with lock:
                now["here"] -= 1

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    ready.wait()
    for number, (owner, weight) in enumerate(requested, 1):
        threads.append(threading.Thread(target=work, args=(owner, weight)))
        threads[-1].start()
        while turns.waiting < number:
            pass
    go.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert turns.waiting == turns.at_work == 0
    return order


def test_threads_are_let_in_by_owner_in_turn() -> None:
    requested = [("a", 1)] * 6 + [("b", 1), ("c", 1), ("b", 1)]
    assert play(Turns(1), requested, 1) == ["a", "b", "c", "a", "b", "a", "a", "a", "a"]
    assert sorted(play(Turns(3), requested, 3)) == sorted(owner for owner, _ in requested)


def test_what_weighs_more_than_all_may_goes_alone() -> None:
    turns = Turns(4, 100)
    order = play(turns, [("a", 60), ("a", 60), ("b", 30), ("b", 500), ("c", 90)], 4)
    assert sorted(order) == list("aabbc")


def test_of_one_owner_there_are_so_many_at_a_time() -> None:
    turns = Turns(3, each=1)
    set_owner("a")
    first = turns.take()
    assert first and turns.take(within_s=0.0) is None and turns.waiting == 0
    set_owner("b")
    second = turns.take(within_s=0.0)
    assert second and turns.at_work == 2
    first()
    set_owner("a")
    again = turns.take(within_s=0.0)
    assert again
    again()
    second()
    set_owner("")
    assert turns.at_work == 0


def test_who_stops_waiting_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(1)
    first = turns.take()
    assert first

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def handed_over(*_: object) -> None:
        first()
        raise KeyboardInterrupt

    for wait in (interrupted, handed_over):  # at that moment it has its turn, and gives it back
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                turns.take()
        assert turns.waiting == 0
    assert turns.at_work == 0


def test_who_waits_gets_up_and_comes_back_in_turn() -> None:
    queue, other = Turns(1), Turns(1)
    acquire_turn(queue)
    first, done = other.take(), threading.Event()
    assert first

    def work() -> None:
        acquire_turn(queue)
        first()  # which the other thread waits for, and so has got up
        done.set()
        release_turn()
        release_turn()

    thread = threading.Thread(target=work)
    thread.start()
    with other.one():
        assert done.is_set()
    thread.join(20)
    assert not queue.waiting and queue.at_work == 1, "and sits again"
    with turn_released():
        assert queue.at_work == 0
        release_turn()
    assert queue.at_work == 1
    acquire_turn(queue)  # a request that was never ended
    assert queue.at_work == 1
    release_turn()
    with turn_released():
        pass
    assert queue.at_work == 0


def test_nobody_is_kept_by_who_sits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "ACQUIRE_S", 0.0)
    monkeypatch.setattr(turns_module, "PRIORITIZED_S", 0.0)
    queue = Turns(1)
    with queue.one(), prioritized():
        acquire_turn(queue)
        assert queue.at_work == 1 and queue.waiting == 0
        release_turn()
    assert queue.at_work == 0


def test_who_sits_down_waits_until_nobody_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two go first, of whom one ends earlier."""
    monkeypatch.setattr(turns_module, "PRIORITIZED_S", 60.0)
    queue, sits = Turns(1), threading.Event()

    def work() -> None:
        acquire_turn(queue)
        sits.set()
        release_turn()

    thread = threading.Thread(target=work)
    with prioritized():
        with prioritized():
            thread.start()
            while not queue.at_work:
                time.sleep(0.001)
        assert not sits.wait(0.1), "the other has not ended"
    thread.join(20)
    assert sits.is_set() and queue.at_work == 0
