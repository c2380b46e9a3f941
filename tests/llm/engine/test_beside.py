"""How much is read beside those who wait for their next token, over machines made of a formula.

Prompts come without a pause here, so that the only steps without them are those that are asked for:
a machine on which some answers pause is told more.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from random import Random

import pytest

from mtmd.llm.engine.batcher import Batcher
from mtmd.llm.engine.beside import (
    ALIKE,
    EARLY,
    FEW,
    FORGOTTEN,
    LONGER,
    MIDDLING,
    OTHERWISE,
    PLAIN,
    RARELY_S,
    SHORT_S,
    SIZES,
    SOON,
    TRIED,
    WORTH,
    Alone,
    Beside,
)
from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.sequence import Sequence

USED = 4
Machine = Callable[[int], float]
"""Seconds of a batch of so many rows; a step without prompts is one of USED."""
MACHINES: dict[str, Machine] = {
    "small model": lambda rows: 0.001 + 6e-5 * rows + 0.004 * (rows > 16),
    "weights read once": lambda rows: 0.050 + 1e-4 * rows,
    "every row costs": lambda rows: 0.020 * rows,
    "a GPU": lambda rows: 0.008 + 1e-6 * rows,
    "the first row of a prompt costs most": lambda rows: (
        0.010 + (rows > USED) * 0.015 + 2e-5 * rows
    ),
    "even more, and all others": lambda rows: 0.010 + (rows > USED) * 0.015 + 1e-4 * rows,
    "each size nearly a quarter longer": lambda rows: (
        0.010 if rows == USED else 0.030 * 1.24 ** log2(max(rows, 16) / 16)
    ),
    "each size more than a quarter longer": lambda rows: (
        0.010 if rows == USED else 0.030 * 1.3 ** log2(max(rows, 16) / 16)
    ),
}
LARGEST = {
    "small model": 16,
    "weights read once": 128,
    "every row costs": 16,
    "a GPU": 128,
    "the first row of a prompt costs most": 128,
    "even more, and all others": 128,
    "each size nearly a quarter longer": 128,
    "each size more than a quarter longer": 16,
}
"""The size that is right for each."""


def steady(subject: Beside, machine: Machine, batches: int, used: int = USED) -> list[int]:
    """Batches one after the other, a prompt waiting at each: the rows of all."""
    taken = []
    for _ in range(batches):
        taken.append(subject.rows(used))
        subject.ran(used, taken[-1], machine(taken[-1]))
    return taken


def read(taken: list[int], used: int = USED) -> int:
    """Tokens of prompts."""
    return sum(rows - used for rows in taken)


@pytest.mark.parametrize("name", MACHINES)
def test_a_batch_with_prompts_takes_at_most_twice_as_long(name: str) -> None:
    """Than one without, or 5 ms, or the least that can be read at once: but for those by which this
    is found out, and they are few.
    """
    machine = MACHINES[name]
    limit = max(SHORT_S, LONGER * machine(USED), LONGER * machine(SIZES[0]))
    taken = steady(Beside(), machine, 4 * FORGOTTEN)
    over = [number for number, rows in enumerate(taken) if machine(rows) > limit]
    assert len([n for n in over if n < FORGOTTEN]) <= 6
    assert len([n for n in over if n >= FORGOTTEN]) <= 3, "one in so many"
    assert all(machine(taken[n]) <= 2 * max(limit, machine(SIZES[0])) + 0.005 for n in over)


def test_sizes_alike_one_after_the_other_are_together_no_longer_than_that() -> None:
    assert ALIKE ** (len(SIZES) - 1) <= LONGER


@pytest.mark.parametrize("name", MACHINES)
def test_prompts_are_read_as_fast_as_that_allows(name: str) -> None:
    """Though no step is without prompts but those few by which is known how long they take."""
    taken = steady(Beside(), MACHINES[name], 2 * FORGOTTEN)
    assert taken[:2] == [USED, SIZES[0]], "nothing is known before"
    assert read(taken) > 0.9 * len(taken) * (LARGEST[name] - USED)
    assert taken.count(USED) <= FEW + 2 * FORGOTTEN // PLAIN


@pytest.mark.parametrize("name", ["a GPU", "the first row of a prompt costs most"])
def test_a_prompt_of_two_thousand_tokens_is_read_in_few_batches(name: str) -> None:
    """It took 500: nothing was learned without a pause."""
    subject, taken = Beside(), list[int]()
    while read(taken) < 2000:
        taken += steady(subject, MACHINES[name], 1)
    assert len(taken) <= 35


@pytest.mark.parametrize("first", range(25))
def test_one_bad_moment_costs_few_batches(first: int) -> None:
    """Whichever of the first batches it falls into: those by which the sizes become known."""
    number = -1

    def machine(rows: int) -> float:
        nonlocal number
        number += 1
        return 0.050 if number == first else MACHINES["a GPU"](rows)

    taken = steady(Beside(), machine, 100)
    assert set(taken[EARLY * FEW + 2 * SOON :]) <= {USED, SIZES[-1]}


@pytest.mark.parametrize("seed", range(4))
def test_bad_moments_now_and_then_cost_little(seed: int) -> None:
    rng, machine = Random(seed), MACHINES["a GPU"]
    taken = steady(Beside(), lambda rows: machine(rows) + 0.042 * (rng.random() < 0.05), 1000)
    assert read(taken) > 0.9 * len(taken) * (SIZES[-1] - USED)


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_others_use_gives_no_reason_to_let_people_wait(seed: int) -> None:
    rng, machine = Random(seed), MACHINES["small model"]
    # half of all batches are kept from the processor
    taken = steady(Beside(), lambda rows: machine(rows) + rng.choice((0.0, 0.03)), 1000)
    assert len([rows for rows in taken if rows > SIZES[0]]) < 0.2 * len(taken)
    assert taken.count(SIZES[1]) < 0.07 * len(taken)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_becomes_slower_or_faster_altogether_is_used_as_before(
    factor: float,
) -> None:
    machine, subject = MACHINES["weights read once"], Beside()
    steady(subject, machine, 300)
    taken = steady(subject, lambda rows: factor * machine(rows), 2 * FORGOTTEN)
    assert taken[FORGOTTEN:].count(SIZES[-1]) > 0.95 * FORGOTTEN


def test_where_rows_become_dear_less_is_read_after_a_few_batches() -> None:
    subject = Beside()
    assert steady(subject, MACHINES["a GPU"], 300)[-1] == SIZES[-1]
    taken = steady(subject, lambda rows: 0.008 + 5e-4 * rows, FORGOTTEN)
    assert len([rows for rows in taken if rows > SIZES[0]]) <= 20
    assert set(taken[20:40]) <= {USED, *SIZES[:2]}


def test_a_size_is_tried_anew_once_it_may_have_become_faster() -> None:
    subject, machine = Beside(), MACHINES["a GPU"]
    assert set(steady(subject, MACHINES["small model"], 300)) <= {USED, 16, 32}
    in_time = 2 * FORGOTTEN + round(RARELY_S / machine(SIZES[0]))
    assert steady(subject, machine, in_time)[-1] == SIZES[-1]


def test_trials_are_rare_by_the_clock_where_batches_are_short() -> None:
    """A pause for everybody who waits, each of them."""
    machine, subject = MACHINES["small model"], Beside()
    taken = steady(subject, machine, 12_000)[2 * FORGOTTEN :]
    spent = sum(map(machine, taken))
    assert spent > RARELY_S
    assert 1 <= sum(rows > SIZES[0] for rows in taken) <= 1 + spent / RARELY_S


def test_a_step_is_compared_with_steps_of_about_as_many_answers() -> None:
    """One answer alone says nothing of what twelve at once have to expect."""
    subject = Beside()

    def machine(rows: int) -> float:
        return 0.002 * rows if rows <= 12 else 0.024 + 1.5e-4 * rows

    steady(subject, machine, 100, used=1)
    assert steady(subject, machine, 100, used=12)[-1] == SIZES[-1]
    # and the other way round: 32 rows are three times as long as a step, 16 are floor
    assert steady(subject, lambda rows: 0.002 * rows, 100, used=1)[-1] == SIZES[0]


def test_plans_that_are_always_new_keep_no_prompt_from_being_read() -> None:
    """Nothing is ever told of them."""
    subject = Beside()
    taken = [subject.rows(USED) for _ in range(10 * PLAIN)]
    assert taken.count(USED) == len(taken) // EARLY
    assert set(taken) == {USED, SIZES[0]}


def test_many_who_wait_leave_room_for_something_to_be_read() -> None:
    for used in range(1, 300):
        subject = Beside()
        assert subject.rows(used) == used, "how long that takes"
        assert subject.rows(used) - used >= WORTH
        assert subject.rows(used) == 16 or used > 16 - WORTH


def test_ends_of_prompts_and_blocks_say_nothing_of_a_size() -> None:
    subject = Beside()
    for rows in (5, 8, 200):
        subject.rows(4)
        subject.ran(4, rows, 9.0)
    assert steady(subject, MACHINES["a GPU"], 40)[-1] == SIZES[-1]


def test_the_batcher_keeps_to_it() -> None:
    asked: list[int] = []

    def beside(used: int) -> int:
        asked.append(used)
        return (1, 24)[len(asked) - 1]

    subject = Batcher(Pages(400, 4), 4, 512, beside=beside)
    first, long = Sequence(3), Sequence(1000)
    subject.add(first)
    subject.ran(subject.step())
    assert not asked, "nobody waits"
    first.total += 1
    subject.add(long)
    step = subject.step()
    assert step.parts == ((first, 1),) and asked == [1], "a step without prompts"
    subject.ran(step)
    first.total += 1
    assert subject.step().parts == ((first, 1), (long, 23)) and asked == [1, 1]


def read_alone(subject: Alone, machine: Machine, length: int) -> list[int]:
    """A prompt for which nobody waits: the rows of its batches."""
    taken, left = [], length
    while left:
        taken.append(subject.rows(left))
        subject.ran(taken[-1], machine(taken[-1]))
        left -= taken[-1]
    return taken


ALONE: dict[str, tuple[Machine, list[int]]] = {
    "few rows are much faster": (lambda rows: 1e-3 * rows * (1 if rows <= 16 else 3), [60]),
    "at once is faster": (lambda rows: 1e-3 * rows if rows <= 16 else 0.012 + 3e-4 * rows, []),
    "both alike": (lambda rows: 1e-3 * rows, []),
    "of sixty rows few are faster, of two hundred all": (
        lambda rows: 1e-3 * rows if rows <= 16 else 0.075 + 4e-4 * rows,
        [60],
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_prompts_alone_are_read_in_the_way_that_is_faster(name: str) -> None:
    """After a few by which that is found out, and now and then one that asks again."""
    (machine, by_few), subject = ALONE[name], Alone(16)
    first = [read_alone(subject, machine, 60) for _ in range(8)]
    assert first[:TRIED] == [[60]] * TRIED and first[TRIED][0] == 16
    taken = [read_alone(subject, machine, 60) for _ in range(100)]
    usual = [16, 16, 16, 12] if 60 in by_few else [60]
    assert 90 <= taken.count(usual) < 100
    for _ in range(8):
        read_alone(subject, machine, 250)
    expected = {"few rows are much faster": 16}.get(name, 250)
    assert read_alone(subject, machine, 250)[0] == expected


def test_a_machine_on_which_the_other_way_becomes_faster() -> None:
    subject = Alone(16)
    for _ in range(20):
        read_alone(subject, ALONE["few rows are much faster"][0], 60)
    other = ALONE["at once is faster"][0]
    taken = [read_alone(subject, other, 60) for _ in range(6 * OTHERWISE)]
    assert taken[-20:].count([60]) >= 19


@pytest.mark.parametrize("left", [1, 16, 257, 4000])
def test_what_is_short_or_long_is_read_at_once(left: int) -> None:
    subject = Alone(16)
    for rows in (*MIDDLING, 16) * 4:
        subject.ran(rows, 1.0 if rows > 16 else 0.001)
    assert subject.rows(left) == left and subject.rows(200) == 16
