"""Bodies of requests, as a front reads them: within limits of length and time, and of bytes for all
of them together. Where those are taken, the slowest that are still coming make room, as on one
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.errors import ApiError
from mtmd.web.settings import ConnectionLimits

JUST_BEGUN_S = 1.0  # a body that has come for less counts as if it had come for so long
LONG = 1 << 20  # bytes; from there on Python lets others go on while it copies them
SPARE = 8  # a part in so many is made room for at once, for the next pieces


class _Coming:
    """A body of which more is to come. `given_up`: done where others had to have its room."""

    def __init__(self, began: float) -> None:
        self.began, self.pieces, self.stored = began, list[bytes](), 0
        self.given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def rate(self, now: float, more: int = 0) -> float:
        """Bytes a second so far."""
        return (self.stored + more) / max(now - self.began, JUST_BEGUN_S)


class Bodies:
    """Bodies of one front, which sets `budget.maximum` by the number of its replicas."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits, self.budget = limits, BodyBudget(limits.body_bytes)
        self._coming = set[_Coming]()

    async def read(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], maximum: int
    ) -> bytes:
        """Return at most `maximum` bytes, which count until they are given back to `budget`. Raises
        ApiError for one that is too long or too slow, or for which there is no room.
        """
        mine = _Coming(asyncio.get_running_loop().time())
        self._coming.add(mine)
        try:
            while True:
                message = await self._next(mine, receive)
                piece = message.get("body", b"")
                if mine.stored + len(piece) > maximum:
                    raise too_long(maximum)
                if not (self.budget.take(len(piece)) or self._make_room(mine, len(piece))):
                    raise no_room()
                mine.stored += len(piece)
                mine.pieces.append(piece)
                if not message.get("more_body"):
                    self._coming.discard(mine)  # it is whole: nobody else is given its room
                    return await _whole(tuple(mine.pieces), mine.stored)
        except BaseException:
            self._give_back(mine)
            raise
        finally:
            self._coming.discard(mine)
            mine.given_up.cancel()

    async def _next(
        self, mine: _Coming, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
    ) -> MutableMapping[str, Any]:
        limits, loop = self._limits, asyncio.get_running_loop()
        end = mine.began + limits.body_s + mine.stored / limits.body_rate
        coming = asyncio.ensure_future(receive())
        try:
            await asyncio.wait(
                (coming, mine.given_up),
                timeout=end - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if mine.given_up.done():
                raise no_room()
            if not coming.done():
                raise ApiError(
                    408,
                    f"a body may take {limits.body_s:g} s, and one more for "
                    f"every {limits.body_rate:,} bytes received",
                    code="too_slow",
                )
            message = coming.result()
        finally:
            coming.cancel()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        return message

    def _make_room(self, mine: _Coming, count: int) -> bool:
        """Bodies that come more slowly than this one are given up for it, the slowest first, and as
        many as leave some room for the next. Whether `count` bytes are taken then.
        """
        now = asyncio.get_running_loop().time()
        rate = mine.rate(now, count)
        slower = sorted(
            (
                one
                for one in self._coming
                if one is not mine and one.stored and one.rate(now) < rate
            ),
            key=lambda one: one.rate(now),
        )
        budget = self.budget
        requested = budget.stored + count - budget.maximum
        if requested > sum(one.stored for one in slower):
            return False  # in vain
        requested += budget.maximum // SPARE
        for one in slower:
            if requested <= 0:
                break
            requested -= one.stored
            self._give_back(one)
            one.given_up.set_result(None)
            self._coming.discard(one)
        return budget.take(count)

    def _give_back(self, one: _Coming) -> None:
        self.budget.give_back(one.stored)
        one.stored = 0
        one.pieces.clear()


async def _whole(pieces: tuple[bytes, ...], count: int) -> bytes:
    """Return the pieces as one. Other requests do not wait for a long one."""
    if len(pieces) > 1 and count >= LONG:
        return await asyncio.to_thread(_joined, pieces)
    return _joined(pieces)


def _joined(pieces: tuple[bytes, ...]) -> bytes:
    return b"".join(pieces)


def too_long(maximum: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {maximum:,} bytes, the maximum", code="body_too_large"
    )


def no_room() -> ApiError:
    return ApiError(
        503,
        "room was needed for other requests; try again later",
        code="server_busy",
        headers={"Retry-After": "1"},
    )
