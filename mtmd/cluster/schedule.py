"""The order in which actors answer units. Plain Python: no Ray, no clock, no files.

What an actor had when it ended is given to others. A unit that two actors ended with is answered
row by row, by actors that do nothing else meanwhile. A row that two more ended with is given up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from mtmd.base.errors import DeviceError

UNITS_PER_ACTOR = 2  # the next one's pictures fill the slots that the first one leaves empty
MAX_LOST_ACTORS = 2  # with the same unit, and then with the same row
MAX_ENDS = 10  # of actors since the last step, or twice as many as there were at once
MAX_LOST_ROWS = 20  # before any row is answered: the pictures are not the cause then


@dataclass(frozen=True)
class Task:
    """A unit to be answered and written, or one `row` of it to be answered."""

    unit: int
    row: int | None = None


class Schedule:
    """`units` are numbers of units, each with its count of rows."""

    def __init__(self, units: Iterable[tuple[int, int]]):
        self._sizes = dict(units)
        self._waiting = deque(Task(unit) for unit in self._sizes)
        self._rows = deque[Task]()
        """Rows that wait, each for an actor of its own."""
        self._assigned: dict[int, set[Task]] = {}
        self._ends: Counter[Task] = Counter()
        self._max_actors = self._lost_rows = self._ends_since_step = 0
        self._has_answered = False

    @property
    def finished(self) -> bool:
        return not self._sizes

    @property
    def units_left(self) -> int:
        return len(self._sizes)

    def started(self, actor: int) -> None:
        self._assigned[actor] = set()
        self._max_actors = max(self._max_actors, len(self._assigned))

    def next_for(self, actor: int) -> Task | None:
        """Return a task, or None while the actor has enough, or nothing waits."""
        tasks = self._assigned[actor]
        if any(task.row is not None for task in tasks):
            return None
        if self._rows and not tasks:
            task = self._rows.popleft()
        elif self._waiting and len(tasks) < UNITS_PER_ACTOR:
            task = self._waiting.popleft()
        else:
            return None
        tasks.add(task)
        return task

    def done(self, actor: int, task: Task) -> None:
        self._assigned[actor].discard(task)
        self._has_answered = True
        self._ends_since_step = 0
        if task.row is None:
            self.written(task.unit)

    def written(self, unit: int) -> None:
        """Note that the rows of a unit are in the folder."""
        self._sizes.pop(unit, None)

    def ended(self, actor: int, blame: bool = True) -> list[Task]:
        """Note that an actor is gone; `blame` where its work may be the cause. Return the rows that
        are given up. Call `check` afterwards.
        """
        tasks = self._assigned.pop(actor)
        self._ends_since_step += 1
        given_up = list[Task]()
        for task in sorted(tasks, key=lambda task: task.unit):
            self._ends[task] += blame
            if self._ends[task] < MAX_LOST_ACTORS:
                (self._waiting if task.row is None else self._rows).appendleft(task)
                continue
            self._ends_since_step = 0
            if task.row is None:
                self._rows += [Task(task.unit, row) for row in range(self._sizes[task.unit])]
            else:
                given_up.append(task)
        self._lost_rows += len(given_up)
        return given_up

    def check(self, reason: str) -> None:
        """Raises DeviceError where actors end for other causes than single pictures; `reason` is
        why the last one ended.
        """
        if self._ends_since_step >= max(MAX_ENDS, 2 * self._max_actors):
            raise DeviceError(
                f"{self._ends_since_step} actors ended one after another, and none got any "
                f"further: {reason}; rows that are there stay, --resume goes on"
            )
        if self._lost_rows >= MAX_LOST_ROWS and not self._has_answered:
            raise DeviceError(
                f"{self._lost_rows} pictures were given up, with each of which {MAX_LOST_ACTORS} "
                f"actors ended, and none was answered: {reason}; look at what the actors have, or "
                "at the first pictures; --resume goes on"
            )
