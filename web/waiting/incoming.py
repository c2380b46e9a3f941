"""Events of answers as they come, for who may wait for them and for who may not."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol

from flask import g, request

from mtmd import Event, Finished, MtmdError, Progress, Ticket
from mtmd.service.turns import get_up
from mtmd.web.errors import ApiError, as_api_error
from mtmd.web.telemetry.record import Record
from mtmd.web.waiting.waits import BEAT_S, CAN_WAIT, WAITS, Waits


class Incoming:
    """Events of all `tickets`, each with the place of its ticket. None among them says that there
    is nothing now: at once where the connection can wait without a thread, else after BEAT_S.

    `held`: let go of at the end, however it ends. Made where a request is answered.
    """

    def __init__(self, tickets: Sequence[Ticket], held: ExitStack) -> None:
        self.tickets, self._held, self._left = tickets, held, len(tickets)
        self._events: queue.SimpleQueue[tuple[int, Event | BaseException]] = queue.SimpleQueue()
        self._record: Record | None = g.get("record")
        self._request_id = g.get("request_id", "req")
        self.waits: Waits | None = None
        if request.environ.get(CAN_WAIT):
            self.waits = request.environ.setdefault(WAITS, Waits())
        for index, ticket in enumerate(tickets):
            ticket.redirect(self._sink(index))

    def __iter__(self) -> Iterator[tuple[int, Event] | None]:
        """Raises the error of the first that fails. Leaving the loop gives all up."""
        get_up()
        try:
            while self._left:
                try:
                    index, event = self._events.get(self.waits is None, BEAT_S)
                except queue.Empty:
                    yield None
                    continue
                if isinstance(event, BaseException):
                    raise event
                if self._record is not None and not isinstance(event, Progress):
                    self._record.has_token()
                if self._record is not None and isinstance(event, Finished):
                    self._record.receipts.append(event.answer.receipt)
                self._left -= isinstance(event, Finished)
                yield index, event
        finally:
            self._give_up()

    def as_error(self, error: BaseException) -> ApiError:
        """What its client is told, and the record notes."""
        told = as_api_error(error, self._request_id)
        if self._record is not None:
            self._record.status = told.status
        return told

    def close(self) -> None:
        """Nobody waits any more."""
        self._give_up()
        self._held.close()

    def _give_up(self) -> None:
        if self._left:
            self._left = 0
            for ticket in self.tickets:
                give_up(ticket)

    def _sink(self, index: int) -> Callable[[Event | BaseException], None]:
        def put(event: Event | BaseException) -> None:
            self._events.put((index, event))
            if self.waits is not None:
                self.waits.news()

        return put


class Cancellable(Protocol):
    def cancel(self) -> None: ...


def give_up(ticket: Cancellable) -> None:
    """Nobody wants this answer any more."""
    with suppress(MtmdError):  # the service is closed, which has ended it
        ticket.cancel()
