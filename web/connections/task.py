"""Answering one request with as little of a thread as that takes: where the application waits for
something, the thread goes, and another comes once there is news.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from waitress.channel import ClientDisconnected
from waitress.task import WSGITask

from mtmd.web.waiting.waits import BEAT_S, CAN_WAIT, WAITS, Waits

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment


PART = 64 << 10  # bytes; more at once would wait, in this thread, for a client that does not read


class LetGo(BaseException):
    """Nothing can be sent now: this thread is free. Passes all that handles errors."""


class Held(Protocol):
    """What a task asks of its channel. `held`: the task that has let go of its thread."""

    connected: bool
    held: Task | None

    def has_room(self) -> bool:
        """False where the client does not read; then the task is woken once it does."""

    def come_back(self) -> None:
        """Have a thread go on with `held`."""


class Task(WSGITask):  # type: ignore[misc]  # waitress has no types
    """`asked`: when the application was last asked for more. `at_work`: a thread has it."""

    channel: Held
    response_headers: list[tuple[str, str]]

    def __init__(self, channel: Held, request: Any) -> None:
        super().__init__(channel, request)
        self.asked = time.monotonic()
        self._pieces: Iterator[bytes] | None = None
        self._body: Any = None
        self._waits: Waits | None = None
        self._rest = memoryview(b"")
        self._lock = threading.Lock()
        self.at_work, self._news = True, False

    def wake(self) -> None:
        """There may be more to send, or nobody any more to send it to. From any thread."""
        with self._lock:
            self._news = True
            if self.at_work:
                return
            self.at_work = True
        self.channel.come_back()

    def check(self, now: float) -> None:
        if now - self.asked >= BEAT_S:
            self.wake()

    def hold(self, body: Iterable[bytes], waits: Waits) -> Iterable[bytes]:
        """Of an application that waits: what is sent for `body`."""
        self._body, self._pieces, self._waits = body, iter(body), waits
        self.channel.held = self
        waits.on_news(self.wake)
        return self._ready()

    def end(self) -> None:
        """Nothing more is sent. What would keep this task, its connection and the answer alive by
        each other is let go of: memory is free at once, not at the next garbage collection.
        """
        if self.environ is not None:
            self.environ.pop(CAN_WAIT, None)
        if self._waits is not None:
            self._waits.on_news(None)
        body, self._body, self._pieces, self._waits = self._body, None, None, None
        if body is not None:
            self.channel.held = None
            if hasattr(body, "close"):
                body.close()

    # what waitress calls

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        environ[CAN_WAIT] = self.hold
        return environ

    def service(self) -> None:
        try:
            if self._pieces is None:
                super().service()
            else:
                self._go_on()
        except LetGo:
            raise
        except BaseException:
            self.end()
            raise
        self.end()

    def _go_on(self) -> None:
        try:
            for piece in self._ready():
                self.write(piece)
            self.finish()
        except OSError:
            self.close_on_finish = True

    def _ready(self) -> Iterator[bytes]:
        """Raises LetGo where there is nothing more now, or the client does not read."""
        assert self._pieces is not None
        while True:
            with self._lock:
                self._news = False
            self.asked = time.monotonic()
            if not self.channel.connected:
                raise ClientDisconnected
            if not self.channel.has_room():
                self._let_go()
                continue
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    self.end()  # first: its client may ask for the next at once
                    return
                self._take_response(piece)
                self._rest = memoryview(piece)
            if self._rest:
                part, self._rest = bytes(self._rest[:PART]), self._rest[PART:]
                yield part
            else:
                self._let_go()

    def _let_go(self) -> None:
        """Returns where there is news."""
        with self._lock:
            if self._news:
                return
            self.at_work = False
        raise LetGo

    def _take_response(self, piece: bytes) -> None:
        """Of a whole response, which is one piece, status and headers are known only now."""
        found = self._waits.response if self._waits is not None else None
        if found is None or not piece:
            return
        own = {name.lower() for name, _ in found.headers}
        kept = [(name, value) for name, value in self.response_headers if name.lower() not in own]
        self.response_headers = [*kept, *found.headers]
        self.status, self.content_length = found.status, len(piece)


def waiting(app: WSGIApplication) -> WSGIApplication:
    """`app`, whose bodies that wait are held by the task that they are for."""

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = app(environ, start_response)
        waits = environ.get(WAITS)
        held: Iterable[bytes] = body if waits is None else environ[CAN_WAIT](body, waits)
        return held

    return call
