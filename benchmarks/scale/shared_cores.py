"""A resource that is shared out evenly among all who use it at the same time: the cores of a
machine, its network link. simpy has queues for resources, but not this.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import simpy


@dataclass(eq=False)
class Use:
    """`done` comes when it has had all that it asked for."""

    end: float
    weight: float
    done: simpy.Event
    is_over: bool = False


class Shared:
    """Each use of weight w goes on at full speed where the weights of all are at most `capacity`,
    else at `capacity` by their sum: processor sharing (Kleinrock, Queueing Systems 2, 4.4), with a
    limit to each. A thread of a process has weight 1 on cores; for a link whose capacity is 1 a
    weight of 1 is all of it.

    How far everybody is is one number, the work that each would have had done who was there all
    the time, so that coming and going cost O(log n).
    """

    def __init__(self, env: simpy.Environment, capacity: float):
        self.env, self.capacity = env, capacity
        self.used = 0.0
        """Capacity times seconds, up to now by `settle`."""
        self._reached = self._since = self._weight = 0.0
        self._uses: list[tuple[float, int, Use]] = []
        self._count = self._planned = 0

    def use(self, seconds: float, weight: float = 1.0) -> Use:
        """For so many seconds at full speed."""
        self.settle()
        one = Use(self._reached + seconds, weight, self.env.event())
        self._count += 1
        heappush(self._uses, (one.end, self._count, one))
        self._weight += weight
        self._plan()
        return one

    def hold(self, seconds: float, weight: float = 1.0) -> Generator[Any, Any, None]:
        """As `use`, waited for; given up where the process that waits is interrupted."""
        if seconds <= 0:
            return
        one = self.use(seconds, weight)
        try:
            yield one.done
        finally:
            self._leave(one)

    def settle(self) -> None:
        now = self.env.now
        if self._weight > 0:
            passed = now - self._since
            self._reached += passed * self._speed
            self.used += passed * min(self._weight, self.capacity)
        self._since = now

    @property
    def _speed(self) -> float:
        return 1.0 if self._weight <= self.capacity else self.capacity / self._weight

    def _leave(self, one: Use) -> None:
        if not one.is_over:
            self.settle()
            one.is_over = True
            self._weight -= one.weight
            self._plan()

    def _plan(self) -> None:
        """To look again when the next one has had all it asked for. What was planned before is
        overtaken by that.
        """
        self._planned += 1
        while self._uses and self._uses[0][2].is_over:
            heappop(self._uses)
        if not self._uses:
            self._weight = 0.0  # without what rounding has left
            return
        number = self._planned
        wait = self.env.timeout(max(self._uses[0][0] - self._reached, 0.0) / self._speed)
        wait.callbacks.append(lambda _: self._look(number))

    def _look(self, number: int) -> None:
        if number != self._planned:
            return
        self.settle()
        self._reached = max(self._reached, self._uses[0][0])
        while self._uses and (self._uses[0][0] <= self._reached or self._uses[0][2].is_over):
            one = heappop(self._uses)[2]
            if not one.is_over:
                one.is_over = True
                self._weight -= one.weight
                one.done.succeed()
        self._plan()
