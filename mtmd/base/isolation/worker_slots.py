"""Describes which jobs of several owners run in worker processes: a rule without processes, and
with a clock that is given.

Nobody knows beforehand how long a job takes. Each begins in one of a few slots, as in Multilevel
Feedback Queues; one that still runs after `PATIENCE_S` goes on among `LONG_JOBS` others of its
kind. Where these have no room either it stays where it is until another owner needs the slot:
then it is stopped, and goes on as soon as it is its owner's turn. So

- no number of long jobs, of any number of owners, keeps a short one of another owner waiting;
- of the slots for long jobs each owner with long jobs has as many as the others, or one less: an
  owner with two more than one who waits gives one up at once, with one more after `SLICE_S`;
- one owner alone has all of them, and nothing of his is stopped;
- what is stopped has no processor, but memory, so there are at most `STOPPED_JOBS`. Where one more
  is to be stopped, for an owner with no job or two fewer, the owner with most loses the latest.
  An owner with one loses it only if nobody has more: with more owners than there are slots.

An owner's own long jobs may keep others of his waiting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from mtmd.base.errors import BusyError
from mtmd.base.fair_queue import FairQueue

PATIENCE_S = 0.5
LONG_JOBS = 8
STOPPED_JOBS = 8
SLICE_S = 2.0
RETRY_S = 10.0  # for the owner of a job that was given up


@dataclass(eq=False)
class Job:
    """One job, from `WorkerSlots.request` to `WorkerSlots.release`."""

    owner: str
    number: int
    """In the order of requests."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Set while the job may run, and when it is given up."""
    is_given_up: bool = False
    is_long: bool = False
    since: float = 0.0
    """When it began, or was let go on."""

    def check(self) -> None:
        """Raises BusyError if it was given up."""
        if self.is_given_up:
            raise BusyError(
                "too many slow files are being read at the same time; try again later", RETRY_S
            )


class WorkerSlots:
    """`at_once`: jobs of one owner that begin; there is one slot more, for others. Thread-safe,
    and nothing here waits.
    """

    def __init__(
        self,
        at_once: int,
        long_jobs: int = LONG_JOBS,
        stopped_jobs: int = STOPPED_JOBS,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._at_once, self._long_jobs, self._stopped_jobs = at_once, long_jobs, stopped_jobs
        self._patience_s, self._clock = patience_s, clock
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting = FairQueue[Job]()
        self._first: list[Job] = []
        """Jobs in the slots where each begins."""
        self._long: list[Job] = []
        self._stopped = FairQueue[Job]()

    def request(self, owner: str) -> Job:
        """Return one more job, which may begin once it `goes_on`."""
        with self._lock:
            job = Job(owner, next(self._numbers))
            self._waiting.append(job)
            self._fill()
        return job

    def begin(self, job: Job) -> None:
        """Count the time of a job from now on."""
        job.since = self._clock()

    def check(self, job: Job) -> bool:
        """Return whether a job that runs goes on, for who asks now and then; if not, it has to be
        stopped until it `goes_on`. Raises BusyError if it is given up instead.
        """
        with self._lock:
            if job in self._first:
                if self._clock() - job.since < self._patience_s:
                    return True
                job.is_long = True
                if len(self._long) < self._long_jobs:
                    self._first.remove(job)
                    self._long.append(job)
                    self.begin(job)
                    self._fill()
                    return True
                if not self._delays_others(job):
                    return True
                self._make_room_for(job)
                self._first.remove(job)
            elif self._has_to_yield(job):
                self._long.remove(job)
            else:
                return True
            job.goes_on.clear()
            self._fill()  # by another job: this one is not in the queue yet
            self._stopped.append(job)
            return False

    def release(self, job: Job) -> None:
        """End a job, or take its request back."""
        with self._lock:
            for jobs in (self._waiting, self._first, self._long, self._stopped):
                if job in jobs:
                    jobs.remove(job)
            self._fill()

    def _fill(self) -> None:
        while len(self._first) <= self._at_once:
            begun = Counter(job.owner for job in self._first)
            full = [owner for owner, number in begun.items() if number >= self._at_once]
            if (job := self._waiting.next(full=full)) is None:
                break
            self._waiting.serve(job)
            self._go_on(job, self._first)
        while len(self._long) < self._long_jobs:
            if (job := self._stopped.next(Counter(job.owner for job in self._long))) is None:
                break
            self._stopped.serve(job)
            self._go_on(job, self._long)

    def _go_on(self, job: Job, among: list[Job]) -> None:
        among.append(job)
        self.begin(job)
        job.goes_on.set()

    def _delays_others(self, job: Job) -> bool:
        """Return whether another owner could begin if the job were not here. If none can be stopped
        without another being given up, only owners with no job, or two fewer, count.
        """
        others = {j.owner for j in self._waiting} - {job.owner}
        limit = max(1, self._jobs(job.owner) - 1)
        if len(self._stopped) >= self._stopped_jobs:
            others = {owner for owner in others if self._jobs(owner) < limit}
        return any(_count(self._first, owner) < self._at_once for owner in others)

    def _has_to_yield(self, job: Job) -> bool:
        """Return whether one of the long jobs that run has to stop for a stopped one."""
        fewest = min((_count(self._long, j.owner) for j in self._stopped), default=None)
        if fewest is None:
            return False
        own = [j for j in self._long if j.owner == job.owner]
        had = self._clock() - max(j.since for j in own)
        return len(own) - fewest >= 2 or (len(own) - fewest == 1 and had >= SLICE_S)

    def _make_room_for(self, job: Job) -> None:
        """Make room among the stopped jobs. Raises BusyError if the job itself is given up."""
        if len(self._stopped) < self._stopped_jobs:
            return
        latest = max([*self._stopped, job], key=lambda j: (self._jobs(j.owner), j.number))
        latest.is_given_up = True
        if latest is job:
            job.check()
        self._stopped.remove(latest)
        latest.goes_on.set()

    def _jobs(self, owner: str) -> int:
        """Return how many jobs of an owner have begun."""
        return sum(_count(jobs, owner) for jobs in (self._first, self._long, self._stopped))


def _count(jobs: Iterable[Job], owner: str) -> int:
    return sum(job.owner == owner for job in jobs)
