"""Who does what next."""

from __future__ import annotations

import random

import pytest

from mtmd.cluster.schedule import AT_ONCE, Schedule, Task


def test_each_actor_has_two_units_until_none_are_left() -> None:
    schedule = Schedule([(3, 5), (4, 5), (7, 2)])
    assert [schedule.next_for(0) for _ in range(AT_ONCE + 1)] == [Task(3), Task(4), None]
    assert [schedule.next_for(1), schedule.next_for(1)] == [Task(7), None]
    for actor, number in ((1, 7), (0, 3), (0, 4)):
        assert not schedule.finished
        schedule.done(actor, Task(number))
    assert schedule.finished and schedule.next_for(0) is None


def test_what_an_actor_had_is_given_to_another_first() -> None:
    schedule = Schedule([(n, 5) for n in range(5)])
    assert [schedule.next_for(0), schedule.next_for(0)] == [Task(0), Task(1)]
    schedule.ended(0)
    assert {schedule.next_for(1), schedule.next_for(1)} == {Task(0), Task(1)}
    assert schedule.next_for(2) == Task(2)


def test_a_machine_that_goes_away_is_nobodys_fault() -> None:
    schedule = Schedule([(0, 3)])
    for actor in range(10):
        assert schedule.next_for(actor) == Task(0)
        schedule.ended(actor, blame=False)
    assert schedule.next_for(10) == Task(0)


def test_what_two_actors_ended_with_is_answered_row_by_row_by_one_that_does_nothing_else() -> None:
    schedule = Schedule([(0, 3), (1, 3)])
    for actor in (0, 1):
        assert Task(0) in (schedule.next_for(actor), schedule.next_for(actor))
        schedule.ended(actor)
    assert schedule.next_for(2) == Task(0, 0)
    assert schedule.next_for(2) is None
    schedule.done(2, Task(0, 0))
    assert schedule.next_for(3) == Task(0, 1)
    schedule.ended(3)
    schedule.done(*finish(schedule, 4, Task(1, 0)))  # the other unit was with both, too
    assert (0, 1) not in schedule.lost_rows


def finish(schedule: Schedule, actor: int, task: Task) -> tuple[int, Task]:
    assert schedule.next_for(actor) == task
    return actor, task


def test_the_row_with_which_two_actors_end_is_left_out() -> None:
    schedule = Schedule([(0, 2)])
    for actor in range(4):
        assert schedule.next_for(actor) == (Task(0) if actor < 2 else Task(0, 0))
        schedule.ended(actor)
    assert schedule.lost_rows == {(0, 0)}
    schedule.done(*finish(schedule, 5, Task(0, 1)))
    schedule.done(*finish(schedule, 5, Task(0, write=True)))
    assert schedule.finished


@pytest.mark.parametrize("seed", range(30))
def test_whatever_ends_all_units_are_done_once(seed: int) -> None:
    chance = random.Random(seed)
    schedule = Schedule([(n, 1 + n % 4) for n in range(25)])
    held: list[tuple[int, Task]] = []
    written: list[int] = []
    actors, following = [0, 1, 2], 3
    for _ in range(5000):
        if schedule.finished:
            break
        for actor in actors:
            if (task := schedule.next_for(actor)) is not None:
                held.append((actor, task))
        actor, task = chance.choice(held)
        if chance.random() < 0.25:
            schedule.ended(actor)
            held = [(a, t) for a, t in held if a != actor]
            actors[actors.index(actor)], following = following, following + 1
        else:
            held.remove((actor, task))
            schedule.done(actor, task)
            written += [task.unit] if task.row is None else []
    assert sorted(written) == list(range(25)) and not held
