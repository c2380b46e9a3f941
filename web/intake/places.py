"""How many may do something at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from mtmd import BusyError


class Places:
    """`most` in all, and `each` for one and the same owner. Thread-safe."""

    def __init__(self, what: str, most: int, each: int) -> None:
        """`what`: for messages, in the plural."""
        self.most, self.each = most, each
        self._what, self._lock, self._taken = what, threading.Lock(), Counter[str]()

    def take(self, owner: str) -> Callable[[], None]:
        """What is returned gives the place back; a second call does nothing. Raises BusyError."""
        with self._lock:
            if self._taken.total() >= self.most:
                raise BusyError(f"{self.most} {self._what}, the most that may; try again later")
            if self._taken[owner] >= self.each:
                raise BusyError(
                    f"{self.each} {self._what} for the same client, the most that may; try again "
                    "later"
                )
            self._taken[owner] += 1
        taken = [owner]

        def give_back() -> None:
            with self._lock:
                if taken:
                    name = taken.pop()
                    self._taken[name] -= 1
                    if not self._taken[name]:
                        del self._taken[name]

        return give_back

    @property
    def taken(self) -> int:
        with self._lock:
            return self._taken.total()
