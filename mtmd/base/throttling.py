"""Under a CPU quota: how long work takes when it goes on, and how often the quota was used up. Then
no thread of the control group runs until the next period begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtmd.base.control_groups import CGROUP, PROC, groups, text_of


class SustainedClock:
    """Seconds of work as it takes when it goes on and on. Two threads have a quota of 1.5 cores
    used up after three quarters of a period and stand still for the rest: work that is shorter than
    a period may not see that. Its time is never less than the processor's time that it took of this
    process, at the rate of `quota`; None where nothing limits it.
    """

    def __init__(
        self,
        quota: float | None,
        clock: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.process_time,
    ):
        self._quota, self._clock, self._used = quota, clock, used

    def now(self) -> tuple[float, float]:
        """Return the counts now, for `since`."""
        return self._clock(), self._used() if self._quota else 0.0

    def since(self, begun: tuple[float, float]) -> float:
        seconds = self._clock() - begun[0]
        return max(seconds, (self._used() - begun[1]) / self._quota) if self._quota else seconds


@dataclass(frozen=True)
class Throttled:
    """Count of the `periods` of a CPU quota, mostly a tenth of a second each, in which something
    ran, and of those that had no time left before their end.
    """

    periods: int
    used_up: int

    @property
    def share(self) -> float:
        return self.used_up / self.periods if self.periods else 0.0


class ThrottleWatch:
    """Watch, from its making on, of the group that is held back most among those this process is in
    (cpu.stat of both versions of control groups).
    """

    def __init__(self, proc: Path = PROC, cgroup: Path = CGROUP):
        self._files = [folder / "cpu.stat" for _, folder in groups(proc, cgroup, "cpu")]
        self._before = [_counts(file) for file in self._files]

    def throttled(self) -> Throttled | None:
        """Since then; None where no quota is set."""
        pairs = zip(self._before, map(_counts, self._files), strict=True)
        result = [
            Throttled(after.periods - before.periods, after.used_up - before.used_up)
            for before, after in pairs
            if before and after
        ]
        counted = [one for one in result if one.periods > 0]
        return max(counted, key=lambda one: one.share, default=None)


def _counts(file: Path) -> Throttled | None:
    rows = dict(line.split()[:2] for line in text_of(file).splitlines() if len(line.split()) > 1)
    words = rows.get("nr_periods", ""), rows.get("nr_throttled", "")
    return Throttled(*map(int, words)) if all(word.isdecimal() for word in words) else None
