"""Threads by measurement: runs whose times are given."""

from __future__ import annotations

import random

import pytest

from mtmd.kernels.plan.thread_choice import SAVED, ThreadChoice


def drive(choice: ThreadChoice, seconds: dict[int, float], runs: int = 100) -> list[int]:
    """The threads of so many runs that take these times, now and then longer."""
    draw, requested = random.Random(0), []
    for _ in range(runs):
        threads = choice.next()
        requested.append(threads)
        choice.took(threads, seconds[threads] * draw.choice((1, 1, 1.05, 3)))
    return requested


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
    requested = drive(choice, seconds)
    assert choice.settled
    assert choice.best == best
    assert set(requested[12:]) == {best}


def test_no_fewer_are_tried_than_is_worth_it() -> None:
    seconds = {16: 1.0, 8: 1.9, 4: 3.7, 2: 7.0, 1: 14.0}
    choice = ThreadChoice(16)
    assert set(drive(choice, seconds)) == {16, 8}
    assert set(choice.seconds) == {16, 8}


def test_it_follows_the_machine() -> None:
    choice = ThreadChoice(2)
    drive(choice, {2: 1.0, 1: 1.5})
    assert choice.best == 2
    drive(choice, {2: 3.0, 1: 1.5}, SAVED + 10)
    assert choice.best == 1


def test_what_was_asked_for_is_kept() -> None:
    assert set(drive(ThreadChoice(2, fixed=True), {2: 2.0, 1: 1.0})) == {2}
