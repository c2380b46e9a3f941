"""Bodies of many clients at once, in memory that has an end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mtmd.web.errors import ApiError
from mtmd.web.replicas import bodies as module
from mtmd.web.replicas.bodies import Bodies
from mtmd.web.settings import ConnectionLimits


class Client:
    """Sends what it is told to, and nothing else."""

    def __init__(self, bodies, maximum=10_000):
        self._coming = asyncio.Queue()
        self.task = asyncio.ensure_future(bodies.read(self._coming.get, maximum))

    async def send(self, count, more=True):
        self._coming.put_nowait({"type": "http.request", "body": b"x" * count, "more_body": more})
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def code(self):
        """Of the refusal; None while it is being read."""
        return self.task.exception().code if self.task.done() else None


def of(maximum):
    return Bodies(ConnectionLimits(body_bytes=maximum))


def test_the_slowest_make_room_for_one_that_comes_faster():
    async def run():
        bodies = of(1000)
        slow, slower, late = (Client(bodies) for _ in range(3))
        await slow.send(300)
        await slower.send(100)
        await late.send(500)
        assert bodies.budget.stored == 900
        fast = Client(bodies)
        await fast.send(700, more=False)
        assert fast.task.done() and len(fast.task.result()) == 700
        assert slower.code == slow.code == late.code == "server_busy"
        assert bodies.budget.stored == 700
        bodies.budget.give_back(700)

    asyncio.run(run())


def test_no_more_of_them_than_are_needed_and_nobody_in_vain():
    async def run():
        bodies = of(1000)
        slow, fast = Client(bodies), Client(bodies)
        await slow.send(100)
        await fast.send(600)
        other = Client(bodies)
        await other.send(350)
        assert slow.code == "server_busy" and fast.code is None and other.code is None
        assert bodies.budget.stored == 950
        whole = Client(bodies)
        await whole.send(1100)
        assert whole.code == "server_busy" and fast.code is other.code is None
        await fast.send(10, more=False)
        await other.send(10, more=False)
        assert len(fast.task.result()) == 610 and len(other.task.result()) == 360
        bodies.budget.give_back(970)
        assert bodies.budget.stored == 0

    asyncio.run(run())


def test_a_slow_one_has_no_room_made_for_it_and_what_has_come_stays():
    async def run():
        bodies = of(1000)
        fast = Client(bodies)
        await fast.send(900)
        slow = Client(bodies)
        await slow.send(200)
        assert slow.code == "server_busy" and fast.code is None
        done = Client(bodies)
        await done.send(100, more=False)
        assert bodies.budget.stored == 1000
        await fast.send(10)
        assert fast.code == "server_busy", "whole bodies are not given up"
        assert bodies.budget.stored == 100

    asyncio.run(run())


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
def test_a_client_that_goes_gives_its_room_back(how):
    async def run():
        bodies = of(1000)
        client = Client(bodies)
        await client.send(400)
        if how == "leaves":
            client._coming.put_nowait({"type": "http.disconnect"})
        else:
            client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert bodies.budget.stored == 0 and not bodies._coming

    asyncio.run(run())


def test_a_body_that_does_not_come_is_too_slow():
    async def run():
        bodies = Bodies(ConnectionLimits(body_s=0.0))
        client = Client(bodies)
        with pytest.raises(ApiError) as refused:
            await client.task
        assert refused.value.code == "too_slow" and bodies.budget.stored == 0

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [False, True])
def test_others_go_on_while_a_long_one_is_put_together(leaves, monkeypatch):
    """And it counts, and is not given up for others, until it is there or its client has left."""
    joining, let_go, join = threading.Event(), threading.Event(), module._joined

    def stored_up(pieces):
        if len(pieces) > 1:
            joining.set()
            assert let_go.wait(20)
        return join(pieces)

    monkeypatch.setattr(module, "_joined", stored_up)

    async def run():
        bodies = of(5 << 20)
        long = Client(bodies, 4 << 20)
        await long.send(1 << 20)
        await long.send(1 << 20, more=False)
        assert await asyncio.to_thread(joining.wait, 20)
        other = Client(bodies)
        await other.send(10, more=False)
        assert other.task.result() == b"x" * 10
        fast = Client(bodies, 5 << 20)
        await fast.send(4 << 20, more=False)
        assert fast.code == "server_busy" and not long.task.done()
        if leaves:
            long.task.cancel()
        let_go.set()
        (body,) = await asyncio.gather(long.task, return_exceptions=True)
        if leaves:
            assert isinstance(body, asyncio.CancelledError) and bodies.budget.stored == 10
        else:
            assert len(body) == 2 << 20 and bodies.budget.stored == 10 + len(body)

    asyncio.run(run())
