"""Places that several callers share, given in the order in which they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock


class Places:
    """`most` at once. Safe to use from any thread."""

    def __init__(self, most: int):
        self.most = most
        self._lock = Lock()
        self._taken, self._number = 0, 0
        self._asked: OrderedDict[int, Callable[[], None]] = OrderedDict()

    def ask(self, begin: Callable[[], None]) -> int:
        """`begin` is called once there is a place: now, or by who frees one. It takes no lock that
        is held around `ask` or `free`, and whoever was called frees the place. Returns a number to
        take the request back by.
        """
        with self._lock:
            self._number += 1
            number = self._number
            self._asked[number] = begin
        self._give()
        return number

    def take_back(self, number: int) -> bool:
        """Whether it had no place yet; it gets none any more."""
        with self._lock:
            return self._asked.pop(number, None) is not None

    def free(self) -> None:
        with self._lock:
            self._taken -= 1
        self._give()

    def _give(self) -> None:
        while True:
            with self._lock:
                if not self._asked or self._taken >= self.most:
                    return
                _, begin = self._asked.popitem(last=False)
                self._taken += 1
            begin()
