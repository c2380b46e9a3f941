"""Tickets for asyncio: pictures are prepared on threads of this module's own, events come to the
event loop of who asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event as Flag
from threading import Lock, Semaphore

from mtmd.base.cancellation import cancel_if
from mtmd.events import Event, Finished
from mtmd.service.ticket import Ticket


class AsyncTickets:
    """Tickets for asyncio. At most `maximum` requests of all coroutines are with the service at
    once: the others wait for them here, however many are awaited together. `threads` prepare.
    """

    def __init__(self, maximum: int, threads: int):
        self._locations = Semaphore(maximum)
        self._pool = ThreadPoolExecutor(threads, "mtmd async")
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Return whether its threads are this process's: a child that was forked has none of
        them.
        """
        return self._process == os.getpid()

    async def events(self, submit: Callable[[], Ticket]) -> AsyncGenerator[Event, None]:
        """Return what the ticket that `submit` makes, on another thread, is told; `Finished` the
        last. Raises what `submit` does, and the MtmdError by which the request failed. Leaving it,
        or cancelling who awaits, gives the request up.
        """
        request = _Request(self._locations, submit, asyncio.get_running_loop())
        try:
            await asyncio.wrap_future(self._pool.submit(request.begin))
            while True:
                event = await request.events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            request.give_up()

    def close(self) -> None:
        """Nothing is begun any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Request:
    def __init__(
        self, locations: Semaphore, submit: Callable[[], Ticket], loop: asyncio.AbstractEventLoop
    ):
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._locations, self._submit, self._loop = locations, submit, loop
        self._lock = Lock()
        self._ticket: Ticket | None = None
        self._given_up, self._over = Flag(), False

    def begin(self) -> None:
        """Wait for a place, prepare, hand it to the service."""
        self._locations.acquire()
        if self._given_up.is_set():
            self._locations.release()
            return
        cancel_if(self._given_up.is_set)
        try:
            ticket = self._submit()
        except BaseException:
            self._locations.release()
            raise
        finally:
            cancel_if(None)
        with self._lock:
            self._ticket = ticket
            if self._given_up.is_set():
                ticket.cancel()
        ticket.redirect(self._put)

    def give_up(self) -> None:
        with self._lock:
            self._given_up.set()
            if self._ticket is not None and not self._over:
                self._ticket.cancel()

    def _put(self, event: Event | BaseException) -> None:
        """Put an event, from the device's thread."""
        if isinstance(event, (BaseException, Finished)):
            self._over = True
            self._locations.release()
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody listens any more
            if self._ticket is not None and not self._over:
                self._ticket.cancel()
