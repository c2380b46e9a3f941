"""Describes what takes long to make: made by whoever asks for it first, once, and kept for those
who ask next.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(Generic[V]):
    def __init__(self) -> None:
        self.making = threading.RLock()
        self.made: list[V] = []


class MadeOnce(Generic[K, V]):
    """`make(key)` by key, the `maximum` asked for last. Thread-safe: who asks for what another
    thread is making waits for it, and nobody waits for anything else. What `make` raises goes to
    who asked for it, and the next one tries again.
    """

    def __init__(self, make: Callable[[K], V], maximum: int):
        self._make, self._maximum = make, maximum
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._lock = threading.Lock()
        self.begun = 0
        """How often something was made, or tried to be."""

    def __call__(self, key: K) -> V:
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._maximum:
                self._entries.popitem(last=False)
        if not entry.made:
            with entry.making:
                if not entry.made:
                    with self._lock:
                        self.begun += 1
                    entry.made.append(self._make(key))
        return entry.made[0]

    def saved(self, key: K) -> V | None:
        """Return what is there already, without anything being made or waited for."""
        entry = self._entries.get(key)
        return entry.made[0] if entry is not None and entry.made else None

    def cache_clear(self) -> None:
        with self._lock:
            self._entries.clear()
