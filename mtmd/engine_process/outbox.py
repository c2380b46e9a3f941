"""Records on their way to the other process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any

from mtmd.engine_process.link import Link, LinkClosedError


class Outbox:
    """Sends records, and never lets who puts one wait: a thread of its own sends them, or, with
    `sends_now`, what the socket does not take at once. `failed`: called with an error other than a
    closed link, after which nothing is sent.
    """

    def __init__(
        self, link: Link, failed: Callable[[BaseException], None], *, sends_now: bool = False
    ) -> None:
        self._link, self._failed, self._sends_now = link, failed, sends_now
        self._records: deque[Any] = deque()
        self._sending, self._is_begun = Lock(), False
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._gatherer: int | None = None
        self._gathered: tuple[list[Any], list[Any]] = [], []
        self._thread = Thread(target=self._run, name="mtmd outbox", daemon=True)
        self._thread.start()

    def put(self, record: Any, *, is_long: bool = False) -> None:
        """Put a record, from any thread; each thread's records are sent in order. `is_long`: it
        takes long to write, and is the last about its ticket.
        """
        if get_ident() == self._gatherer:
            self._gathered[is_long].append(record)
        elif is_long or not self._sent([record]):
            self._records.append(record)
            self._wake.put(True)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Send what this thread puts within as one message. For one thread."""
        self._gatherer = get_ident()
        try:
            yield
        finally:
            self._gatherer = None
            (short, long), self._gathered = self._gathered, ([], [])
            if short and self._sent(short):
                short = []
            if short or long:
                self._records.extend(short + long)
                self._wake.put(True)

    def close(self) -> None:
        """Send what was put, and end the thread."""
        self._wake.put(False)
        self._thread.join()

    def _sent(self, records: list[Any]) -> bool:
        """Send them by this thread, unless others come first: no other has to wake for it."""
        if not self._sends_now or not self._sending.acquire(blocking=False):
            return False
        try:
            if self._records or self._is_begun:
                return False
            self._is_begun = not self._link.send_now(records)
            if self._is_begun:
                self._wake.put(True)
        except LinkClosedError:
            pass  # nobody reads any more
        except BaseException as error:
            self._failed(error)
        finally:
            self._sending.release()
        return True

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                goes_on = self._wake.get()
                with self._sending:
                    records = [self._records.popleft() for _ in range(len(self._records))]
                    self._link.send(records)
                    self._is_begun = False
        except LinkClosedError:
            return  # the thread that receives notices it, too
        except BaseException as error:
            self._failed(error)
