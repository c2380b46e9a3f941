"""The server's side of one engine's process, from its start to its end: calls and their replies,
tickets and their events. It fails once, for good; whoever waits is given the reason.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mtmd.base.cancellation import LOOKED_S, is_gone, left, may_be_left
from mtmd.base.errors import DeviceError, LeftError, MtmdError
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import current_owner
from mtmd.engine_process.link import LinkClosedError
from mtmd.engine_process.messages import (
    Abandon,
    Beat,
    Call,
    Cancel,
    Compiled,
    Failed,
    Logged,
    Reply,
    TicketEvent,
)
from mtmd.engine_process.outbox import Outbox
from mtmd.engine_process.process import Process
from mtmd.events import Finished
from mtmd.loaded.device_thread import AGAIN, CLOSED
from mtmd.service.ticket import Ticket

log = logging.getLogger("mtmd.engine")


class Connection:
    """`error_of` makes the error for each who waits, from the reason of the failure; `failed` is
    called once with that reason, on any thread.
    """

    def __init__(self, error_of: Callable[[str], MtmdError], failed: Callable[[str], None]) -> None:
        """Start the process."""
        self._error_of, self._on_failure = error_of, failed
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._replies: dict[int, SimpleQueue[Reply]] = {}
        self._tickets: dict[int, Ticket] = {}
        self._closing = False
        self.failure: str | None = None
        """Why it has failed."""
        self.beats, self.weights_read = 0, (0, 0)
        self.compiling: Callable[[int, int], None] = lambda *_: None
        self.process = Process()
        self._outbox = Outbox(self.process.link, self._cannot_send)
        self._reader = threading.Thread(target=self._read, name="mtmd engine reader", daemon=True)
        self._reader.start()

    @property
    def busy(self) -> bool:
        return bool(self._tickets)

    def call(
        self, name: str, *arguments: Any, tickets: Sequence[int] = (), limit_s: float | None = None
    ) -> Any:
        """Return what the call returns there. Raises what it raises there, the error of a
        failure, LeftError where nobody waits for it any more, and Empty after `limit_s`.
        """
        queue: SimpleQueue[Reply] = SimpleQueue()
        with self._lock:
            if self.failure is not None:
                raise self._error_of(self.failure)
            if self._closing:
                raise MtmdError(CLOSED)
            number = next(self._ids)
            self._replies[number] = queue
        try:
            call = Call(number, name, current_owner(), arguments, tuple(tickets))
            if limit_s is not None:  # a process that reads nothing would hold this up
                self._outbox.put(call)
            else:
                with suppress(LinkClosedError):  # the reader notices it, too
                    self.process.link.send([call])
            reply = _waited(queue, limit_s)
        except LeftError:
            self._outbox.put(Abandon(number, tuple(tickets)))
            raise
        finally:
            with self._lock:
                self._replies.pop(number, None)
        if reply.error is not None:
            raise reply.error
        return reply.value

    def submit(self, count: int, *arguments: Any) -> list[Ticket]:
        """Return the tickets of a request for so many answers."""
        with self._lock:
            numbers = [next(self._ids) for _ in range(count)]
            tickets = [Ticket(partial(self._cancel, number)) for number in numbers]
            self._tickets.update(zip(numbers, tickets, strict=True))
        try:
            sizes = self.call("submit", *arguments, tickets=numbers)
        except BaseException:
            for number in numbers:
                self._pop(number)
            raise
        for ticket, size in zip(tickets, sizes, strict=True):
            ticket.stored = size
        return tickets

    def fail(self, reason: str) -> None:
        """Give the process up: all who wait are told, and nothing of it is waited for."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        self.process.link.end()
        self._on_failure(reason)
        self._report_all(lambda: self._error_of(reason))

    def end(self) -> None:
        """End the process, and with it what is under way. Where it has failed it is killed."""
        self._closing = True
        if self.failure is None:
            self.process.end()
        else:
            self.kill()
        self._reader.join()
        self._outbox.close()
        self.process.link.close()

    def kill(self) -> None:
        self._closing = True
        self.process.link.end()  # one that the system holds on to would hold up the reader
        self.process.kill()

    def _cancel(self, number: int, _: Ticket) -> None:
        if number in self._tickets:
            self._outbox.put(Cancel(number))

    def _pop(self, number: int) -> Ticket | None:
        with self._lock:
            return self._tickets.pop(number, None)

    def _read(self) -> None:
        try:
            while True:
                for record in self.process.link.receive():
                    self._take(record)
        except LinkClosedError:
            if self._closing:
                self._report_all(lambda: MtmdError(CLOSED))
            else:
                self.fail(f"the model's process has ended ({self.process.how_it_ended()})")
        except Exception as error:
            log.error("%s", traceback_text(error))
            self.fail(f"a message of the model's process is unreadable: {type(error).__name__}")

    def _cannot_send(self, error: BaseException) -> None:
        log.error("%s", traceback_text(error))
        self.fail(f"a message to the model's process cannot be sent: {type(error).__name__}")

    def _take(self, record: Any) -> None:
        self.beats += 1
        if isinstance(record, TicketEvent):
            event = record.event
            is_last = isinstance(event, (Finished, BaseException))
            ticket = self._pop(record.ticket) if is_last else self._tickets.get(record.ticket)
            if ticket is not None:
                ticket.put(self._translated(event) if isinstance(event, MtmdError) else event)
        elif isinstance(record, Reply):
            queue = self._replies.get(record.number)
            if queue is not None:
                error = None if record.error is None else self._translated(record.error)
                queue.put(Reply(record.number, record.value, error))
        elif isinstance(record, Beat):
            self.weights_read = record.weights_read
        elif isinstance(record, Compiled):
            self.compiling(record.done, record.total)
        elif isinstance(record, Logged):
            logging.getLogger(record.logger).log(record.level, "%s", record.text)
        elif isinstance(record, Failed):
            self.fail(_without_advice(record.error))

    def _translated(self, error: MtmdError) -> MtmdError:
        """A failed device ends the process, whether `Failed` has come already or comes next."""
        return self._error_of(_without_advice(error)) if isinstance(error, DeviceError) else error

    def _report_all(self, error: Callable[[], MtmdError]) -> None:
        """Give all who wait an error, one for each."""
        with self._lock:
            replies, tickets = list(self._replies.items()), list(self._tickets.values())
            self._replies, self._tickets = {}, {}
        for number, queue in replies:
            queue.put(Reply(number, error=error()))
        for ticket in tickets:
            ticket.put(error())


def _waited(queue: SimpleQueue[Reply], limit_s: float | None) -> Reply:
    end = None if limit_s is None else time.monotonic() + limit_s
    gone, looks = is_gone(), LOOKED_S if may_be_left() else None
    while True:
        waits = [looks, None if end is None else max(0.0, end - time.monotonic())]
        try:
            return queue.get(timeout=min((w for w in waits if w is not None), default=None))
        except Empty:
            if end is not None and time.monotonic() >= end:
                raise
            if gone():
                raise left() from None


def _without_advice(error: MtmdError) -> str:
    return str(error).removesuffix(f"; {AGAIN}")
