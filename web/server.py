"""The waitress server: as many threads as streams can be open, and an end for connections that
stand still.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flask import Flask, json
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.utilities import Error

from mtmd import OptionError
from mtmd.web.auth import keys_of
from mtmd.web.errors import ApiError
from mtmd.web.keys import Keys
from mtmd.web.settings import ServerSettings

if TYPE_CHECKING:
    from mtmd import Service

SPARE_THREADS = 16  # for what is quick, while every stream there can be is open
STILL_S = 60  # a connection that neither sends nor takes anything for so long is closed
HELD_BACK = 1 << 20  # bytes that wait for one client before its answer waits for it
SPARE_CONNECTIONS = 256
SHORT_BODY = 64 << 10  # bytes
CLOSING_S = 3  # for answers to be ended once the server is to stop


class _Refusal(Error):  # type: ignore[misc]
    """What is wrong with a request before the application sees it, in the form that it has
    everywhere else.
    """

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def to_response(self, ident: str | None = None) -> tuple[str, list[tuple[str, str]], bytes]:  # noqa: ARG002
        body = json.dumps(ApiError(self.code, self.body).body()).encode()
        return f"{self.code} {self.reason}", [("Content-Type", "application/json")], body


def _parser(keys: Keys | None) -> type[HTTPRequestParser]:
    """`keys` None lets anybody send a long body; otherwise it is read only for who has a key, as it
    would fill the disk.
    """

    class Parser(HTTPRequestParser):  # type: ignore[misc]
        asked, error = False, None

        def received(self, data: bytes) -> int:
            count: int = super().received(data)
            if self.headers_finished and not self.asked and keys is not None:
                self.asked = True
                long = self.chunked or self.content_length > SHORT_BODY
                if (
                    self.error is None
                    and long
                    and keys.find(self.headers.get("AUTHORIZATION", "")) is None
                ):
                    self.error = _Refusal(
                        401,
                        "Unauthorized",
                        "expected the header 'Authorization: Bearer KEY' with a key of this server",
                    )
                    self.completed = True
            if isinstance(self.error, Error) and not isinstance(self.error, _Refusal):
                self.error = _Refusal(
                    self.error.code,
                    self.error.reason,
                    f"the request cannot be read: {self.error.reason.lower()}",
                )
            if self.error is not None:
                self.expect_continue = False  # waitress would ask for the body all the same
            return count

    return Parser


def bind(settings: ServerSettings) -> socket.socket:
    """A socket that has host and port, before anything slow is done. Raises OptionError where they
    cannot be had.
    """
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
            f"host {settings.host!r:.80}, port {settings.port}: cannot be listened on; is another "
            "server there? "
            "Choose others with --host and --port"
        ) from error
    return sock


class Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    """`sock`: bound, by `bind`. It is the server's from then on."""

    _stopping = _ended = False

    def __init__(
        self, app: Flask, service: Service, settings: ServerSettings, sock: socket.socket
    ) -> None:
        self._ending = threading.RLock()  # a signal may come while its own thread holds it
        threads = service.stats().slots + settings.queue + SPARE_THREADS
        super().__init__(
            app,
            _sock=sock,
            sockinfo=(sock.family, sock.type, sock.proto, sock.getsockname()),
            bind_socket=False,
            threads=threads,
            connection_limit=threads + SPARE_CONNECTIONS,
            max_request_body_size=settings.body_bytes,
            max_request_header_size=32 << 10,
            channel_timeout=STILL_S,
            cleanup_interval=5,
            outbuf_high_watermark=HELD_BACK,
            channel_request_lookahead=1,
            asyncore_use_poll=True,
            ident="mtmd",
            backlog=1024,
            clear_untrusted_proxy_headers=True,
        )
        logging.getLogger("waitress.queue").setLevel(
            logging.ERROR
        )  # it warns of every request that waits for a thread
        keys = keys_of(app)
        parser = _parser(keys if keys.needed else None)
        self.channel_class = type("Channel", (HTTPChannel,), {"parser_class": parser})

    def serve(self, closing: Callable[[], None]) -> None:
        """Until `stop`. Then nobody new is let in, and while `closing` ends what is being answered,
        each client gets its end.
        """
        while not self._stopping:
            self._turn()
        self.accepting = False
        thread = threading.Thread(target=closing, name="mtmd closing", daemon=True)
        thread.start()
        end = time.monotonic() + CLOSING_S
        while time.monotonic() < end and (thread.is_alive() or self._busy):
            self._turn()
        self.task_dispatcher.shutdown(timeout=1)
        with self._ending:
            self._ended = True
            self.asyncore.close_all(self._map, ignore_all=True)

    @property
    def _busy(self) -> bool:
        return any(
            channel.requests or channel.total_outbufs_len
            for channel in self.active_channels.values()
        )

    def _turn(self) -> None:
        self.asyncore.loop(
            timeout=0.2 if self._stopping else 1, map=self._map, use_poll=True, count=1
        )

    def stop(self) -> None:
        """From any thread, or the handler of a signal; also of a server that has ended."""
        self._stopping = True
        with self._ending:
            if not self._ended:  # then its trigger is closed, and its number perhaps another file's
                self.pull_trigger()

    def maintenance(self, now: float) -> None:
        """Beside what waitress does: end connections whose client does not read. waitress waits for
        those for ever, each with a thread.
        """
        super().maintenance(now)
        for channel in list(self.active_channels.values()):
            if channel.total_outbufs_len and channel.last_activity < now - self.adj.channel_timeout:
                with suppress(OSError):
                    channel.socket.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        host: Any = self.effective_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.effective_port}"
