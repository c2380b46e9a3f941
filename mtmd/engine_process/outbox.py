"""What one process has to say to the other. Whoever has something to say never waits for the
socket: what it does not take at once, and what is long to write, a thread sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any

from mtmd.base.isolation.channel import ChannelClosed
from mtmd.engine_process.link import Link

Item = tuple[str, int, Any]
"""What it is, the number that it is about, a value."""


class Outbox:
    """`failed`: called with what went wrong, other than a link that is closed, in whose thread it
    did; nothing is sent after that.
    """

    def __init__(self, link: Link, failed: Callable[[BaseException], None]) -> None:
        self._link, self._failed = link, failed
        self._items: deque[Item] = deque()
        self._sending = Lock()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._gatherer: int | None = None
        self._gathered: tuple[list[Item], list[Item]] = [], []
        self._thread = Thread(target=self._run, name="mtmd outbox", daemon=True)
        self._thread.start()

    def put(self, item: Item, *, is_long: bool = False) -> None:
        """From any thread, in the order of each. `is_long`: to write it takes its time, and nothing
        comes after it that is about the same.
        """
        if get_ident() == self._gatherer:
            self._gathered[is_long].append(item)
        else:
            self._items.append(item)
            self._wake.put(True)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """What this thread says within goes as one message, sent by itself where that is possible
        at once: it is there without a thread that has to wake first. One thread may do so.
        """
        self._gatherer = get_ident()
        try:
            yield
        finally:
            self._gatherer = None
            (short, long), self._gathered = self._gathered, ([], [])
            if short and self._sent_at_once(short):
                short = []
            if short or long:
                self._items.extend(short + long)
                self._wake.put(True)

    def close(self) -> None:
        """What was put is sent; the thread ends."""
        self._wake.put(False)
        self._thread.join()

    def _sent_at_once(self, items: list[Item]) -> bool:
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._items:  # they were said before
                return False
            sent, is_whole = self._link.send_at_once(items)
            if not is_whole:
                self._wake.put(True)
            return sent
        except ChannelClosed:
            return True  # nobody is there who could hear it
        except BaseException as error:
            self._failed(error)
            return True
        finally:
            self._sending.release()

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                goes_on = self._wake.get()
                with self._sending:
                    items = list(self._items)
                    for _ in items:
                        self._items.popleft()
                    self._link.send(items)
        except ChannelClosed:
            return  # the other has gone, which the thread that listens to it sees, too
        except BaseException as error:
            self._failed(error)
