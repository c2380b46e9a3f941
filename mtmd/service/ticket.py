"""Describes what a caller holds of a request that was taken."""

from __future__ import annotations

import itertools
import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Lock

from mtmd.base.errors import MtmdError
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import release_turn
from mtmd.events import Event, Finished

log = logging.getLogger("mtmd.service")


class Ticket:
    """Iterate for the events of a request. Leaving the loop, or `cancel`, gives it up."""

    _ids = itertools.count(1)

    def __init__(self, cancel: Callable[[Ticket], None], stored: int = 0):
        """`stored`: bytes of what was prepared for it."""
        self.id = f"request-{next(self._ids)}"
        self.stored = stored
        self._cancel: Callable[[Ticket], None] | None = cancel
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._over = False
        self._put: Callable[[Event | BaseException], None] = self._events.put
        self._lock = Lock()

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, `Finished` the last, each once. Raises the MtmdError by which the
        request failed.
        """
        release_turn()
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
        cancel = self._cancel
        if cancel is not None:
            cancel(self)

    def put(self, event: Event | BaseException) -> None:
        """Put an event. Where its receiver raises, the request alone is given up, and told so as
        far as that can be told.
        """
        with self._lock:
            cancel = self._cancel
            if isinstance(event, (Finished, BaseException)):
                self._cancel = None  # who keeps the ticket does not keep the model by it
            put = self._put
            if self._cancel is None:
                self._put = self._events.put  # nor it and who waited for it each other
            try:
                put(event)
                return
            except Exception as error:
                log.error("%s: its events cannot be handed on\n%s", self.id, traceback_text(error))
                self._put = self._events.put
                with suppress(Exception):  # told already
                    put(MtmdError(f"internal error: {type(error).__name__}"))
        if cancel is not None:
            cancel(self)  # who may hand on its end at once

    def redirect(self, put: Callable[[Event | BaseException], None]) -> None:
        """Hand all events, those that wait here first, to `put` in place of who iterates."""
        with self._lock:
            while not self._events.empty():
                put(self._events.get())
            if self._cancel is not None:  # more is to come
                self._put = put


def gather(tickets: Sequence[Ticket]) -> Iterator[tuple[int, Event]]:
    """Events of several requests as they come, each with its request's place in the list. Raises
    the error of the first that fails; leaving the loop, or an error, gives all up.
    """
    events: queue.SimpleQueue[tuple[int, Event | BaseException]] = queue.SimpleQueue()

    def sink(index: int) -> Callable[[Event | BaseException], None]:
        return lambda event: events.put((index, event))

    for index, ticket in enumerate(tickets):
        ticket.redirect(sink(index))
    left = len(tickets)
    release_turn()
    try:
        while left:
            index, event = events.get()
            if isinstance(event, BaseException):
                raise event
            left -= isinstance(event, Finished)
            yield index, event
    finally:
        if left:
            for ticket in tickets:
                ticket.cancel()
