"""The application that clients reach: requests are read within limits, sent to a replica, and
answers handed on as they come. An ASGI application that knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from dataclasses import replace
from typing import Any, TypeAlias
from urllib.parse import quote_from_bytes

from mtmd.web.access import Access
from mtmd.web.api_keys import ANYBODY
from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.bodies.compressed import plain
from mtmd.web.errors import ApiError, in_form_of
from mtmd.web.headers import allowing, preflight
from mtmd.web.replicas.affinity import Common, common, named_in
from mtmd.web.replicas.bodies import Bodies, no_room, too_long
from mtmd.web.replicas.choice import Route
from mtmd.web.replicas.forwarded import (
    REPLICA,
    Forwarded,
    Full,
    Head,
    Late,
    Lost,
    Part,
    Replicas,
    Taken,
    backward,
    onward,
)
from mtmd.web.replicas.replica_slots import Slots
from mtmd.web.replicas.together import files_of, metrics_of
from mtmd.web.settings import ServerSettings

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

OF_ONE_FRONT = 8  # replicas
TRIED_ON = 2  # replicas at most: a request that ends one may end the next
AGAIN_S = 0.1  # before another one is asked: until Ray's router knows which one has gone
TAKEN_S = 10.0  # for Ray's router to find a replica; what it cannot place holds up the next ones
CARRIED = 1 << 20  # bytes of a body a second, beside that: Ray carries it to the replica first
LATE_MAX = 3  # times that it may find none for what may be asked again
IN_A_THREAD = 64 << 10  # bytes of a body that takes a while to read
GATHERED_S = 10.0  # for a replica to say what all are asked
PROBES = ("/health", "/ready")
OPEN = ("/docs", "/openapi.json", "/version")  # without a key, from a replica
LIGHT = ("DELETE", "GET", "HEAD", "OPTIONS")  # asked twice, they do what they do once
STRANGERS = 4  # who read that at once
FILES = "/files"
OLLAMA = {"chat", "generate", "ps", "show", "tags", "version"}
_ASCII = "".join(map(chr, range(0x21, 0x7F)))
LOST = "the replica that was answering has ended, and so has the next one; try again"


class _Requested:
    """A request, until something of its answer is there; `bodies`: where its body counts;
    `is_light`: nothing is computed for it.
    """

    def __init__(
        self, request: Forwarded, is_light: bool, bodies: BodyBudget | None = None
    ) -> None:
        self.request, self.is_light, self._bodies = request, is_light, bodies

    def end(self) -> None:
        """Release the body. Does nothing the second time."""
        body, self.request = self.request.body, replace(self.request, body=b"")
        if self._bodies is not None:
            self._bodies.give_back(len(body))


class Front:
    """`settings` as of one server. Without `affinity` requests go to the replica that is least
    busy, whatever others know already. `fronts`: how many there are.
    `each`: answers that a replica has at once.
    """

    def __init__(
        self,
        replicas: Replicas,
        settings: ServerSettings,
        affinity: bool = True,
        fronts: int = 1,
        each: int = 32,
    ) -> None:
        self._replicas, self._settings, self._affinity = replicas, settings, affinity
        self._access = Access(settings)
        self._bodies = Bodies(settings.connections)
        self._fronts, self._strangers = fronts, 0
        self._slots = Slots(lambda: replicas.names, each, fronts, settings.queue)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        path = self._path(scope["path"])
        try:
            await self._respond(scope, path, receive, send)
        except ApiError as error:
            await self._refuse(scope, path, error, send)

    async def _respond(self, scope: Message, path: str, receive: Receive, send: Send) -> None:
        """Raises ApiError where nothing has been sent."""
        if path in PROBES and scope["method"] in ("GET", "HEAD"):
            await _send(send, *_probe(path, bool(self._replicas.names)))
            return
        if _is_page(path):
            raise ApiError(
                404,
                "the page and its conversations need a single server; run "
                "`mtmd serve` without --ray",
                code="not_with_ray",
            )
        given = _decoded(scope["headers"])
        origin = _header(given, "origin")
        if scope["method"] == "OPTIONS" and origin and self._settings.allows_origin(origin):
            private = _header(given, "access-control-request-private-network") == "true"
            reported = allowing(origin, self._settings) | preflight(private)
            await _send(send, 204, list(reported.items()), b"")
            return
        owner, is_stranger = ANYBODY, False
        if self._access.keys.needed:
            key = (_header(given, "authorization"), _header(given, "x-api-key"))
            try:
                caller = self._access.caller(*key)
                self._access.check_rate(caller)
                owner = caller.owner
            except ApiError:
                if scope["method"] not in ("GET", "HEAD") or path not in OPEN:
                    raise
                is_stranger = True
        query = scope.get("query_string", b"")
        raw = scope.get("raw_path") or scope["path"].encode()
        if not raw.startswith(b"/"):
            raise ApiError(404, "there is no such route")
        headers = onward(
            given,
            (scope.get("client") or ("",))[0],
            scope["scheme"],
            self._settings.trusted_proxies,
        )
        target = quote_from_bytes(raw + (b"?" + query if query else b""), _ASCII)
        request = Forwarded(scope["method"], target, headers)
        if is_stranger:  # whoever has no key takes no place of those who have one
            if self._strangers >= STRANGERS:
                raise _busy()
            self._strangers += 1
            try:
                await self._forward(_Requested(request, True), Route(), receive, send)
            finally:
                self._strangers -= 1
            return
        body = await self._body(given, receive)
        is_light = request.method in LIGHT or path == FILES
        requested = _Requested(replace(request, body=body), is_light, self._bodies.budget)
        del request, body  # `requested` ends what it holds
        try:
            if scope["method"] == "GET" and path in ("/metrics", FILES):
                async with self._location(requested, Route()):
                    await self._gather(requested.request, path, send)
                return
            route = await self._route(
                requested.request, path, owner, _header(given, "content-encoding")
            )
            await self._forward(requested, route, receive, send)
        finally:
            requested.end()

    def _share(self) -> int:
        """Replicas that this front asks for its part."""
        return min(max(1, math.ceil(len(self._replicas.names) / self._fronts)), OF_ONE_FRONT)

    def _path(self, path: str) -> str:
        """Return the path without what a proxy has put before it, and without /v1."""
        root = self._settings.root_path
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        return path.removeprefix("/v1") if path.startswith("/v1/") else path

    async def _body(self, headers: list[tuple[str, str]], receive: Receive) -> bytes:
        """Raises ApiError for one that is too long or too slow, or for which there is no room."""
        maximum = self._settings.body_bytes
        length = next((v for n, v in headers if n.lower() == "content-length"), "0")
        if length.isdecimal() and int(length) > maximum:
            raise too_long(maximum)
        self._bodies.budget.maximum = self._settings.connections.body_bytes * self._share()
        return await self._bodies.read(receive, maximum)

    async def _route(self, request: Forwarded, path: str, owner: str, encoding: str) -> Route:
        """Return the route, to one replica for what that one keeps. Raises ApiError for a
        compressed body that cannot be read.
        """
        if named := named_in(path):
            return Route(only=named)
        if path == FILES:  # what one client uploads is asked about together
            return Route(key=owner, firmly=True)
        tenant = "" if self._settings.share_cache else owner
        if encoding and request.body:
            result = await asyncio.to_thread(self._common_of, request.body, encoding, tenant)
        elif len(request.body) > IN_A_THREAD:
            result = await asyncio.to_thread(common, request.body, tenant, self._settings.json)
        else:
            result = common(request.body, tenant, self._settings.json)
        return Route(result.key if self._affinity else "", only=result.named)

    def _common_of(self, body: bytes, encoding: str, tenant: str) -> Common:
        """Return what a compressed body shares with others. What it becomes counts among the bodies
        while it is looked at; the replica gets it as it came.
        """
        count, budget = 0, self._bodies.budget

        def take(more: int) -> None:
            nonlocal count
            if not budget.take(more):
                raise no_room()
            count += more

        try:
            made = plain(body, encoding, self._settings.body_bytes, take)
            return common(made, tenant, self._settings.json)
        finally:
            budget.give_back(count)

    async def _forward(
        self, requested: _Requested, route: Route, receive: Receive, send: Send
    ) -> None:
        """Until the answer is sent, or its client has left. Raises ApiError where nothing has been
        sent. Where something has, an error of the replica ends the connection, which tells the
        client that this is not all.
        """
        sending = asyncio.create_task(self._hand_on(requested, route, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    @asynccontextmanager
    async def _location(
        self, requested: _Requested, route: Route, again: bool = False
    ) -> AsyncIterator[None]:
        """Among what this front has with replicas. `again`: it had one before, and goes first.
        Raises ApiError.
        """
        slots = self._slots
        slot = (
            slots.of_what_computes_nothing(again)
            if requested.is_light
            else slots.of_an_answer(route.only, again)
        )
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(slot)
            except Full:
                raise _busy() from None
            yield

    async def _hand_on(self, requested: _Requested, route: Route, send: Send) -> None:
        """Ask a replica, and another one where it is lost before something of its answer is there:
        no client knows of it. Each time the request waits for a place like others, but before them:
        fewer replicas have fewer places, and Ray's router is to be given no more than these take.
        """
        lost, late = 0, 0
        while True:
            async with self._location(requested, route, again=bool(lost or late)):
                try:
                    answer, head, first = await self._begin(requested.request, route)
                except Lost as error:
                    lost += 1
                    if lost == TRIED_ON:
                        raise _lost() from None
                    self._slots.lost(error.replica)
                    route = replace(route, avoid=(*route.avoid, error.replica))
                except Late:
                    late += 1
                    # A replica may have it all the same: it would be computed, or kept, twice.
                    if late == LATE_MAX or requested.request.method not in LIGHT:
                        raise _late() from None
                except Full:
                    raise _busy() from None
                else:
                    requested.end()  # no other replica is asked from here on
                    await _send_on(answer, head, first, send)
                    return
            await asyncio.sleep(AGAIN_S)

    async def _begin(
        self, request: Forwarded, route: Route
    ) -> tuple[AsyncGenerator[Part, None], Head, bytes]:
        """An answer of which something is there. Raises Lost, Late and Full."""
        answer = self._replicas.answer(request, route)
        try:
            try:
                max_s = TAKEN_S + len(request.body) / CARRIED
                part = await asyncio.wait_for(anext(answer), max_s)
            except asyncio.TimeoutError:
                raise Late from None
            head = await anext(answer) if isinstance(part, Taken) else part
            assert isinstance(head, Head)
            first = await anext(answer, b"")
            assert isinstance(first, bytes)
        except BaseException:
            await answer.aclose()
            raise
        return answer, head, first

    async def _gather(self, request: Forwarded, path: str, send: Send) -> None:
        """Send what all replicas say, as one answer; the first refusal, if any refuses."""

        async def ask(name: str) -> tuple[str, Head | None, bytes]:
            answer = self._replicas.answer(request, Route(only=name))
            try:
                parts = await asyncio.wait_for(_all_of(answer), GATHERED_S)
                head, *pieces = [part for part in parts if not isinstance(part, Taken)]
                assert isinstance(head, Head)
                if head.replica != name:  # it has gone since, and another one was asked for it
                    return name, None, b""
                return name, head, b"".join(piece for piece in pieces if isinstance(piece, bytes))
            except (Lost, Full, asyncio.TimeoutError):
                return name, None, b""
            finally:
                await answer.aclose()

        # Ray tells calls apart by what HTTP request they are made for: these are for themselves.
        requested = [
            Context().run(asyncio.ensure_future, ask(name)) for name in self._replicas.names
        ]
        stated = await asyncio.gather(*requested)
        for _, head, body in stated:
            if head is not None and head.status != 200:
                await _send(send, head.status, backward(head.headers), body)
                return
        answered = {name: body for name, head, body in stated if head is not None}
        silent = [name for name, head, _ in stated if head is None]
        if not answered or (silent and path == FILES):
            raise _lost()
        put_together = metrics_of(answered, silent) if path == "/metrics" else files_of(answered)
        saved = next(backward(head.headers) for _, head, _ in stated if head is not None)
        headers = [(n, v) for n, v in saved if n.lower() != "content-length"]
        await _send(send, 200, headers, put_together)

    async def _refuse(self, scope: Message, path: str, error: ApiError, send: Send) -> None:
        headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1") or None
        if self._settings.allows_origin(origin):
            headers += allowing(str(origin), self._settings).items()
        body = json.dumps(in_form_of(path, error, "")).encode()
        await _send(send, error.status, [*headers, *error.headers.items()], body)


def _probe(path: str, is_ready: bool) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return the answer to a probe, for all replicas together: each is asked by Ray, and left out
    where it does not answer.
    """
    word = ("ready" if path == "/ready" else "ok") if is_ready else "loading"
    body = json.dumps({"status": word}).encode()
    headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
    return (200, headers, body) if is_ready else (503, [*headers, ("Retry-After", "5")], body)


def _is_page(path: str) -> bool:
    """The page's own addresses; /api/ is Ollama's too."""
    if path.startswith("/api/"):
        return path.split("/")[2] not in OLLAMA
    return path in ("/", "/favicon.ico", "/diagnostics") or path.startswith(("/c/", "/static/"))


def _decoded(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers as text that can be written again. Raises ApiError."""
    try:
        return [(n.decode("ascii"), v.decode()) for n, v in headers]
    except UnicodeDecodeError as error:
        raise ApiError(400, "found a header that is no UTF-8", code="bad_header") from error


def _header(headers: list[tuple[str, str]], name: str) -> str:
    """The last of this name, "" where there is none."""
    return next((v for n, v in reversed(headers) if n.lower() == name), "")


def _busy() -> ApiError:
    return ApiError(
        429,
        "every replica is busy, and as many requests wait as may; try again later",
        code="server_busy",
        headers={"Retry-After": "1"},
    )


def _late() -> ApiError:
    return ApiError(
        503,
        "no replica accepted the request in time: all are too busy, or the "
        "network is too slow; try again later",
        code="replica_late",
        headers={"Retry-After": "1"},
    )


def _lost() -> ApiError:
    return ApiError(503, LOST, code="replica_lost", headers={"Retry-After": "1"})


async def _send_on(
    answer: AsyncGenerator[Part, None], head: Head, first: bytes, send: Send
) -> None:
    try:
        headers = [*backward(head.headers), (REPLICA, head.replica)]
        await send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers],
            }
        )
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in answer:
            assert isinstance(piece, bytes)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        await answer.aclose()


async def _send(send: Send, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    headers = [(n, v) for n, v in headers if n.lower() != "content-length"]
    lines = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
    if status != 204:
        lines.append((b"Content-Length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def _all_of(answer: AsyncGenerator[Part, None]) -> list[Part]:
    return [part async for part in answer]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
