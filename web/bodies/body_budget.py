"""Bytes of bodies that are being received, or whose requests are being answered, of all clients
together: they lie in memory or in the temporary folder.
"""

from __future__ import annotations

import threading


class BodyBudget:
    """Thread-safe: the loop takes, the threads that answer give back."""

    def __init__(self, maximum: int) -> None:
        self.maximum, self._stored, self._lock = maximum, 0, threading.Lock()

    def take(self, count: int) -> bool:
        """False where there is no room for them."""
        with self._lock:
            if self._stored + count > self.maximum:
                return False
            self._stored += count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._stored -= count

    @property
    def stored(self) -> int:
        return self._stored
