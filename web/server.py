"""The web server: gevent's pywsgi, and how many connections and bodies there may be at once.

A connection that waits costs a greenlet. What one may take, and for how long, is in `connection`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import gevent
from gevent.pywsgi import WSGIServer
from gevent.threadpool import ThreadPool

from mtmd import OptionError
from mtmd.web.access import keys_of
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.clients import Clients, is_here
from mtmd.web.connection import Connection
from mtmd.web.intake.proxies import is_trusted
from mtmd.web.intake.request_limits import GatedFlask
from mtmd.web.native_threads import in_threads, is_patched
from mtmd.web.refusal import Refusal
from mtmd.web.settings import PEER, UNIX, ServerSettings
from mtmd.web.unix_socket import UnixSocket, bind_unix

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

BACKLOG = 1024
CLOSED_AT_ONCE = 1 / 16  # of those there may be, when there are too many
SPARE_FILES = 512  # descriptors for what is no connection
THREADS = 2048  # that call the application in a process that is not patched
LOOK_S = 0.1  # between two looks whether the server is to end
CLOSING_S = 3  # for answers to be ended once the server is to stop
_FULL = Refusal(503, "too many connections; try again later", "server_busy")
_TOO_MANY = Refusal(429, "too many connections from this address", "too_many_connections")
_ROOM = Refusal(503, "room was needed for other requests; try again later", "server_busy")
log = logging.getLogger("mtmd.web")


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that has host and port, or the file, before anything slow is done. Raises
    OptionError where they cannot be had.
    """
    if settings.unix_socket is not None:
        return bind_unix(settings.unix_socket, settings.socket_mode)
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere this lets another program take the port over
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, ValueError) as error:
        raise OptionError(
            f"host {settings.host!r:.80}, port {settings.port}: cannot be listened on: "
            f"{_why_not_bound(error, settings.host)}"
        ) from error
    return sock


def _why_not_bound(error: Exception, host: str) -> str:
    """Return why it is not bound, and what to do."""
    if "/" in host:
        return f"this name has no address; a socket in a file is --host {UNIX}PATH"
    if isinstance(error, socket.gaierror) or not isinstance(error, OSError):
        return "this name has no address; choose another with --host"
    if error.errno == errno.EADDRINUSE:
        return "another server is there; choose others with --host and --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose another with --host"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "this user may not; choose a --port from 1024 on"
    return f"{error.strerror or type(error).__name__}; choose others with --host and --port"


class Server:
    """gevent's pywsgi under the limits of `settings`. `sock` is bound, by `bind`, and closed at the
    end.

    In a process that gevent has patched, as `mtmd serve` has, each connection is a greenlet, in
    which the application is called. Elsewhere the server runs in a thread of its own, and calls
    the application in threads.
    """

    def __init__(self, app: GatedFlask, settings: ServerSettings, sock: socket.socket) -> None:
        self.limits, self._sock = settings.connections, sock
        self.bodies = BodyBudget(self.limits.body_bytes)
        self.clients = Clients()
        self.connections: set[Connection] = set()
        self._trusted = settings.trusted_proxies
        self.host, self.port = _name_of(sock)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        self._stopping = False
        self._drained_at: float | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._maximum = min(self.limits.total, _files() - SPARE_FILES)
        if self._maximum < self.limits.total:
            log.warning(
                "found room for %d open connections, not %d: this process may open too few files "
                "(ulimit -n)",
                self._maximum,
                self.limits.total,
            )
        self._threads: ThreadPool | None = None
        self.use(app)

    def use(self, app: GatedFlask) -> None:
        """Requests that come from now on are for this application."""
        self._app, self._keys = app, keys_of(app)

    @property
    def application(self) -> WSGIApplication:
        return self._app if self._threads is None else in_threads(self._app, self._threads)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer meanwhile. An error ends the server."""
        self._start()
        try:
            yield
        except BaseException:
            self._end()
            raise

    def serve(self, closing: Callable[[], None], busy: Callable[[], bool] = lambda: False) -> None:
        """Answer until `stop`. Then no client is let in, and while `closing` ends what is being
        answered, each client gets its end. After `drain`, until nothing is left: `busy` says
        whether there is work that no client waits for.
        """
        self._start()
        try:
            while not (self._stopping or self.draining):
                time.sleep(LOOK_S)
            while not (self._stopping or self._is_drained(busy)):
                time.sleep(LOOK_S)
            self._stopping = True
            thread = threading.Thread(target=closing, name="mtmd closing", daemon=True)
            thread.start()
            end = time.monotonic() + CLOSING_S
            while time.monotonic() < end and (thread.is_alive() or self._is_answering()):
                time.sleep(LOOK_S)
        finally:
            self._end()

    def stop(self) -> None:
        """Stop, from any thread or the handler of a signal; also of a server that has ended."""
        self._stopping = True

    def drain(self, seconds: float) -> None:
        """Take nothing new, and end once all that has come is answered, after so many seconds at
        the latest. From any thread, or the handler of a signal.
        """
        self._drained_at = time.monotonic() + seconds

    @property
    def draining(self) -> bool:
        return self._stopping or self._drained_at is not None

    @property
    def url(self) -> str:
        """Return the url of a socket in a file, unix:PATH."""
        if self.host == PEER:
            return f"{UNIX}{self.port}"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def _is_drained(self, busy: Callable[[], bool]) -> bool:
        assert self._drained_at is not None
        return time.monotonic() > self._drained_at or not (self.connections or busy())

    def _is_answering(self) -> bool:
        return any(c.phase == "answering" for c in tuple(self.connections))

    # in the thread of the server

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mtmd web", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if not is_patched():
            self._threads = ThreadPool(THREADS)
        self.wsgi = wsgi = _Listener(self, self._sock)
        wsgi.start()
        while not self.draining:
            gevent.sleep(LOOK_S)
        wsgi.close()
        while not self._ended:
            for connection in tuple(self.connections):
                if connection.phase == "idle":
                    connection.end()
            gevent.sleep(LOOK_S)
        gevent.killall([c.greenlet for c in self.connections], timeout=1)
        if self._threads is not None:
            with gevent.Timeout(1, False):
                self._threads.kill()
            gevent.get_hub().destroy()

    def _end(self) -> None:
        self._stopping = self._ended = True
        if self._thread is not None:
            self._thread.join(CLOSING_S)
        self._sock.close()

    def accepted(self, sock: Any, address: Any) -> None:
        """Answer the requests of one connection, unless there are too many."""
        if sock.family == getattr(socket, "AF_UNIX", None):
            address = (PEER, 0)
        else:
            with suppress(OSError):  # it has left already; then its first read says so
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        group = self.clients.came(str(address[0]))
        connection = Connection(sock, address, self, group)
        try:
            if len(self.connections) > self._maximum + SPARE_FILES // 2:
                return  # even those that are refused are too many
            refusal = self._refusal_of(connection, address)
            self.connections.add(connection)
            if refusal is None:
                connection.handle()
            else:
                connection.refuse(refusal)
        finally:
            self.connections.discard(connection)
            self.clients.left(group)
            sock.close()

    def _refusal_of(self, connection: Connection, address: Any) -> Refusal | None:
        """Return where there are too many, those are closed that wait for their clients."""
        group = connection.group
        is_many = self.clients.count(group) > self.limits.per_address and not (
            is_here(group) or is_trusted(str(address[0]), self._trusted)
        )
        if is_many:
            own = [c for c in self.connections if c.group == group]
            return None if self._close(own, self.limits.per_address) else _TOO_MANY
        if len(self.connections) >= self._maximum:
            return None if self._close(self.connections, self._maximum) else _FULL
        return None

    def _close(self, connections: Iterable[Connection], maximum: int) -> bool:
        closed = self.clients.to_close(connections, max(1, int(maximum * CLOSED_AT_ONCE)))
        for connection in closed:
            connection.end(_FULL)
            self.connections.discard(connection)
        return bool(closed)

    def close_for_files(self) -> None:
        """No file is left for a connection."""
        self._close(self.connections, SPARE_FILES)

    def who(self, authorization: str) -> str | None:
        """Return the owner of the key in this header, "" where no keys are, None for nobody."""
        if not self._keys.needed:
            return ""
        caller = self._keys.find(authorization)
        return caller.owner if caller else None

    def body_limit(self, method: str, path: str) -> int:
        """Return how many bytes may come with such a request."""
        return self._app.gate.body_limit(method, path)

    def make_room(self, reader: Connection, count: int) -> bool:
        """Give up bodies that come more slowly than the one of `reader`, the slowest first, and as
        many as leave some room for the next.
        """
        now = time.monotonic()
        rate = reader.rate(now)
        slower = [
            c
            for c in self.connections
            if c is not reader and c.phase == "body" and c.body_bytes and c.rate(now) < rate
        ]
        needed = self.bodies.stored + count - self.bodies.maximum + self.bodies.maximum // 8
        for connection in sorted(slower, key=lambda c: c.rate(now)):
            if needed <= 0:
                break
            needed -= connection.body_bytes
            connection.end(_ROOM)
        return bool(slower)


class _Listener(WSGIServer):  # type: ignore[misc]  # gevent has no types
    """Accepts connections for `server`."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        names = {"SERVER_NAME": server.host, "SERVER_PORT": str(server.port)}
        super().__init__(sock, log=None, error_log=log, environ=names)

    @property
    def application(self) -> WSGIApplication:
        return self._server.application

    def handle(self, sock: Any, address: Any) -> None:
        self._server.accepted(sock, address)

    def do_read(self) -> Any:
        try:
            return super().do_read()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            log.warning("a connection could not be accepted: %s", error.strerror)
            self._server.close_for_files()
            return None


def _name_of(sock: socket.socket) -> tuple[str, int | str]:
    """Return host and port, or what stands for them."""
    if isinstance(sock, UnixSocket):
        return PEER, str(sock.path)
    host, port, *_ = sock.getsockname()
    return host, port


def _files() -> int:
    """Return how many files this process may have open, once raised as far as it may do so
    itself.
    """
    if os.name != "posix":
        return 512 + SPARE_FILES  # of select(), in Python for Windows
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    requested = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if requested > soft:
        with suppress(OSError, ValueError):  # macOS has another limit, below the one it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (requested, hard))
            soft = requested
    return max(soft, SPARE_FILES + 64)
