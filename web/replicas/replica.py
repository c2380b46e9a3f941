"""The actor of a replica: the server of one machine, for this process alone to reach, and who hands
requests on to it. Knows nothing of Ray.
"""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
from yarl import URL

from mtmd import MtmdError
from mtmd.web.replicas.choice import Route
from mtmd.web.replicas.forwarded import (
    NOT_STARTED,
    Forwarded,
    Head,
    Lost,
    Part,
    Serving,
    SettingsOf,
    Taken,
)
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings

HERE = "127.0.0.1"
ALIVE_S = 10.0  # for the server to say that it is well, which it does without the device
ENDING_S = 30.0
AT_ONCE = (
    8 << 20
)  # bytes of an answer that is handed on in one piece, so that it can be asked again


class NotStarted(Exception):
    """A replica cannot start. Its class exists wherever Ray reports it."""


class Replica:
    """`options`: of the command. `settings_of` them is what one server has; `serving` serves until
    the server is stopped, and calls its last argument with server and service once it can answer.
    `needs_key`: whether it did where the command was called. Raises NotStarted.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        settings_of: SettingsOf,
        serving: Serving,
        needs_key: bool,
        naming: Callable[[], str],
    ) -> None:
        self.name = naming()
        self._server: Server | None = None
        self._service: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._failed: list[BaseException] = []
        begun = threading.Event()

        def begin(server: Server, service: Any) -> None:
            self._server, self._service = server, service
            begun.set()

        def run() -> None:
            try:
                args = Namespace(**options)
                settings = of_a_replica(settings_of(args), self.name)
                if needs_key and not settings.needs_key:
                    raise NotStarted(
                        "found no MTMD_API_KEYS on its machine, expected the keys there too, or "
                        "--api-key-file with a path that every machine has"
                    )
                with bind(replace(settings, host=HERE, port=0)) as sock:
                    serving(args, settings, sock, begin)
            except BaseException as error:
                self._failed.append(error)
            finally:
                begun.set()

        self._thread = threading.Thread(target=run, name="mtmd serve", daemon=True)
        self._thread.start()
        begun.wait()
        for failed in self._failed:
            reported = str(failed) if isinstance(failed, (MtmdError, NotStarted)) else repr(failed)
            raise NotStarted(NOT_STARTED + " ".join(reported.split())) from None

    async def answer(self, request: Forwarded, _: Route) -> AsyncGenerator[Part, None]:
        """`Taken`, the head, then the body as it comes. Raises Lost where there is no answer to be
        had.
        """
        yield Taken(self.name)
        begun = False
        try:
            async with self._requested(request) as response:
                if response.status == 503 and self._service.fault is not None:
                    raise Lost(self.name)
                headers = [
                    (n.decode("latin-1"), v.decode("latin-1")) for n, v in response.raw_headers
                ]
                yield Head(response.status, headers, self.name)
                if (response.content_length or 0) > AT_ONCE or response.content_length is None:
                    async for piece in response.content.iter_any():
                        begun = True
                        yield piece
                elif whole := await response.read():
                    begun = True
                    yield whole
        except aiohttp.ClientError as error:
            if begun:
                raise RuntimeError("an answer ended before its end") from error
            raise Lost(self.name) from error

    async def check_health(self) -> None:
        """Ray asks every few seconds; who raises is replaced."""
        headers = [("Host", HERE)]
        async with self._requested(Forwarded("GET", "/health", headers), ALIVE_S) as response:
            if response.status != 200:
                raise RuntimeError(f"found {response.status} at /health, expected 200")

    def __del__(self) -> None:
        """Ray calls it once all answers are written, or their time is over."""
        if self._server is not None:
            self._server.stop()
            self._thread.join(ENDING_S)

    def _requested(self, request: Forwarded, max_s: float | None = None) -> Any:
        """Raises aiohttp.ClientError, also once entered."""
        assert self._server is not None
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        port = self._server.port
        return self._session.request(
            request.method,
            URL(f"http://{HERE}:{port}{request.target}", encoded=True),
            headers=request.headers,
            data=request.body or None,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=max_s, sock_connect=ALIVE_S),
        )


def of_a_replica(settings: ServerSettings, name: str) -> ServerSettings:
    """Return settings without what the front does for all, and with the name of what is kept."""
    return replace(settings, rate_limit=0, trusted_proxy=(*settings.trusted_proxy, HERE), tag=name)
