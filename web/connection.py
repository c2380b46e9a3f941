"""One connection of the web server: gevent's handler of HTTP, with an end to every stage of a
request. The head and the body have a deadline, and an answer ends that nobody reads.

A body is received before the application is called, so that nobody holds a slot while sending, and
is refused as soon as it is known that it will be.
"""

from __future__ import annotations

import errno
import logging
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import IO, Any, Literal, Protocol, TypeAlias

import gevent
from gevent.pywsgi import WSGIHandler, WSGIServer, headers_factory

from mtmd.web.api_keys import authorization
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.refusal import Refusal
from mtmd.web.settings import HAS_LEFT, ConnectionLimits

HEAD_BYTES = 32 << 10
HEADERS = 100  # as Python's http.client has it
SHORT_BODY = 64 << 10  # bytes that somebody without a key may send
BODY_IN_MEMORY = 4 << 20  # bytes; a longer body is a file until the application reads it
PIECE = 64 << 10  # bytes received or sent before other connections get their turn
CHUNKED_PIECE = 4 << 10  # bytes; gevent reads the lines around chunks a byte at a time
CHUNKED = 16 << 10  # bytes around those of a body in chunks, and half as many as it has
LINGER_S = 5.0  # for a client that is still sending to read why it should not
_JUST_BEGUN_S = 0.05
_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)")
_NO_LINE = (b"\r\n", b"\n")  # ends a head
_ABSOLUTE = re.compile(r"https?://([^/?#]+)(.*)", re.IGNORECASE)  # an address, as proxies get it
_LENGTH = re.compile(r"[0-9]{1,18}")
_NAME = re.compile(rb"[!#-'*+.^`|~\w-]+:", re.ASCII)  # of a header, as HTTP has it
_BLANKS = b" " * 64
Phase: TypeAlias = Literal["idle", "head", "body", "answering", "ended"]
log = logging.getLogger("mtmd.web")


class Host(Protocol):
    """The server of a connection. `wsgi` is gevent's part of it."""

    limits: ConnectionLimits
    bodies: BodyBudget
    wsgi: WSGIServer

    @property
    def draining(self) -> bool:
        """Return whether nothing new is taken."""

    def who(self, authorization: str) -> str | None:
        """Return the owner of the key in this header, "" where no keys are, None for nobody."""

    def body_limit(self, method: str, path: str) -> int:
        """Return how many bytes may come with such a request."""

    def make_room(self, reader: Connection, count: int) -> bool:
        """Give up bodies that come more slowly than the one of `reader`."""


class Connection(WSGIHandler):  # type: ignore[misc]  # gevent has no types
    """`known`: a request with a key has come from here, or none is needed. `began`: when its phase
    began. `group`: its address, as connections are counted. `body_bytes` and `body_began` are of
    the body that is being received.
    """

    path: str
    ignored_socket_errors = (
        *WSGIHandler.ignored_socket_errors,
        errno.EBADF,  # it was closed by the server
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
    )

    def __init__(self, sock: Any, address: Any, host: Host, group: str) -> None:
        super().__init__(sock, address, host.wsgi)
        self.host, self.group, self.greenlet = host, group, gevent.getcurrent()
        self.phase: Phase = "idle"
        self.began, self.known = time.monotonic(), False
        self.body_bytes = 0
        self._deadline: gevent.Timeout | None = None
        self._head: bytearray | None = None
        self._refusal: Refusal | None = None
        self._raw = sock._sock
        self._blocked_s, self._blocked_bytes = 0.0, 0

    def rate(self, now: float) -> float:
        """Return the bytes a second of the body so far; of one that has just begun, many."""
        return self.body_bytes / max(now - self.began, _JUST_BEGUN_S)

    @property
    def ended(self) -> bool:
        """Return whether the server has closed it."""
        return self.phase == "ended"

    def has_left(self) -> bool:
        """Return whether the client has closed its end. From any thread."""
        if self.ended:
            return True
        try:
            return not self._raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def end(self, refusal: Refusal | None = None) -> None:
        """Close it at once, from another connection's greenlet. Where a request has begun to come,
        send `refusal` first, as far as that goes without waiting.
        """
        began, self.phase = self.phase in ("head", "body"), "ended"
        if began and refusal is not None:
            with suppress(OSError):
                self._raw.send(refusal.to_bytes())
        self._give_back()
        with suppress(OSError, AttributeError):  # it ends by itself just now
            self.socket.shutdown(socket.SHUT_RDWR)

    def refuse(self, refusal: Refusal) -> None:
        """Send it, and wait a little for the client to read it: closed with bytes unread, the
        connection would be reset, and the refusal lost.
        """
        self._set_phase("ended")
        self._give_back()
        with suppress(OSError), gevent.Timeout(LINGER_S, False):
            self.socket.sendall(refusal.to_bytes())
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(PIECE):
                gevent.sleep(0)

    # what gevent calls

    def handle_one_request(self) -> Any:
        gevent.sleep(0)  # of many requests that come together each waits for its turn
        self._set_phase("idle")
        self._refusal = None
        try:
            with gevent.Timeout(self.host.limits.idle_s, False):
                if not self.rfile.peek(1):
                    return None
                self._set_phase("head")
            if self.phase != "head":
                return None
            with self._within(self.host.limits.head_s, "the head of a request", "") as deadline:
                self._deadline = deadline
                result = super().handle_one_request()
            if isinstance(result, tuple):
                raise self._refusal or Refusal(
                    int(result[0]), "the request cannot be read: its first line is too long"
                )
        except Refusal as refusal:
            if not self.ended:
                self.refuse(refusal)
            return None
        except (OSError, ValueError):  # it was closed meanwhile
            return None
        finally:
            self._give_back()
        return None if self.ended or self.host.draining else result

    def MessageClass(self, file: Any, *_: Any) -> Any:  # gevent's name
        try:
            headers = headers_factory(_Limited(file, HEAD_BYTES - len(self.requestline)))
        except HTTPException as error:
            raise Refusal(431, f"a request may have {HEADERS} headers") from error
        _check_framing(headers)
        hosts = headers.get_all("host") or []
        if len(hosts) > 1 or (not hosts and self.request_version == "HTTP/1.1"):
            raise Refusal(400, "the request cannot be read: expected one header Host")
        with_authority = _ABSOLUTE.fullmatch(self.path)
        del headers["upgrade"]  # to another protocol: a server may ignore it (RFC 9110, 7.8)
        if with_authority is not None:  # it holds in place of the header
            del headers["host"]
            headers["host"] = with_authority[1]
            self.path = "/" + with_authority[2].removeprefix("/")
        return headers

    def handle_one_response(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        try:
            self._receive()
        except Refusal as refusal:
            self.close_connection = True
            self.refuse(refusal)
            return
        self._set_phase("answering")
        self.environ[HAS_LEFT] = self.has_left
        body = self.environ["wsgi.input"]
        try:
            if self.ended:  # by the server, meanwhile
                self.close_connection = True
            else:
                super().handle_one_response()
        finally:
            body.close()
            self.environ.clear()  # nothing of the request stays while the connection is idle
            self.application = None

    def _handle_client_error(self, ex: Exception) -> tuple[str, bytes]:
        if isinstance(ex, Refusal):
            self._refusal = ex
        else:
            message = getattr(ex, "formatted_message", "its first line is not one of HTTP")
            reason = message.partition(":")[0].lower()
            self._refusal = Refusal(400, f"the request cannot be read: {reason}")
        return str(self._refusal.status), b""

    def _log_error(self, kind: Any, error: BaseException, traceback: Any) -> None:
        if not issubclass(kind, gevent.GreenletExit):
            log.error("a connection failed", exc_info=(kind, error, traceback))

    def _write_with_headers(self, data: bytes) -> None:
        """Send the head together with the first piece."""
        self._head = head = bytearray()
        try:
            super()._write_with_headers(data[:PIECE])
        finally:
            self._head = None
        self._sendall(head)
        self._write(data[PIECE:])

    def _sendall(self, data: Any) -> None:
        if self._head is not None:
            self._head += data
            return
        left = memoryview(data)
        self.response_length += len(left)
        while left:
            left = left[self._send(left[:PIECE]) :]

    # stages of a request

    def _set_phase(self, phase: Phase) -> None:
        if not self.ended:
            self.phase, self.began = phase, time.monotonic()

    @contextmanager
    def _within(self, seconds: float, what: str, rule: str) -> Iterator[gevent.Timeout]:
        """Raises Refusal where `what` takes longer."""
        timeout = gevent.Timeout(seconds)
        with timeout:
            try:
                yield timeout
            except gevent.Timeout as late:
                if late is not timeout:
                    raise
                limit = rule or f"{seconds:g} s"
                raise Refusal(408, f"{what} may take {limit}", "too_slow") from None

    def _receive(self) -> None:
        """Put the body of the request into the environment, whole. Raises Refusal and OSError."""
        host, environ = self.host, self.environ
        if host.draining:
            raise Refusal(503, "the server is shutting down", "shutting_down")
        who = host.who(
            authorization(environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_X_API_KEY", ""))
        )
        self.known = self.known or who is not None
        chunked = environ.pop("HTTP_TRANSFER_ENCODING", None) is not None
        length = self.content_length or 0
        if who is None and (chunked or length > SHORT_BODY):
            raise Refusal(
                401,
                "expected the header 'Authorization: Bearer KEY' with a key of this server",
                "invalid_api_key",
            )
        body: IO[bytes] = tempfile.SpooledTemporaryFile(BODY_IN_MEMORY)  # noqa: SIM115
        try:
            if chunked or length:
                self._set_phase("body")
                limit = host.body_limit(environ["REQUEST_METHOD"], environ["PATH_INFO"])
                _check_length(length, limit)
                for piece in self._pieces(chunked, length):
                    self._take(len(piece), limit)
                    body.write(piece)
                    if self.body_bytes != length:
                        gevent.sleep(0)
                environ["CONTENT_LENGTH"] = str(self.body_bytes)
            body.seek(0)
        except BaseException:
            body.close()
            raise
        environ["wsgi.input"], environ["wsgi.input_terminated"] = body, False

    def _pieces(self, chunked: bool, length: int) -> Iterator[bytes]:
        """Yield the body as it comes. Raises Refusal where it comes too slowly."""
        limits, stream = self.host.limits, self.wsgi_input
        if chunked:
            counted = stream.rfile = _Counted(self.rfile)
        else:
            stream._send_100_continue()
        while chunked or stream.position < length:
            seconds = limits.body_s + self.body_bytes / limits.body_rate
            left = max(self.began + seconds - time.monotonic(), 0.001)
            rule = f"{limits.body_s:g} s, and one more for every {limits.body_rate:,} bytes"
            with self._within(left, "a body", rule):
                if not chunked:
                    piece = self.rfile.read1(min(PIECE, length - stream.position))
                    stream.position += len(piece)
                else:
                    try:
                        piece = stream.read(CHUNKED_PIECE)
                    except OSError as error:
                        if self.ended or isinstance(error.errno, int):
                            raise
                        raise Refusal(
                            400, "the request cannot be read: its chunks are damaged"
                        ) from error
                    counted.check(self.body_bytes + len(piece))
            if not piece:
                if not chunked:
                    raise OSError("the client has left")
                return
            yield piece

    def _take(self, count: int, limit: int) -> None:
        """Take received bytes into the budget of the server: a promise takes no room."""
        _check_length(self.body_bytes + count, limit)
        bodies = self.host.bodies
        if not (bodies.take(count) or (self.host.make_room(self, count) and bodies.take(count))):
            raise Refusal(
                503, "too many long requests are being received; try again later", "server_busy"
            )
        self.body_bytes += count

    def _give_back(self) -> None:
        count, self.body_bytes = self.body_bytes, 0
        self.host.bodies.give_back(count)

    def _send(self, piece: memoryview) -> int:
        """Return how many bytes were sent. Raises ConnectionAbortedError where the client has been
        taking less than it has to for too long.
        """
        with suppress(BlockingIOError):
            count: int = self._raw.send(piece)
            self._blocked_s, self._blocked_bytes = 0.0, 0
            return count
        nobody_reads = ConnectionAbortedError(
            errno.ECONNABORTED, "the client has closed the connection"
        )
        limits, began = self.host.limits, time.monotonic()
        with gevent.Timeout(limits.unread_s, nobody_reads):
            count = self.socket.send(piece)
        self._blocked_s += time.monotonic() - began
        self._blocked_bytes += count
        if self._blocked_s >= limits.unread_s:
            if self._blocked_bytes < limits.unread_rate * self._blocked_s:
                raise nobody_reads
            self._blocked_s, self._blocked_bytes = 0.0, 0
        return count


class _Limited:
    """The lines of a head. None is folded, and none has what stands for nothing: readers of headers
    try runs of blanks in all ways.
    """

    def __init__(self, file: IO[bytes], count: int) -> None:
        self._file, self._left = file, count

    def readline(self, limit: int) -> bytes:
        line = self._file.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise Refusal(431, f"the head of a request may have {HEAD_BYTES:,} bytes")
        if _CONTROLS.search(line) or line[:1].isspace() != (line in _NO_LINE):
            raise Refusal(400, "the request cannot be read: a header is more than a line of text")
        if line not in _NO_LINE and not _NAME.match(line):
            raise Refusal(400, "the request cannot be read: a header has no name of one word")
        if _BLANKS in line.replace(b"\t", b" "):
            raise Refusal(400, "the request cannot be read: a header has too many blanks")
        return line


class _Counted:
    """A body in chunks as it comes, lines between the chunks and all."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count, self._body = file, 0, 0

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        self._count += len(data)
        if self._count - self._body > 2 * CHUNKED_PIECE + CHUNKED + self._body // 2:
            raise Refusal(400, "the chunks of the body are too small, or their headers too large")
        return data

    def check(self, body: int) -> None:
        self._body = body


def _check_framing(headers: Any) -> None:
    """Raises Refusal for a body whose end two readers could see at two places."""
    lengths = headers.get_all("content-length") or []
    encodings = headers.get_all("transfer-encoding") or []
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise Refusal(400, "the request cannot be read: expected one Content-Length, in digits")
    if [e.strip().lower() for e in encodings] not in ([], ["chunked"]):
        raise Refusal(400, "the request cannot be read: expected no Transfer-Encoding but chunked")
    if lengths and encodings:
        raise Refusal(
            400, "the request cannot be read: found both Content-Length and Transfer-Encoding"
        )


def _check_length(count: int, limit: int) -> None:
    if count > limit:
        raise Refusal(
            413,
            (f"the body has {count:,} bytes or more, expected at most {limit:,} on this route"),
            "body_too_large",
        )
