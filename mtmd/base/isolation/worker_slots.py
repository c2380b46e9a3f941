"""Which jobs of several owners run in worker processes: a rule without processes, and with a clock
that is given.

Nobody knows beforehand how long a job takes. Each begins in one of a few places, as in Multilevel
Feedback Queues; one that still runs after `PATIENCE_S` goes on among `LONG_JOBS` others of its
kind. Where these have no room either it stays where it is until somebody else wants that place:
then it is stopped, and goes on as soon as it is its owner's turn. So

- no number of long jobs, of any number of owners, keeps a short one of another owner waiting;
- of the places for long jobs each owner who wants some has as many as the others, or one less: who
  has two more than one who waits gives one up at once, who has one more after `SLICE_S`;
- one owner alone has all of them, and nothing of his is stopped;
- what is stopped has no processor, but memory, so there are at most `STOPPED_JOBS`. Where one more
  is to be stopped, for somebody who has no job or two fewer, whoever has most loses the latest.
  Who has one loses it only where nobody has more: with more owners than there are places.

An owner's own long jobs may keep others of his waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mtmd.base.errors import BusyError

PATIENCE_S = 0.5
LONG_JOBS = 8
STOPPED_JOBS = 8
SLICE_S = 2.0
RETRY_S = 10.0  # for who was given up


@dataclass(eq=False)
class Place:
    """Of one job, from when it is asked for to `Places.leave`."""

    owner: str
    number: int
    """In the order in which they were asked for."""
    goes_on: threading.Event = field(default_factory=threading.Event)
    """Set while the job may run, and when it is given up."""
    is_given_up: bool = False
    is_long: bool = False
    since: float = 0.0
    """When it began, or was let in again."""

    def check(self) -> None:
        """Raises BusyError where it was given up."""
        if self.is_given_up:
            raise BusyError(
                "too much that takes long is being read at the same time; try again later", RETRY_S
            )


class Places:
    """`at_once`: jobs of one owner that begin; there is one place more, for others. Thread-safe,
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
        self._last = 0
        self._line: list[Place] = []
        self._first: list[Place] = []
        """Jobs in the places where each begins."""
        self._long: list[Place] = []
        self._stopped: list[Place] = []
        self._begun: dict[str, int] = {}
        """Of owners who have something here, when each last began a job, or first wanted to."""
        self._let_go_on: dict[str, int] = {}

    def ask(self, owner: str) -> Place:
        """For one more job, which may begin once it `goes_on`."""
        with self._lock:
            place = Place(owner, self._now())
            self._line.append(place)
            self._begun.setdefault(owner, place.number)
            self._let_in()
        return place

    def begin(self, place: Place) -> None:
        """Its time counts from now on."""
        place.since = self._clock()

    def look(self, place: Place) -> bool:
        """To be asked now and then of a job that runs: whether it goes on. If not it is to be
        stopped until it `goes_on`. Raises BusyError where it is given up instead.
        """
        with self._lock:
            if place in self._first:
                if self._clock() - place.since < self._patience_s:
                    return True
                place.is_long = True
                if len(self._long) < self._long_jobs:
                    self._first.remove(place)
                    self._long.append(place)
                    self.begin(place)
                    self._let_in()
                    return True
                if not self._is_in_the_way(place):
                    return True
                self._make_room_for(place)
                self._first.remove(place)
            elif self._gives_way(place):
                self._long.remove(place)
            else:
                return True
            place.goes_on.clear()
            self._let_in()  # another one: it stands in no line yet
            self._stopped.append(place)
            self._let_go_on.setdefault(place.owner, self._now())
            return False

    def leave(self, place: Place) -> None:
        """The job has ended, however, or is not wanted any more."""
        with self._lock:
            for places in (self._line, self._first, self._long, self._stopped):
                if place in places:
                    places.remove(place)
            if not self._jobs(place.owner) + _count(self._line, place.owner):
                for last in (self._begun, self._let_go_on):
                    last.pop(place.owner, None)
            self._let_in()

    def _let_in(self) -> None:
        while len(self._first) <= self._at_once:
            free = [p for p in self._line if _count(self._first, p.owner) < self._at_once]
            if not free:
                break
            place = min(free, key=lambda p: self._begun[p.owner])
            self._line.remove(place)
            self._first.append(place)
            self._begun[place.owner] = self._now()
            self._goes_on(place)
        while self._stopped and len(self._long) < self._long_jobs:
            place = min(
                self._stopped, key=lambda p: (_count(self._long, p.owner), self._let_go_on[p.owner])
            )
            self._stopped.remove(place)
            self._long.append(place)
            self._let_go_on[place.owner] = self._now()
            self._goes_on(place)

    def _now(self) -> int:
        self._last += 1
        return self._last

    def _goes_on(self, place: Place) -> None:
        self.begin(place)
        place.goes_on.set()

    def _is_in_the_way(self, place: Place) -> bool:
        """Of somebody else, who could begin if it were not here. Where nothing can be stopped
        without another job being given up, only those count who have none, or two fewer.
        """
        others = {p.owner for p in self._line} - {place.owner}
        most = max(1, self._jobs(place.owner) - 1)
        if len(self._stopped) >= self._stopped_jobs:
            others = {owner for owner in others if self._jobs(owner) < most}
        return any(_count(self._first, owner) < self._at_once for owner in others)

    def _gives_way(self, place: Place) -> bool:
        """It is one of the long ones that run."""
        least = min((_count(self._long, p.owner) for p in self._stopped), default=None)
        if least is None:
            return False
        own = [p for p in self._long if p.owner == place.owner]
        had = self._clock() - max(p.since for p in own)
        return len(own) - least >= 2 or (len(own) - least == 1 and had >= SLICE_S)

    def _make_room_for(self, place: Place) -> None:
        """Among those that are stopped. Raises BusyError where it has none."""
        if len(self._stopped) < self._stopped_jobs:
            return
        latest = max([*self._stopped, place], key=lambda p: (self._jobs(p.owner), p.number))
        latest.is_given_up = True
        if latest is place:
            place.check()
        self._stopped.remove(latest)
        latest.goes_on.set()

    def _jobs(self, owner: str) -> int:
        """That have begun."""
        return sum(_count(places, owner) for places in (self._first, self._long, self._stopped))


def _count(places: list[Place], owner: str) -> int:
    return sum(place.owner == owner for place in places)
