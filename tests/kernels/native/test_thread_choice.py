"""Threads by measurement: runs whose times are given."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_program import mixes

from mtmd.kernels.cpu.native.pool import Pool, thread_choice
from mtmd.kernels.cpu.native.thread_choice import KEPT, ThreadChoice


def drive(choice: ThreadChoice, seconds: dict[int, float], runs: int = 100) -> list[int]:
    """The threads of so many runs that take these times, now and then longer."""
    draw, asked = random.Random(0), []
    for _ in range(runs):
        threads = choice.next()
        asked.append(threads)
        choice.took(threads, seconds[threads] * draw.choice((1, 1, 1.05, 3)))
    return asked


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0}, 1),
        ({2: 1.0, 1: 1.9}, 2),
        ({2: 1.0, 1: 0.7}, 1),
        ({8: 1.0, 4: 0.8, 2: 0.9, 1: 1.7}, 4),
        ({6: 1.0, 3: 1.1, 1: 0.5}, 1),
    ],
)
def test_the_fastest_is_chosen(seconds: dict[int, float], best: int) -> None:
    choice = ThreadChoice(max(seconds))
    asked = drive(choice, seconds)
    assert choice.settled
    assert choice.best == best
    assert set(asked[12:]) == {best}


def test_no_fewer_are_tried_than_is_worth_it() -> None:
    seconds = {16: 1.0, 8: 1.9, 4: 3.7, 2: 7.0, 1: 14.0}
    choice = ThreadChoice(16)
    assert set(drive(choice, seconds)) == {16, 8}
    assert set(choice.seconds) == {16, 8}


def test_it_follows_the_machine() -> None:
    choice = ThreadChoice(2)
    drive(choice, {2: 1.0, 1: 1.5})
    assert choice.best == 2
    drive(choice, {2: 3.0, 1: 1.5}, KEPT + 10)
    assert choice.best == 1


def test_what_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.kernels.threads._asked.threads", 2)
    assert set(drive(thread_choice(Pool(2)), {2: 2.0, 1: 1.0})) == {2}
    assert set(drive(thread_choice(Pool(4)), {4: 2.0, 2: 1.5, 1: 1.0})) == {4, 2, 1}


def test_any_number_of_threads_does_all_the_work() -> None:
    """Also where those who helped in the last run come late to one that is its owner's alone."""
    pool, draw = Pool(3), random.Random(1)
    program, memory, expected = mixes(40, 3)
    frame = program.frame(3)
    for _ in range(300):
        threads = draw.choice((1, 2, 3))
        memory[1:] = np.nan
        frame.open([memory.ctypes.data], memory, alone=threads == 1)
        assert pool.run(frame, threads)
        if not frame.close():  # somebody is in it still, and writes what nobody reads
            memory = memory.copy()
            frame = program.frame(3)
            continue
        np.testing.assert_array_equal(memory[-1], expected)
    pool.close()
