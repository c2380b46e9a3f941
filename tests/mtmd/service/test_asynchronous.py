"""Requests of coroutines, prepared on threads."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest

from mtmd.base.cancellation import check_cancelled, wait
from mtmd.base.errors import LeftError
from mtmd.service.asynchronous import AsyncTickets


def test_preparing_ends_when_who_awaits_is_cancelled() -> None:
    tickets, begun, ended = AsyncTickets(1, 1), threading.Event(), threading.Event()

    def submit() -> NoReturn:
        begun.set()
        try:
            wait(threading.Event())  # as for a worker that reads a video
        except LeftError:
            ended.set()
            raise

    async def cancelled() -> None:
        events = tickets.events(submit)
        task = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(cancelled())
    tickets.close()
    check_cancelled()
