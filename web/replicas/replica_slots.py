"""The number of replicas, and how many requests of one front are with them at once: so few
that Ray's router finds a place for each. It works on two for every replica at a time, and one that
it cannot place holds up all that come after it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mtmd.web.replicas.forwarded import Full

MORE_AFTER_S, FEWER_AFTER_S = 30.0, 600.0  # so long more, or fewer, have to be wanted
LOOKED_BACK_S = 30.0  # over which requests are averaged
SPARE = 16  # places of each replica for what computes nothing: metrics, lists, uploads
LOOK_S = 1.0  # between two looks whether there are more replicas
LOST_S = 30.0  # as long as Ray waits for one that does not answer
PINNED_S = 10.0  # for an answer that one replica alone can give, before that one is said to be busy


def scaling(minimum: int, maximum: int, parallel: int) -> dict[str, Any]:
    """Return options of Ray Serve for the number of replicas, of which each computes `parallel`
    answers at once. What waits in fronts Ray does not see; they give each replica more
    than it computes, though, so that more are wanted where all are busy.
    """
    if minimum == maximum:
        return {"num_replicas": minimum}
    return {
        "autoscaling_config": {
            "min_replicas": minimum,
            "max_replicas": maximum,
            "target_ongoing_requests": parallel,
            "upscale_delay_s": MORE_AFTER_S,
            "downscale_delay_s": FEWER_AFTER_S,
            "look_back_period_s": LOOKED_BACK_S,
            "metrics_interval_s": min(10.0, LOOKED_BACK_S),
        }
    }


class Room:
    """Places, given in the order in which they are asked for. `maximum`: how many, asked each time;
    `queue`: how many may wait.
    """

    def __init__(self, maximum: Callable[[], int], queue: int) -> None:
        self._maximum, self._queue, self._stored = maximum, queue, 0
        self._line = deque[asyncio.Future[None]]()

    @asynccontextmanager
    async def location(
        self, within_s: float = math.inf, again: bool = False
    ) -> AsyncIterator[None]:
        """`again`: for one who had a place before, and goes before those who wait. Raises Full
        where too many wait, or where it takes longer.
        """
        self._let_in()
        if self._stored < self._maximum():
            self._stored += 1
        else:
            await self._wait(within_s, again)
        try:
            yield
        finally:
            self._leave()

    @property
    def is_empty(self) -> bool:
        return not (self._stored or self._line)

    async def _wait(self, within_s: float, again: bool) -> None:
        if len(self._line) >= self._queue and not again:
            raise Full
        loop = asyncio.get_running_loop()
        mine, end = loop.create_future(), loop.time() + within_s
        self._line.appendleft(mine) if again else self._line.append(mine)
        try:
            while not mine.done():
                if (left := end - loop.time()) <= 0:
                    raise Full
                await asyncio.wait((mine,), timeout=min(left, LOOK_S))
                self._let_in()
        except BaseException:
            if mine.done():
                self._leave()
            else:
                self._line.remove(mine)
            raise

    def _leave(self) -> None:
        self._stored -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._line and self._stored < self._maximum():
            self._stored += 1
            self._line.popleft().set_result(None)


class Slots:
    """Places of one of `fronts`. `names`: the replicas that are ready, of which each has `each`
    answers at once, and as many more that only it can give.
    """

    def __init__(
        self,
        names: Callable[[], Sequence[str]],
        each: int,
        fronts: int,
        queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._queue, self._clock = names, queue, clock
        self._only = max(1, each // fronts)
        self._answers = Room(lambda: -(-each * len(self._well()) // fronts), queue)
        self._light = Room(lambda: max(1, SPARE // fronts) if names() else 0, queue)
        self._pinned: dict[str, Room] = {}
        self._lost: dict[str, float] = {}

    @asynccontextmanager
    async def of_an_answer(self, only: str, again: bool = False) -> AsyncIterator[None]:
        """`only`: the replica that alone can give it, "" for any. `again`: as of `Room`. Raises
        Full.
        """
        async with AsyncExitStack() as stack:
            if only in self._names():
                await stack.enter_async_context(self._room_of(only).location(PINNED_S, again))
            await stack.enter_async_context(self._answers.location(again=again))
            yield

    @asynccontextmanager
    async def of_what_computes_nothing(self, again: bool = False) -> AsyncIterator[None]:
        """Raises Full."""
        async with self._light.location(again=again):
            yield

    def lost(self, name: str) -> None:
        """Note that a replica has ended, or cannot answer, before `names` leaves it out."""
        self._lost[name] = self._clock() + LOST_S

    def _well(self) -> Sequence[str]:
        """Return the replicas that have places. One that was lost has none until it is named no
        more, or a while has passed; where all were, it is not known that they are gone.
        """
        names, now = self._names(), self._clock()
        self._lost = {n: end for n, end in self._lost.items() if n in names and now < end}
        return [name for name in names if name not in self._lost] or names

    def _room_of(self, name: str) -> Room:
        self._pinned = {n: room for n, room in self._pinned.items() if not room.is_empty}
        return self._pinned.setdefault(name, Room(lambda: self._only, self._queue))
