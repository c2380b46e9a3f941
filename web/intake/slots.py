"""Describes how many may do something at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from mtmd import BusyError
from mtmd.service.turnover import Turnover

SHARED_S = 60.0  # an owner who has asked within so long counts as one who shares


class Askers:
    """Clients that have sent requests lately. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requested: dict[str, float] = {}

    def others_than(self, owner: str) -> bool:
        """Return whether others than this one, who asks now, share with him."""
        now = self._clock()
        self._requested = {name: at for name, at in self._requested.items() if now - at < SHARED_S}
        self._requested[owner] = now
        return len(self._requested) > 1


class Slots:
    """`maximum` in all. One owner may have `each`; None for all, or half of them while others ask
    too. Thread-safe.
    """

    def __init__(
        self,
        what: str,
        maximum: int,
        each: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what`: for messages, in the plural."""
        self.maximum = maximum
        self._what, self._each, self._askers = what, each, Askers(clock)
        self._lock, self._taken = threading.Lock(), Counter[str]()
        self._turnover = Turnover(clock)

    def take(self, owner: str) -> Callable[[], None]:
        """Return what is returned gives the place back; a second call does nothing. Raises
        BusyError.
        """
        with self._lock:
            each, taken = self._share(owner), self._taken.total()
            if self._taken[owner] >= each:
                raise BusyError(
                    f"{each} {self._what} for this client, the maximum; try again later",
                    self._turnover.wait_s(),
                )
            if taken >= self.maximum:
                raise BusyError(
                    f"{self.maximum} {self._what}, the maximum; try again later",
                    self._turnover.wait_s(),
                )
            if not taken:
                self._turnover.begin()
            self._taken[owner] += 1
        stored = [owner]

        def give_back() -> None:
            with self._lock:
                if stored:
                    self._turnover.freed()
                    self._taken[stored.pop()] -= 1
                    self._taken += Counter()  # without those that have none

        return give_back

    @property
    def taken(self) -> int:
        with self._lock:
            return self._taken.total()

    def _share(self, owner: str) -> int:
        if self._each is not None:
            return self._each
        return max(1, self.maximum // 2) if self._askers.others_than(owner) else self.maximum
