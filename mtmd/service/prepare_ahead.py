"""Describes how many pictures are read and prepared beside those that are being answered, so that a
device that takes one in less time than a core prepares it does not wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from mtmd.base.control_groups import CGROUP, PROC
from mtmd.base.cores import usable_cores
from mtmd.base.options import refuse
from mtmd.base.system_memory import system_bytes

MINIMUM, MAXIMUM = 2, 64  # the most fits what a service lets wait
REMEMBERED = 8  # answers before anything is known
MAX_BYTES = 2 << 30  # of prepared pictures that wait
PART_OF_FREE = 8


def prepare_ahead(value: object) -> int | None:
    """Check the number that is requested; None for auto. Raises OptionError."""
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAXIMUM:
        refuse("prepare_ahead", value, f"an integer from 1 to {MAXIMUM}, or auto")
    return value


class PrepareAhead:
    """`requested` that many; None for as many as it takes, by what was measured lately:

        pictures = ceil(milliseconds to prepare one / milliseconds between two answers) + 1

    of which the last waits while the others are prepared (Little's law). While the device lacks
    pictures its answers are further apart than they could be, and the number is that of those being
    prepared, and one: more than there are, until one waits. At most as many as there are cores
    (`max_cores`, None for this process's), or as fit into `room` bytes (None for an eighth of what
    is free, at most 2 GiB). For callers that hold a lock.
    """

    def __init__(
        self,
        parallel: int,
        requested: int | None = None,
        *,
        max_cores: int | None = None,
        room: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.requested, self._clock = requested, clock
        self.maximum = requested or max(MINIMUM, min(MAXIMUM, max_cores or usable_cores().usable))
        self.now = requested or MINIMUM
        if room is None:
            room = min(MAX_BYTES, (system_bytes(PROC, CGROUP) or 8 * MAX_BYTES) // PART_OF_FREE)
        self.room = room
        self._parallel = parallel
        window = 2 * (parallel + self.maximum)
        self._took_s: deque[float] = deque(maxlen=window)
        self._bytes: deque[int] = deque(maxlen=window)
        self._answered: deque[float] = deque(maxlen=window + 1)

    def clock(self) -> float:
        return self._clock()

    def prepared(self, since: float, stored: int) -> None:
        """One is, begun at `since` of the clock; it holds so many bytes."""
        self._took_s.append(self._clock() - since)
        self._bytes.append(stored)

    @property
    def largest(self) -> int:
        """Bytes, of those prepared lately."""
        return max(self._bytes, default=0)

    def begin(self) -> None:
        """Nothing was under way, and now something is: how long that took says nothing."""
        self._answered.clear()

    def answered(self) -> None:
        """One of those prepared."""
        self._answered.append(self._clock())
        if self.requested is None and len(self._answered) > REMEMBERED:
            self.now = self._needed()

    def _needed(self) -> int:
        # Those of a batch end together, and those that began together
        last = 2 * (self._parallel + self.now)
        took, stored = list(self._took_s)[-last:], list(self._bytes)[-last:]
        answered = list(self._answered)[-last - 1 :]
        between = (answered[-1] - answered[0]) / (len(answered) - 1)
        mean = sum(took) / len(took)
        needed = math.ceil(min(mean / max(between, 1e-9), MAXIMUM) - 1e-9) + 1  # 2.0000001 are 2
        fit = self.room // max([1, *stored])
        return max(1, min(max(MINIMUM, needed), self.maximum, fit))
