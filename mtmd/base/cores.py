"""Describes how many processor cores this process may use, which of them it does, and how many
others keep busy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TypeVar

from mtmd.base.control_groups import CGROUP, PROC, groups, text_of
from mtmd.base.text import plural

MIN_S = 0.3  # of a measurement: the system counts in hundredths of a second
IDLE = (3, 4)  # columns of /proc/stat: idle, and idle while a disk is waited for
ALL = 8  # columns that do not count others again (guests)
T = TypeVar("T")
_before: dict[int, list[int]] = {}
"""By process: the cores that it might use before it left half of them."""


@dataclass(frozen=True)
class Cores:
    """`affinity`: so many cores this process may run on. `quota`: control groups give it no more
    than the time of so many, None where they set no limit.
    """

    affinity: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Return how many threads have work to do at once."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, ceil(self.quota)))

    def __str__(self) -> str:
        count = plural(self.usable, "core")
        if self.usable == self.affinity:
            return count
        return f"{count} (a CPU quota of {self.quota:g}, of {self.affinity})"


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> Cores:
    """Return the cores that may be used, as the system reports now."""
    return Cores(len(_numbers()), _quota(proc, cgroup))


def leave_half() -> None:
    """This process keeps to half of its cores from now on, at least one: all of its threads, and
    what they start but for `on_all_cores`. `usable_cores` goes on to tell of all. Which half goes
    by its number, so that several such processes do not all crowd the same.

    For one that computes in Python alone, beside another of ours that drives a device: threads
    that share an interpreter have little use of more, and on the cores that it leaves they are in
    nobody's way. Linux has cores of threads; elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    numbers = _before[os.getpid()] = _numbers()
    start, count = os.getpid() % len(numbers), max(1, len(numbers) // 2)
    half = (numbers + numbers)[start : start + count]
    for thread in (PROC / "self" / "task").iterdir():
        with suppress(OSError):  # it has ended, or the machine's cores are shared out anew
            os.sched_setaffinity(int(thread.name), half)


def on_all_cores(start: Callable[[], T]) -> T:
    """Return what `start` returns or raises. Processes that it starts may use all cores, though
    this one has left some.
    """
    before = _before.get(os.getpid())
    if before is None or sys.platform != "linux":
        return start()
    saved = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, before)
    try:
        return start()
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, saved)


def _numbers() -> list[int]:
    if (before := _before.get(os.getpid())) is not None:
        return before
    with suppress(AttributeError):  # not every system has it
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota(proc: Path, cgroup: Path) -> float | None:
    """Return it in cores, the least of all groups (cpu.max of version 2, cpu.cfs_* of version
    1).
    """
    result = []
    for version, folder in groups(proc, cgroup, "cpu"):
        if version == 2:
            words = text_of(folder / "cpu.max").split()
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [word for file in files for word in text_of(folder / file).split()]
        if len(words) == 2 and all(w.isdecimal() for w in words) and int(words[1]):
            result.append(int(words[0]) / int(words[1]))
    return min((quota for quota in result if quota), default=None)


class OthersWatch:
    """Watch, from its making on, of how much of the cores that this process may run on others take,
    programs or, on a shared machine, other systems.
    """

    def __init__(
        self,
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
    ):
        self._proc, self._clock, self._own = proc, clock, own
        self._began, self._busy, self._used = clock(), self._busy_s(), own()

    def cores(self) -> float | None:
        """Return the average number of cores, after LEAST_S at least, which it waits for; None
        where the system does not tell.
        """
        time.sleep(max(0.0, MIN_S - (self._clock() - self._began)))
        busy, used = self._busy_s(), self._own() - self._used
        if busy is None or self._busy is None:
            return None
        return max(0.0, (busy - self._busy - used) / (self._clock() - self._began))

    def _busy_s(self) -> float | None:
        """Return the busy seconds of all those cores together, since the system began."""
        ours = {f"cpu{number}" for number in _numbers()}
        lines = [line.split() for line in text_of(self._proc / "stat").splitlines()]
        mine = [line[1 : ALL + 1] for line in lines if line and line[0] in ours]
        counts = [[int(word) for word in words] for words in mine]
        if not counts or min(map(len, counts)) <= max(IDLE):
            return None
        ticks = sum(n for count in counts for i, n in enumerate(count) if i not in IDLE)
        return ticks / float(os.sysconf("SC_CLK_TCK"))
