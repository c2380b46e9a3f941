"""What each actor does next. Plain Python: no Ray, no clock, no files.

An actor that ends takes what it had with it, which is given to others. What was with two that ended
is answered row by row, by an actor that does nothing else: the row with which two more end has that
for its error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

AT_ONCE = 2  # units of one actor: pictures of the next fill places that the first leaves empty
ENDS_MOST = 2  # of actors, with the same unit, or the same row


@dataclass(frozen=True)
class Task:
    """A unit to be answered and written; one `row` of it to be answered; or, with `write`, to be
    written with the rows that were answered one by one.
    """

    unit: int
    row: int | None = None
    write: bool = False


@dataclass
class Slow:
    """A unit that is answered row by row."""

    rows: int
    next: int = 0
    ends: int = 0
    """Of actors with the row that is next."""


@dataclass
class Held:
    """What an actor has."""

    tasks: set[Task] = field(default_factory=set)


class Schedule:
    """`units` are the numbers of those that are left, with how many rows each has."""

    def __init__(self, units: Iterable[tuple[int, int]]):
        self._sizes = dict(units)
        self._waiting = deque(self._sizes)
        self._held: dict[int, Held] = {}
        self._ends: Counter[int] = Counter()
        self._slow: dict[int, Slow] = {}
        self._slow_waiting: deque[int] = deque()
        self.lost_rows: set[tuple[int, int]] = set()
        """(unit, row) of those with which actors end."""
        self.steps = 0
        """Tasks that are done, units to be answered row by row, and rows given up."""

    @property
    def finished(self) -> bool:
        return not self._sizes

    @property
    def units_left(self) -> int:
        return len(self._sizes)

    def next_for(self, actor: int) -> Task | None:
        """None while it has enough to do, or nothing is left that nobody does."""
        held = self._held.setdefault(actor, Held()).tasks
        if any(task.unit in self._slow for task in held):
            return None
        if self._slow_waiting and not held:
            task = self._step(self._slow_waiting.popleft())
        elif self._waiting and len(held) < AT_ONCE:
            task = Task(self._waiting.popleft())
        else:
            return None
        held.add(task)
        return task

    def done(self, actor: int, task: Task) -> None:
        self._held[actor].tasks.discard(task)
        self.steps += 1
        if task.row is None:
            self._sizes.pop(task.unit, None)
            self._slow.pop(task.unit, None)
            return
        slow = self._slow[task.unit]
        slow.next, slow.ends = slow.next + 1, 0
        self._slow_waiting.appendleft(task.unit)

    def ended(self, actor: int, blame: bool = True) -> None:
        """An actor is no more. `blame`: it may be because of what it did."""
        for task in sorted(self._held.pop(actor, Held()).tasks, key=lambda task: task.unit):
            slow = self._slow.get(task.unit)
            if slow is not None:
                slow.ends += blame
                if task.row is not None and slow.ends >= ENDS_MOST:
                    self.lost_rows.add((task.unit, task.row))
                    self.steps += 1
                    slow.next, slow.ends = slow.next + 1, 0
                self._slow_waiting.append(task.unit)
                continue
            self._ends[task.unit] += blame
            if self._ends[task.unit] < ENDS_MOST:
                self._waiting.appendleft(task.unit)
            else:
                self.steps += 1
                self._slow[task.unit] = Slow(self._sizes[task.unit])
                self._slow_waiting.append(task.unit)

    def _step(self, unit: int) -> Task:
        slow = self._slow[unit]
        return Task(unit, slow.next) if slow.next < slow.rows else Task(unit, write=True)
