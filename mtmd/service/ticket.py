"""What a caller holds of a request that was taken."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator

from mtmd.events import Event, Finished


class Ticket:
    """Iterate for the events of a request. Leaving the loop, or `cancel`, gives it up."""

    _ids = itertools.count(1)

    def __init__(self, cancel: Callable[[Ticket], None]):
        self.id = f"request-{next(self._ids)}"
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._over = False

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, `Finished` the last, each once. Raises the MtmdError by which the
        request failed.
        """
        try:
            while not self._over:
                event = self._events.get()
                if isinstance(event, BaseException):
                    self._over = True
                    raise event
                self._over = isinstance(event, Finished)
                yield event
        finally:
            if not self._over:
                self.cancel()

    def cancel(self) -> None:
        """Give the request up; its last event is `Finished` with what there is. From any thread, at
        any time.
        """
        self._cancel(self)

    def put(self, event: Event | BaseException) -> None:
        self._events.put(event)
