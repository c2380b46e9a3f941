"""The waitress server. Connections cost no thread until a whole request has come, and each stage
of one has an end: the head, the body, the answer that nobody reads.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from waitress.server import TcpWSGIServer

from mtmd import OptionError
from mtmd.service.turns import goes_first
from mtmd.web.auth import keys_of
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.connections.channel import HELD, Channel
from mtmd.web.connections.clients import Clients, is_here
from mtmd.web.connections.loop import Sockets
from mtmd.web.connections.refusal import Refusal
from mtmd.web.connections.task import waiting
from mtmd.web.connections.threads import Pools
from mtmd.web.connections.unix_socket import UnixSocket, bind_unix
from mtmd.web.intake.gate import GatedFlask, Work
from mtmd.web.intake.proxies import is_trusted
from mtmd.web.settings import PEER, UNIX, ServerSettings

QUICK_THREADS = 4  # for what is quick, and to refuse what there are no places for
BODY_IN_MEMORY = 4 << 20  # bytes; longer ones are files until they are whole
HELD_BACK = 1 << 20  # bytes that wait for one client before its answer waits for it
ACCEPTED_AT_ONCE = 64
ENDED_AT_ONCE = 32  # of those that are late, before others have their turn
MOST_AT_ONCE = 8  # answered by the loop itself, in one turn
CLOSED_AT_ONCE = 1 / 16  # of those there may be, when there are too many
SPARE_FILES = 512  # descriptors for what is no connection
CLOSING_S = 3  # for answers to be ended once the server is to stop
SENDING = {HELD, Work.FOLLOW, Work.AT_ONCE}  # kinds of work that have nothing to read
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
    """And what to do."""
    if "/" in host:
        return f"no address of that name is known; a socket in a file is --host {UNIX}PATH"
    if isinstance(error, socket.gaierror) or not isinstance(error, OSError):
        return "no address of that name is known; choose another with --host"
    if error.errno == errno.EADDRINUSE:
        return "another server is there; choose others with --host and --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose another with --host"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "this user may not; choose a --port from 1024 on"
    return f"{error.strerror or type(error).__name__}; choose others with --host and --port"


class Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    """`sock`: bound, by `bind`. It is the server's from then on."""

    _stopping = _ended = False
    _drained_at: float | None = None
    accepting: bool
    reading: Channel | None = None  # whose bytes are being read now

    def __init__(self, app: GatedFlask, settings: ServerSettings, sock: socket.socket) -> None:
        self._ending = threading.RLock()  # a signal may come while its own thread holds it
        self.limits = settings.connections
        self.clients = Clients()
        self.bodies = BodyBudget(self.limits.body_bytes)
        self._keys, self._trusted = keys_of(app), settings.trusted_proxies
        self._sockets = Sockets()
        self._loop: threading.Thread | None = None
        self._at_once: list[Channel] = []
        self._route = app.gate.route
        super().__init__(
            waiting(app),
            map=self._sockets,
            dispatcher=Pools(_threads_for(app)),
            _sock=sock,
            sockinfo=(sock.family, sock.type, sock.proto, sock.getsockname()),
            bind_socket=False,
            connection_limit=sys.maxsize,  # `handle_accept` closes others for one that comes
            max_request_body_size=sys.maxsize,  # `body_limit` says what each route takes
            inbuf_overflow=BODY_IN_MEMORY,
            max_request_header_size=32 << 10,
            cleanup_interval=1,
            outbuf_high_watermark=HELD_BACK,
            outbuf_overflow=4 * HELD_BACK,  # never reached: answers wait in memory, not in files
            channel_request_lookahead=1,
            log_socket_errors=False,  # a client that leaves is no error
            ident="mtmd",
            backlog=1024,
            clear_untrusted_proxy_headers=False,  # `Proxies` does, which knows networks
        )
        self._order(app)
        self._most = min(self.limits.most, _files() - SPARE_FILES)
        if self._most < self.limits.most:
            log.warning(
                "found room for %d open connections, not %d: this process may open too few files "
                "(ulimit -n)",
                self._most,
                self.limits.most,
            )

    channel_class = Channel

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Meanwhile another thread does what `serve` does after. An error ends the server."""
        done = threading.Event()

        def turn() -> None:
            self._loop = threading.current_thread()
            while not done.is_set():
                self._turn(1)

        thread = threading.Thread(target=turn, name="mtmd answering", daemon=True)
        thread.start()
        ended = True
        try:
            yield
            ended = False
        finally:
            done.set()
            self.pull_trigger()
            thread.join()
            if ended:
                self._end()

    def use(self, app: GatedFlask) -> None:
        """Requests that come from now on are this application's."""
        self.task_dispatcher.allow(_threads_for(app))
        self._order(app)
        self._keys, self._route, self.application = keys_of(app), app.gate.route, waiting(app)

    def _order(self, app: GatedFlask) -> None:
        """Which threads go first."""
        if app.device_first:
            self.task_dispatcher.put_behind(_threads_for(app).keys() - SENDING)

    def serve(self, closing: Callable[[], None], busy: Callable[[], bool] = lambda: False) -> None:
        """Until `stop`. Then nobody new is let in, and while `closing` ends what is being answered,
        each client gets its end. After `drain`, until nothing is left: `busy` tells of what no
        client waits for.
        """
        self._loop = threading.current_thread()
        while not self._stopping and self._drained_at is None:
            self._turn(1)
        if not self._stopping:
            self._drain(busy)
        self._leave_port()
        thread = threading.Thread(target=closing, name="mtmd closing", daemon=True)
        thread.start()
        end = time.monotonic() + CLOSING_S
        while time.monotonic() < end and (thread.is_alive() or self._busy):
            self._turn(0.2)
        self._end()

    def _end(self) -> None:
        self.task_dispatcher.shutdown(timeout=1)
        for channel in self._at_once:
            channel.cancel()
        with self._ending:
            self._ended = True
            self.asyncore.close_all(self._sockets, ignore_all=True)
            self._sockets.close()

    def _drain(self, busy: Callable[[], bool]) -> None:
        assert self._drained_at is not None
        self._leave_port()
        while not self._stopping and time.monotonic() < self._drained_at:
            for channel in tuple(self.active_channels.values()):
                if channel.phase == "idle":
                    channel.handle_close()
            if not self.active_channels and not busy():
                return
            self._turn(0.2)

    def _leave_port(self) -> None:
        """Who comes now finds another server, or none."""
        if self.accepting:
            self.asyncore.dispatcher.close(self)  # and not its trigger

    @property
    def draining(self) -> bool:
        return self._drained_at is not None

    def _turn(self, timeout_s: float) -> None:
        ready = self._sockets.wait(timeout_s)
        with goes_first():  # to read from one socket is to give the interpreter away
            self._sockets.handle(ready)
            at_once, self._at_once = self._at_once, []
            for channel in at_once:
                channel.service()

    def add_task(self, task: Channel) -> None:
        """What takes less time than to wake a thread for it, which then waits for the interpreter
        behind all others, is done by the loop: a few of such between two looks at connections.
        """
        few = len(self._at_once) < MOST_AT_ONCE
        if few and task.work is Work.AT_ONCE and threading.current_thread() is self._loop:
            self._at_once.append(task)
        else:
            super().add_task(task)

    @property
    def _busy(self) -> bool:
        return any(
            channel.requests or channel.total_outbufs_len
            for channel in self.active_channels.values()
        )

    def stop(self) -> None:
        """From any thread, or the handler of a signal; also of a server that has ended."""
        self._stopping = True
        self.pull_trigger()

    def drain(self, seconds: float) -> None:
        """Take nothing new, and end once all that has come is answered, after so many seconds at
        the latest. From any thread, or the handler of a signal.
        """
        self._drained_at = time.monotonic() + seconds
        self.pull_trigger()

    # what channels and parsers ask

    def look_at(self, channel: Channel) -> None:
        self._sockets.look_at(channel._fileno)

    def who(self, authorization: str) -> str | None:
        if not self._keys.needed:
            return ""
        caller = self._keys.find(authorization)
        return caller.owner if caller else None

    def route(self, method: str, path: str) -> tuple[int, Hashable]:
        return self._route(method, path)

    def make_room(self, count: int) -> bool:
        """Bodies that come more slowly than the one being read are given up for it, the slowest
        first, and as many as leave some room for the next.
        """
        now, reader = time.monotonic(), self.reading
        assert reader is not None and reader.request is not None
        rate = reader.request.rate(now)
        slower = sorted(
            (channel.request.rate(now), number, channel)
            for number, channel in self.active_channels.items()
            if channel is not reader
            and channel.phase == "body"
            and channel.request.held
            and channel.request.rate(now) < rate
        )
        wanted = self.bodies.held + count - self.bodies.most + self.bodies.most // 8
        for _, _, channel in slower:
            if wanted <= 0:
                break
            wanted -= channel.request.held
            channel.drop(_ROOM)
        return bool(slower)

    # what waitress calls

    def handle_accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted = self.accept()
            except OSError as error:  # no file is left for it
                log.warning("a connection could not be accepted: %s", error.strerror)
                self._close(self.clients.to_close(self.active_channels.values(), ACCEPTED_AT_ONCE))
                return
            if accepted is None:
                return
            sock, address = accepted
            self._let_in(sock, (PEER, 0) if isinstance(self.socket, UnixSocket) else address)

    def pull_trigger(self) -> None:
        """Also by a thread that is told of an answer's end when the server has ended."""
        with self._ending:
            if not self._ended:  # then the trigger is closed, and its number perhaps another file's
                super().pull_trigger()

    def maintenance(self, now: float) -> None:  # noqa: ARG002  # the clock may be set
        moment, ended = time.monotonic(), 0
        for channel in tuple(self.active_channels.values()):
            ended += channel.check(moment, self.limits)
            if ended == ENDED_AT_ONCE:
                self.next_channel_cleanup = 0  # that is, in the next turn
                self.pull_trigger()
                return

    def _let_in(self, sock: socket.socket, address: Any) -> None:
        with suppress(OSError):  # it has left already; then its first read says so
            self.set_socket_options(sock)
        channel = Channel(self, sock, address, self.adj, map=self._sockets)
        group, count = channel.address, self.clients.count(channel.address)
        others = (c for c in self.active_channels.values() if c is not channel)
        if len(self.active_channels) > self._most + SPARE_FILES // 2:
            channel.drop(_FULL)  # even those that are told why are too many
            return
        if count > self.limits.per_address and not (
            is_here(group) or is_trusted(str(address[0]), self._trusted)
        ):
            own = (c for c in others if c.address == group)
            most = max(1, int(self.limits.per_address * CLOSED_AT_ONCE))
            if not self._close(self.clients.to_close(own, most)):
                channel.refuse(_TOO_MANY)
        elif len(self.active_channels) > self._most:
            most = max(1, int(self._most * CLOSED_AT_ONCE))
            if not self._close(self.clients.to_close(others, most)):
                channel.refuse(_FULL)

    def _close(self, channels: list[Channel]) -> bool:
        for channel in channels:
            channel.drop(_FULL)
        return bool(channels)

    def set_socket_options(self, conn: socket.socket) -> None:
        if conn.family in (socket.AF_INET, socket.AF_INET6):  # waitress's are TCP's
            super().set_socket_options(conn)

    def getsockname(self) -> tuple[str, str]:
        """Host and port, or what stands for them."""
        if isinstance(self.socket, UnixSocket):
            return PEER, str(self.socket.path)
        name: tuple[str, str] = super().getsockname()
        return name

    @property
    def url(self) -> str:
        """Of a socket in a file, unix:PATH."""
        host: Any = self.effective_host
        if host == PEER:
            return f"{UNIX}{self.effective_port}"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.effective_port}"


def _threads_for(app: GatedFlask) -> dict[Hashable, int]:
    """The most of each kind of work."""
    places = app.gate.threads().items()
    kinds: dict[Hashable, int] = {None: QUICK_THREADS, HELD: QUICK_THREADS, Work.AT_ONCE: 1}
    return kinds | {work: count + QUICK_THREADS for work, count in places}


def _files() -> int:
    """How many files this process may have open, once raised as far as it may do so itself."""
    if os.name != "posix":
        return 512 + SPARE_FILES  # of select(), in Python for Windows
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if wanted > soft:
        with suppress(OSError, ValueError):  # macOS has another limit, below the one it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(soft, SPARE_FILES + 64)
