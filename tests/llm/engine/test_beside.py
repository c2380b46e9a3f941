"""How much is read beside those who wait for their next token, over machines made of a formula."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from mtmd.llm.engine.batcher import Batcher
from mtmd.llm.engine.beside import FORGOTTEN, LONGER, SHORT_S, SIZES, WORTH, Beside
from mtmd.llm.engine.pages import Pages
from mtmd.llm.engine.sequence import Sequence

Machine = Callable[[int], float]
MACHINES: dict[str, Machine] = {
    "small model": lambda rows: 0.001 + 6e-5 * rows + 0.004 * (rows > 16),
    "weights read once": lambda rows: 0.050 + 1e-4 * rows,
    "every row costs": lambda rows: 0.020 * rows,
    "a GPU": lambda rows: 0.008 + 1e-6 * rows,
}


def play(subject: Beside, machine: Machine, steps: int, used: int = 4) -> list[int]:
    """Batches with prompts and without in turn; rows of the former."""
    taken = []
    for _ in range(steps):
        subject.ran(used, used, machine(used))
        taken.append(subject.rows(used))
        subject.ran(used, taken[-1], machine(taken[-1]))
    return taken


@pytest.mark.parametrize("name", MACHINES)
def test_a_batch_with_prompts_takes_at_most_twice_as_long(name: str) -> None:
    machine = MACHINES[name]
    limit = max(SHORT_S, LONGER * machine(4))
    fitting = [size for size in SIZES if machine(size) <= limit] or [SIZES[0]]
    taken = play(Beside(), machine, 3 * FORGOTTEN)
    assert taken[0] == SIZES[0], "nothing is known yet"
    assert set(taken[-100:]) <= {fitting[-1], *SIZES[: len(fitting) + 1]}
    over = [rows for rows in taken if rows > fitting[-1]]
    assert len(over) <= 3 + 2 * len(taken) // FORGOTTEN, "one that is too slow is tried rarely"
    assert taken.count(fitting[-1]) > 0.9 * len(taken)


def test_a_machine_that_others_use_gives_no_reason_to_let_people_wait() -> None:
    rng, machine = Random(1), MACHINES["small model"]
    # half of all batches are kept from the processor
    subject, busy = Beside(), lambda rows: machine(rows) + rng.choice((0.0, 0.03))
    assert play(subject, busy, 400).count(SIZES[0]) > 390


def test_a_size_is_tried_anew_once_it_may_have_become_faster() -> None:
    subject = Beside()
    assert set(play(subject, MACHINES["small model"], 50)) <= {16, 32}
    assert play(subject, MACHINES["a GPU"], 2 * FORGOTTEN)[-1] == SIZES[-1]


def test_many_who_wait_leave_room_for_something_to_be_read() -> None:
    subject = Beside()
    for used in range(300):
        assert subject.rows(used) - used >= WORTH
        assert subject.rows(used) == 16 or used > 16 - WORTH


def test_ends_of_prompts_and_blocks_say_nothing_of_a_size() -> None:
    subject = Beside()
    for rows in (5, 8, 200):
        subject.ran(4, rows, 9.0)
    assert play(subject, MACHINES["a GPU"], 4)[-1] == SIZES[-1]


def test_the_batcher_keeps_to_it() -> None:
    asked: list[int] = []

    def beside(used: int) -> int:
        asked.append(used)
        return 24

    subject = Batcher(Pages(400, 4), 4, 512, beside=beside)
    first, long = Sequence(3), Sequence(1000)
    subject.add(first)
    subject.ran(subject.step())
    assert not asked, "nobody waits"
    first.total += 1
    subject.add(long)
    assert subject.step().parts == ((first, 1), (long, 23)) and asked == [1]
