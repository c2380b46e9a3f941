"""Attempts sent to a server, many at a time, and the one account of what became of them."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attempts import Attempt, Generator

ANSWER_S = (
    120.0  # until somebody counts as unanswered: long, since a busy machine makes nobody fail
)
PATIENCE_S = 0.3  # of who has sent no whole request, before nothing more comes of it
INSIDE = re.compile(rb"Traceback|File \"|site-packages|0x[0-9a-f]{6,}|PIL\.|werkzeug|pydantic")
SAVED = 20  # of problems, to show
RETRIES, RETRY_S = (
    40,
    0.5,
)  # of who is turned away as there are too many: what was sent was not looked at


@dataclass
class Account:
    """Of the attempts of one kind; `turned_away`: how often one was sent again after 429. A status is that of the response, or "closed" where the server
    ended the connection without one, "left" where its client did, "unanswered" where nothing came.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    by_what: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    waited_ms: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    turned_away: int = 0

    def add(self, attempt: Attempt, number: str, status: str, seconds: float, data: bytes) -> None:
        self.statuses[status] += 1
        self.by_what[attempt.what][status] += 1
        self.waited_ms[attempt.what] += round(1e3 * seconds)
        self.slowest_s = max(self.slowest_s, seconds)
        where = f"{number} ({attempt.what})"
        if status == "unanswered" or (attempt.whole and status in ("closed", "refused")):
            self.problems.append(f"{where}: {status} after {seconds:.1f} s")
        elif status.startswith("5") and status not in ("501", "503"):
            self.problems.append(f"{where}: {status}, {data[-300:]!r}")
        elif status.isdigit() and int(status) >= 400 and INSIDE.search(data):
            self.problems.append(f"{where}: {status} tells of the inside, {data[-300:]!r}")

    @property
    def count(self) -> int:
        return sum(self.statuses.values())

    def report(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "statuses": dict(sorted(self.statuses.items())),
            "turned_away": self.turned_away,
            "slowest_s": round(self.slowest_s, 1),
            "waited_ms": dict(self.waited_ms.most_common(12)),
            "problems": len(self.problems),
            "first_problems": self.problems[:SAVED],
        }


def chance(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind} {seed} {number}")


def attack(
    where: tuple[str, int],
    generator: Generator,
    key: str,
    seed: int,
    *,
    count: int,
    seconds: float = 1e9,
    at_once: int = 24,
    first: int = 0,
    heavy: bool = True,
) -> Account:
    """`count` attempts, or as many as are made in `seconds`. `heavy`: those too that take seconds
    of a core.
    """
    account, numbers = Account(), iter(range(first, first + count))
    end = time.monotonic() + seconds

    async def work() -> None:
        for number in itertools.takewhile(lambda _: time.monotonic() < end, numbers):
            attempt = generator(chance(generator.__name__, seed, number), key)
            if attempt.what.startswith("heavy") and not heavy:
                continue
            for _ in range(RETRIES):
                start = time.monotonic()
                status, data = await send(where, attempt)
                taken = time.monotonic() - start
                if status != "429":
                    break
                account.turned_away += 1
                await asyncio.sleep(RETRY_S)
            account.add(attempt, f"{generator.__name__} {seed} {number}", status, taken, data)

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(at_once)))

    asyncio.run(all_of_them())
    return account


async def send(where: tuple[str, int], attempt: Attempt) -> tuple[str, bytes]:
    """The status and all that came."""
    loop = asyncio.get_running_loop()
    try:
        transport, reply = await asyncio.wait_for(
            loop.create_connection(_Reply, *where), timeout=ANSWER_S
        )
    except (OSError, TimeoutError):
        return "refused", b""
    try:
        transport.write(attempt.data)
        if attempt.leaves:
            await asyncio.sleep(0.02)
            return "left", b""
        if not attempt.whole and not await reply.within(PATIENCE_S) and transport.can_write_eof():
            transport.write_eof()  # no more comes
        if not await reply.within(ANSWER_S):
            return "unanswered", bytes(reply.data)
        return status_of(reply.data), bytes(reply.data)
    finally:
        transport.abort()


def status_of(data: bytes | bytearray) -> str:
    if not data:
        return "closed"
    result = re.match(rb"HTTP/1\.[01] (\d{3}) ", data)
    return result[1].decode() if result else "no HTTP"


class _Reply(asyncio.Protocol):
    """All that comes until the response is whole, or the connection is closed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._done = asyncio.Event()
        self._size: int | None = None

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self._is_whole():
            self._done.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._done.set()

    async def within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    def _is_whole(self) -> bool:
        if self._size is None:
            if (at := self.data.find(b"\r\n\r\n")) < 0:
                return False
            head = self.data[:at].lower()
            length = re.search(rb"\r\ncontent-length: (\d+)", head)
            self._size = at + 4 + int(length[1]) if length else -1
            self._chunked = b"\r\ntransfer-encoding: chunked" in head
        if self._size >= 0:
            return len(self.data) >= self._size
        return self._chunked and self.data.endswith(b"\r\n0\r\n\r\n")


def examples(generator: Generator, seed: int, count: int) -> Iterator[Attempt]:
    """What `attack` would send."""
    for number in range(count):
        yield generator(chance(generator.__name__, seed, number), "key")
