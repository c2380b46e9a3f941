"""One connection: what it is at, how long it may be at it, and that an answer nobody reads is not
piled up.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel

from mtmd.web.connections.clients import Clients
from mtmd.web.connections.parser import Parser, Rules
from mtmd.web.connections.refusal import Refusal
from mtmd.web.connections.task import LetGo, Task
from mtmd.web.settings import ConnectionLimits

HELD = "held"  # work: of requests whose answers are being waited for
PIECE = 64 << 10  # bytes of an answer that are handed on at once
SMALL = 256  # bytes, in which are few requests
FEW = 16  # requests that are read at once
LINGER_S = 5.0  # for a client that is still sending to read why it should not
Phase: TypeAlias = Literal["idle", "head", "body", "answering", "unread", "lingering"]
log = logging.getLogger("mtmd.web")


class Host(Rules, Protocol):
    """What a channel asks of its server. `reading`: the channel whose bytes are being read."""

    clients: Clients
    reading: Channel | None

    def look_at(self, channel: Channel) -> None:
        """Something that the loop does not see has changed what it waits for."""

    def add_task(self, task: Channel) -> None:
        """Have a thread call its `service`."""

    def pull_trigger(self) -> None:
        """Wake the loop."""


class Channel(HTTPChannel):  # type: ignore[misc]  # waitress has no types
    """`known`: a request with a key has come from here, or none is needed. `held`: what is being
    answered without a thread.
    """

    known = False
    held: Task | None = None
    request: Parser | None
    requests: list[Parser]
    server: Host

    def __init__(
        self, server: Host, sock: socket.socket, addr: Any, adj: Adjustments, map: Any = None
    ) -> None:
        self.address = server.clients.came(str(addr[0]))
        self.free_since = time.monotonic()
        self._sent = 0
        self._unread: tuple[float, int] | None = None
        self._refused, self._lingering, self._left = False, 0.0, False
        self._postponed = self._serving = False
        self._rest = b""
        """Of what has come: read once fewer requests wait."""
        super().__init__(server, sock, addr, adj, map=map)

    def parser_class(self, adj: Adjustments) -> Parser:
        return Parser(self.server, adj)

    def task_class(self, _: Channel, request: Parser) -> Task:
        return self.held or Task(self, request)

    @property
    def phase(self) -> Phase:
        if self._lingering:
            return "lingering"
        if self.total_outbufs_len:
            return "unread"
        if self.requests:
            return "answering"
        request = self.request  # another thread does not set it, but the loop may be about to
        return "idle" if request is None else "body" if request.headers_finished else "head"

    @property
    def work(self) -> Hashable:
        """Of the request that is to be answered."""
        if self.held is not None:
            return HELD
        request = self.requests[0]
        return None if request.error is not None else request.work

    @property
    def client(self) -> str:
        """Whose request it is that is to be answered, among whom threads are shared out."""
        return self.requests[0].owner or self.address

    @property
    def began(self) -> float:
        """Since when it has been free, or the request that is coming has been coming."""
        request = self.request
        return self.free_since if request is None else max(request.began, self.free_since)

    @property
    def is_quiet(self) -> bool:
        held = self.held
        return not (
            (self.requests and (held is None or held.at_work))
            or self.total_outbufs_len
            or self.will_close
            or self.close_when_flushed
            or self._rest
        )

    def check(self, now: float, limits: ConnectionLimits) -> bool:
        """End what has taken too long: whether it has."""
        phase, age = self.phase, now - self.began
        if phase != "unread":
            self._unread = None
        if phase == "head" and age > limits.head_s:
            self.refuse(
                Refusal(408, f"the head of a request may take {limits.head_s:g} s", "too_slow")
            )
            return True
        if phase == "body":
            received = self.request.body_bytes_received if self.request else 0
            if age <= limits.body_s + received / limits.body_rate:
                return False
            self.refuse(
                Refusal(
                    408,
                    f"a body may take {limits.body_s:g} s, and one more for every "
                    f"{limits.body_rate:,} bytes that have come",
                    "too_slow",
                )
            )
            return True
        is_late = (
            (phase == "idle" and age > limits.idle_s)
            or (phase == "lingering" and now - self._lingering > LINGER_S)
            or (phase == "unread" and self._is_unread(now, limits))
        )
        if is_late:
            self.handle_close()
        elif phase == "answering" and (held := self.held) is not None:
            held.check(now)
        return is_late

    def refuse(self, refusal: Refusal) -> None:
        """Answer what has come so far with this, and close. Without a thread: of those who are
        late there may be thousands.
        """
        with self.requests_lock:
            request, self.request = self.request, None
        if request is not None:
            request.close()
        with suppress(OSError):
            self.socket.send(refusal.to_bytes())
        self._linger()

    def drop(self, refusal: Refusal) -> None:
        """Close at once. Where a request has begun to come, say why, as far as that can be said
        without waiting.
        """
        if self.request is not None:
            with suppress(OSError):
                self.socket.send(refusal.to_bytes())
        self.handle_close()

    # what a task asks

    def has_room(self) -> bool:
        if self.total_outbufs_len < PIECE:
            return True
        self._postponed = True
        self._told()
        return False

    def come_back(self) -> None:
        self.server.add_task(self)

    def _told(self) -> None:
        """The loop is to ask this one again."""
        self.server.look_at(self)
        self.server.pull_trigger()

    # what waitress calls

    def received(self, data: bytes) -> bool:
        """Of many requests that come together some, and the rest once these are answered: to read
        hundreds takes a hundred times as long as to read as much of a body.
        """
        if self._lingering:
            return False
        if data.count(b"\r\n\r\n") > FEW:
            data, self._rest = data[:SMALL], data[SMALL:]
        self.server.reading = self
        done: bool = super().received(data)
        self.server.reading = None
        for request in self.requests:
            self.known = self.known or (request.known and request.error is None)
            self._refused = self._refused or request.error is not None
        return done

    def readable(self) -> bool:
        if self._rest and super().readable():
            rest, self._rest = self._rest, b""
            try:
                self.received(rest)
            except Exception:  # as of what is read from the socket
                self.handle_error()
        return not self._rest and bool(super().readable())

    def send(self, data: bytes, do_close: bool = True) -> int:
        count: int = super().send(data, do_close)
        self._sent += count
        return count

    def write_soon(self, data: Any) -> int:
        """In pieces, each of which waits until the client has read most of those before."""
        if not isinstance(data, bytes) or len(data) <= PIECE:
            count: int = super().write_soon(data)
            return count
        for start in range(0, len(data), PIECE):
            super().write_soon(data[start : start + PIECE])
        return len(data)

    def writable(self) -> bool:
        if self._postponed and self.total_outbufs_len < PIECE:
            self._postponed = False
            if (held := self.held) is not None:
                held.wake()
            else:
                self.server.add_task(self)
        found: bool = super().writable()
        return found

    def service(self) -> None:
        held = self.held
        if held is None and not self.has_room():  # of earlier requests
            return
        with self.requests_lock:
            self._serving = bool(self.requests)
        if not self._serving:  # it was cancelled before this thread came
            if held is not None:
                held.end()
            return
        try:
            super().service()
        except LetGo:
            if self.total_outbufs_len:
                self._told()
            return
        except BaseException:  # a panic in a library of another language is no Exception
            log.exception("a connection failed")
            with self.requests_lock:
                for request in self.requests:
                    request.close()
                self.requests, self.close_when_flushed = [], True
            self.server.pull_trigger()
        finally:
            self._serving = False
            self.free_since = time.monotonic()
        if held is not None:
            held.end()  # where its client was gone
            self._told()

    def handle_write(self) -> None:
        lingers = self._refused and self.close_when_flushed and not self.will_close
        if lingers:
            self.close_when_flushed = False
        super().handle_write()
        if lingers and self.connected:
            if self.total_outbufs_len:
                self.close_when_flushed = True
            else:
                self._linger()

    def handle_close(self) -> None:
        self._rest = b""
        if not self._left:
            self._left = True
            self.server.clients.left(self.address)
        with self.requests_lock:  # while it is connected: then a thread looks for the next one
            waiting, self.requests[1:] = self.requests[1:], []
        for unanswered in waiting:
            unanswered.close()
        super().handle_close()
        if (held := self.held) is not None:
            held.wake()
        with self.requests_lock:
            request, self.request = self.request, None
        if request is not None:
            request.close()

    def cancel(self) -> None:
        """No thread will come any more; one that is here ends what it is at."""
        with self.requests_lock:
            served = self.requests[: int(self._serving)]
            waiting = self.requests[len(served) :]
            super().cancel()
            self.requests = served
        for request in waiting:
            request.close()

    def _linger(self) -> None:
        """Closed with bytes unread, the connection would be reset, and the refusal lost."""
        self._lingering = time.monotonic()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.handle_close()

    def _is_unread(self, now: float, limits: ConnectionLimits) -> bool:
        """Whether too little of an answer has been read for too long."""
        since, sent = self._unread or (now, self._sent)
        if now - since < limits.unread_s:
            self._unread = (since, sent)
        elif self._sent - sent < limits.unread_rate * (now - since):
            return True
        else:
            self._unread = (now, self._sent)
        return False
