"""What is promised of jobs of several owners, over machines made of a formula."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mtmd.base.errors import BusyError
from mtmd.base.isolation import worker_slots
from mtmd.base.isolation.worker_slots import (
    LONG_JOBS,
    PATIENCE_S,
    SLICE_S,
    STOPPED_JOBS,
    WorkerSlots,
)

STEP_S = 0.25  # between two looks at a job
LONG_S = 120.0


@dataclass
class Job:
    slot: worker_slots.Job
    left_s: float
    requested_s: float
    had_s: float = 0.0


@dataclass
class Machine:
    """On which each job that runs gets on as if it ran alone."""

    at_once: int = 2
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    given_up: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = WorkerSlots(self.at_once, clock=lambda: self.now)

    def ask(self, owner: str, work_s: float) -> Job:
        self.jobs.append(Job(self.slots.request(owner), work_s, self.now))
        return self.jobs[-1]

    def step(self) -> None:
        ran = [job for job in self.jobs if job.slot.goes_on.is_set()]
        assert len(ran) <= self.at_once + 1 + LONG_JOBS
        self.now += STEP_S
        for job in ran:
            job.left_s, job.had_s = job.left_s - STEP_S, job.had_s + STEP_S
            if job.left_s <= 0:
                self._end(job, self.ended)
                continue
            try:
                self.slots.check(job.slot)
            except BusyError:
                self._end(job, self.given_up)
        for job in [job for job in self.jobs if job.slot.is_given_up]:
            self._end(job, self.given_up)
        standing = [j for j in self.jobs if j.had_s and not j.slot.goes_on.is_set()]
        assert len(standing) <= STOPPED_JOBS

    def _end(self, job: Job, among: list[Job]) -> None:
        self.slots.release(job.slot)
        self.jobs.remove(job)
        among.append(job)

    def run(self, owners: int, seconds: float, each: int = 6) -> None:
        """Of each of so many owners there are always `each` long jobs."""
        end = self.now + seconds
        while self.now < end:
            self.keep_busy(owners, each)
            self.step()

    def keep_busy(self, owners: int, each: int = 6) -> None:
        for owner in map(str, range(owners)):
            for _ in range(each - sum(job.slot.owner == owner for job in self.jobs)):
                self.ask(owner, LONG_S)

    def seconds_of(self, work_s: float, owners: int, each: int = 6) -> float:
        """That a visitor waits for a job of `work_s`."""
        job = self.ask("visitor", work_s)
        while job not in self.ended:
            assert job not in self.given_up and self.now - job.requested_s < 1000
            self.keep_busy(owners, each)
            self.step()
        return self.now - job.requested_s


@pytest.mark.parametrize("owners", [1, 2, 3, 8, 20])
def test_who_asks_for_little_waits_for_no_long_jobs(owners: int) -> None:
    """However many there are, and whoever's: for a moment of one each of those before him."""
    machine = Machine()
    machine.run(owners, 20)
    begins = -(-owners // (machine.at_once + 1))  # owners that begin one job before his
    for _ in range(3):
        assert machine.seconds_of(STEP_S, owners) <= 2 * STEP_S + begins * PATIENCE_S
        machine.run(owners, 3)


@pytest.mark.parametrize("owners", [1, 2, 3, 11])
def test_who_asks_for_more_has_his_part_from_the_beginning(owners: int) -> None:
    machine = Machine()
    machine.run(owners, 60)
    share = min(1.0, LONG_JOBS / (owners + 1))
    for _ in range(3):
        maximum = 10 / share + 2 * SLICE_S + PATIENCE_S * owners
        assert machine.seconds_of(10, owners) <= maximum
        machine.run(owners, 10)
    assert all(job.slot.owner != "visitor" for job in machine.given_up)


@pytest.mark.parametrize("owners", [2, 3, 5, 12])
def test_each_owner_has_an_equal_part_of_what_is_long(owners: int) -> None:
    """Also one who has many more of them."""
    machine = Machine()
    for _ in range(20):
        machine.ask("0", LONG_S)
    machine.run(owners, 150)
    had = [0.0] * owners
    for job in machine.jobs + machine.ended + machine.given_up:
        had[int(job.slot.owner)] += job.had_s
    assert min(had) > 0.9 * 150 * LONG_JOBS / owners


def test_one_alone_has_everything_and_nothing_of_his_is_stopped() -> None:
    machine = Machine()
    machine.run(1, 60, each=30)
    assert sum(job.had_s > 0 for job in machine.jobs) == machine.at_once + LONG_JOBS
    assert all(job.slot.goes_on.is_set() for job in machine.jobs if job.had_s)
    assert not machine.given_up


def test_a_few_who_have_one_each_stop_nobody() -> None:
    machine = Machine()
    machine.run(LONG_JOBS, 60, each=1)
    assert all(job.slot.goes_on.is_set() for job in machine.jobs)


def test_who_has_most_long_jobs_gives_the_latest_up() -> None:
    machine = Machine()
    machine.run(1, 30, each=40)
    owners = STOPPED_JOBS + LONG_JOBS // 2
    for number in range(owners):
        machine.ask(f"one of {number}", LONG_S)
        machine.run(1, 3, each=40)
    assert {job.slot.owner for job in machine.given_up} == {"0"}
    assert sum(job.slot.owner != "0" for job in machine.jobs) == owners


def test_equals_wait_for_each_other_and_lose_nothing() -> None:
    machine = Machine()
    machine.run(5, 20)
    lost = len(machine.given_up)
    machine.run(5, 60)
    assert len(machine.given_up) == lost


def test_places_of_jobs_that_are_left_are_had_by_others() -> None:
    machine = Machine(at_once=1)
    machine.run(4, 30)
    for job in list(machine.jobs):
        machine.slots.release(job.slot)
    machine.jobs.clear()
    assert machine.seconds_of(STEP_S, 0) == STEP_S
