"""Notices clients that went away while they wait for a first byte, when nothing is written that
could fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mtmd import MtmdError, Ticket

EVERY_S = 0.2


@dataclass(eq=False)
class _Waiting:
    is_gone: Callable[[], bool]
    ticket: Ticket


class Watcher:
    """One thread that looks whether clients are still there, and gives up what nobody waits for.
    Started with the first of them.
    """

    def __init__(self) -> None:
        self._waiting: set[_Waiting] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, is_gone: Callable[[], bool], ticket: Ticket) -> Callable[[], None]:
        """Gives `ticket` up once `is_gone` returns true. What is returned ends the watch."""
        client = _Waiting(is_gone, ticket)
        with self._changed:
            self._waiting.add(client)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mtmd clients", daemon=True)
                self._thread.start()
            self._changed.notify()

        def end() -> None:
            with self._changed:
                self._waiting.discard(client)

        return end

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                self._changed.wait(EVERY_S)
                gone = [client for client in self._waiting if client.is_gone()]
                self._waiting.difference_update(gone)
            for client in gone:
                give_up(client.ticket)


def give_up(ticket: Ticket) -> None:
    """Nobody wants this answer any more."""
    with suppress(MtmdError):  # the service is closed, which has ended it
        ticket.cancel()
