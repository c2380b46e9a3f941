"""Slots of the requests of a service: how many may be answered or wait, and who does."""

from __future__ import annotations

import threading

from mtmd.base.errors import BusyError
from mtmd.service.request import Request
from mtmd.service.ticket import Ticket
from mtmd.service.turnover import Turnover


class Slots:
    """One slot for each request from `submit` to its end, but for those in bulk. Thread-safe."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._free = threading.Semaphore(maximum)
        self._lock, self._turnover = threading.Lock(), Turnover()
        self._open: dict[Ticket, None] = {}

    def acquire(self) -> None:
        """Raises BusyError where all are taken."""
        if not self._free.acquire(blocking=False):
            with self._lock:
                wait_s = self._turnover.wait_s()
            raise BusyError(
                f"{self.maximum} requests are being answered or wait, the most that may; try "
                "again later",
                wait_s,
            )

    def release(self) -> None:
        self._free.release()
        with self._lock:
            self._turnover.freed()

    def open(self, ticket: Ticket) -> None:
        """Note that somebody waits for it, from before it is posted to its end."""
        with self._lock:
            if not self._open:
                self._turnover.begin()
            self._open[ticket] = None

    def close(self, ticket: Ticket) -> None:
        """Note that nobody waits for it any more."""
        self._open.pop(ticket, None)

    def leave(self, request: Request) -> None:
        """Release what a request has that is over."""
        self.close(request.ticket)
        if not request.is_bulk:
            self.release()

    def waiting(self) -> list[Ticket]:
        """Return all that somebody waits for, also behind a device that hangs."""
        return list(self._open)
