"""When there will be room, from how fast it has become free since the last time all of it was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

REMEMBERED = 64  # times that something became free
MAX_S = 3600.0


class Turnover:
    """Turnover of slots, or of what else is taken and given back. For callers that hold a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """All is free, and the first of it is being taken."""
        self._freed: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        self._since, self._promised = self._clock(), 0.0

    def freed(self, amount: float = 1.0) -> None:
        if len(self._freed) == REMEMBERED:
            self._since = self._freed[0][0]
        self._freed.append((self._clock(), amount))

    def wait_s(self, amount: float = 1.0) -> float:
        """Seconds until there should be room for somebody who is turned away, behind those who were
        turned away before. Where nothing has become free yet, as long as that has been so.
        """
        now = self._clock()
        elapsed = now - self._since
        freed = sum(amount for _, amount in self._freed)
        took = elapsed * amount / freed if freed else max(1.0, elapsed)
        self._promised = max(self._promised, now) + took
        return min(self._promised - now, MAX_S)
