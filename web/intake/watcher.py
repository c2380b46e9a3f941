"""Notices clients that went away while they wait for a first byte, when nothing is written that
could fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mtmd import MtmdError

EVERY_S = 0.2


@dataclass(eq=False)
class Watched:
    gone: Callable[[], bool]
    give_up: Callable[[], None]


class Watcher:
    """One thread that looks whether clients are still there, and gives up what nobody waits for.
    Started with the first of them.
    """

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, gone: Callable[[], bool], give_up: Callable[[], None]) -> Callable[[], None]:
        """Calls `give_up` once when `gone` says so. What is returned ends the watch."""
        watched = Watched(gone, give_up)
        with self._changed:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mtmd clients", daemon=True)
                self._thread.start()
            self._changed.notify()

        def end() -> None:
            with self._changed:
                self._watched.discard(watched)

        return end

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._watched:
                    self._changed.wait()
                self._changed.wait(EVERY_S)
                left = [w for w in self._watched if w.gone()]
                self._watched.difference_update(left)
            for watched in left:
                with suppress(MtmdError):  # the service has been closed
                    watched.give_up()
