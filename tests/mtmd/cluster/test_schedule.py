"""Who does what next."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mtmd.base.errors import DeviceError
from mtmd.cluster.schedule import UNITS_PER_ACTOR, Schedule, Task


def schedule_of(units: list[tuple[int, int]], actors: int) -> Schedule:
    schedule = Schedule(units)
    for actor in range(actors):
        schedule.started(actor)
    return schedule


def test_each_actor_has_two_units_until_none_are_left() -> None:
    schedule = schedule_of([(3, 5), (4, 5), (7, 2)], 2)
    assert [schedule.next_for(0) for _ in range(UNITS_PER_ACTOR + 1)] == [Task(3), Task(4), None]
    assert [schedule.next_for(1), schedule.next_for(1)] == [Task(7), None]
    for actor, number in ((1, 7), (0, 3), (0, 4)):
        assert not schedule.finished
        schedule.done(actor, Task(number))
    assert schedule.finished and schedule.next_for(0) is None


def test_what_an_actor_had_is_given_to_another_first() -> None:
    schedule = schedule_of([(n, 5) for n in range(5)], 3)
    assert [schedule.next_for(0), schedule.next_for(0)] == [Task(0), Task(1)]
    schedule.ended(0)
    assert {schedule.next_for(1), schedule.next_for(1)} == {Task(0), Task(1)}
    assert schedule.next_for(2) == Task(2)


def test_a_machine_that_goes_away_is_nobodys_fault() -> None:
    schedule = schedule_of([(0, 3)], 11)
    for actor in range(10):
        assert schedule.next_for(actor) == Task(0)
        schedule.ended(actor, blame=False)
    assert schedule.next_for(10) == Task(0)


def test_what_two_actors_ended_with_is_answered_row_by_row_by_one_that_does_nothing_else() -> None:
    schedule = schedule_of([(0, 3), (1, 3)], 5)
    for actor in (0, 1):
        assert Task(0) in (schedule.next_for(actor), schedule.next_for(actor))
        schedule.ended(actor)
    assert schedule.next_for(2) == Task(0, 0)
    assert schedule.next_for(2) is None
    assert schedule.next_for(3) == Task(0, 1), "the other unit was with both, too"
    schedule.done(2, Task(0, 0))
    assert schedule.next_for(2) == Task(0, 2)
    assert schedule.ended(3) == []
    assert schedule.next_for(4) == Task(0, 1), "what an actor ended with comes first"


def test_the_row_with_which_two_actors_end_is_given_up() -> None:
    schedule = schedule_of([(0, 2)], 5)
    given_up = []
    for actor in range(4):
        assert schedule.next_for(actor) == (Task(0) if actor < 2 else Task(0, 0))
        given_up += schedule.ended(actor)
    assert given_up == [Task(0, 0)]
    assert schedule.next_for(4) == Task(0, 1)
    schedule.done(4, Task(0, 1))
    assert schedule.next_for(4) is None and not schedule.finished
    schedule.written(0)
    assert schedule.finished


def end_one_after_another(schedule: Schedule, count: int, blame: bool = True) -> None:
    for actor in range(count):
        schedule.started(100 + actor)
        schedule.ended(100 + actor, blame)
        schedule.check("out of memory")


@pytest.mark.parametrize("blame", (True, False))
def test_actors_that_only_end_are_ten(blame: bool) -> None:
    schedule = Schedule([(0, 3)])
    end_one_after_another(schedule, 9, blame)
    with pytest.raises(DeviceError, match=r"10 actors ended one after another.*: out of memory"):
        end_one_after_another(schedule, 1, blame)


def test_many_actors_may_all_end_once() -> None:
    schedule = schedule_of([(n, 5) for n in range(200)], 64)
    for actor in range(64):
        schedule.ended(actor)
        schedule.check("?")


@pytest.mark.parametrize("seed", range(30))
def test_whatever_ends_all_units_are_done_once(seed: int) -> None:
    chance = random.Random(seed)
    sizes = {n: 1 + n % 4 for n in range(25)}
    schedule = schedule_of([*sizes.items()], 3)
    assigned: list[tuple[int, Task]] = []
    rows: Counter[int] = Counter()
    written: list[int] = []
    actors, following = [0, 1, 2], 3

    def add_row(task: Task) -> None:
        rows[task.unit] += 1
        if rows[task.unit] == sizes[task.unit]:
            schedule.written(task.unit)
            written.append(task.unit)

    for _ in range(5000):
        if schedule.finished:
            break
        for actor in actors:
            if (task := schedule.next_for(actor)) is not None:
                assigned.append((actor, task))
        actor, task = chance.choice(assigned)
        if chance.random() < 0.25:
            for given_up in schedule.ended(actor):
                add_row(given_up)
            assigned = [(a, t) for a, t in assigned if a != actor]
            actors[actors.index(actor)], following = following, following + 1
            schedule.started(following - 1)
        else:
            assigned.remove((actor, task))
            schedule.done(actor, task)
            if task.row is None:
                written.append(task.unit)
            else:
                add_row(task)
    assert sorted(written) == list(range(25)) and not assigned
