"""Turns of several threads at the same resource.

`Turns` follow the rule of `fair_queue`. The owner that a thread works for is set once, by
`set_owner`, where a request comes in.

Threads that compute in Python share one interpreter, and every one more makes each wait longer for
it, the device's thread too. So a thread that answers a call takes one of few turns
(`acquire_turn`), in line with those of other owners, and releases it while it waits for something
else (`turn_released`). The device's thread, which needs the interpreter at every small step, is
`prioritized`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from mtmd.base.cancellation import wait
from mtmd.base.fair_queue import FairSlots

_for: ContextVar[str] = ContextVar("owner", default="")
_mine = threading.local()
ACQUIRE_S = 1.0  # waited for a turn; then the thread computes without one
PRIORITIZED_S = 0.03  # waited at most for prioritized threads: longer work is not hurt by others


def set_owner(owner: str) -> None:
    """Attribute what this thread does from now on to `owner`, "" for nobody."""
    _for.set(owner)


def current_owner() -> str:
    """Return the owner that `set_owner` has set."""
    return _for.get()


class _First:
    """Counts the prioritized threads; `nobody` is set while there are none."""

    def __init__(self) -> None:
        self._lock, self._count, self.nobody = threading.Lock(), 0, threading.Event()
        self.nobody.set()

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            self.nobody.clear()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self.nobody.set()


_first = _First()


class Turns:
    """Lets `count` threads at a time do something, or any number; of one owner in the order in
    which they came, of several in turn. `maximum`: of their weights together; what weighs more goes
    alone. `each`: of one owner at a time. Thread-safe.
    """

    def __init__(
        self, count: int | None, maximum: int | None = None, each: int | None = None
    ) -> None:
        self._slots = FairSlots(count, maximum, each)

    @contextmanager
    def one(self, weight: int = 1) -> Iterator[None]:
        give_back = self.take(weight)
        assert give_back is not None
        try:
            yield
        finally:
            give_back()

    def take(self, weight: int = 1, within_s: float | None = None) -> Callable[[], None] | None:
        """Wait for a turn; what is returned ends it, once. None where it has not come in time.
        Raises LeftError where that is any time.
        """
        may = threading.Event()
        claim = self._slots.request(lambda _: may.set(), current_owner(), weight)
        give_back = partial(self._slots.release, claim)
        if may.is_set():
            return give_back
        try:
            with turn_released():
                if within_s is None:
                    wait(may)
                    return give_back
                had = may.wait(within_s)
        except BaseException:
            give_back()
            raise
        if not had:
            give_back()
        return give_back if had else None

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    @property
    def at_work(self) -> int:
        return self._slots.in_use


def acquire_turn(queue: Turns) -> None:
    """Wait for a turn of `queue`, which this thread has until it is released, and for prioritized
    threads. After a while go on without: a turn that takes long stops nobody.
    """
    release_turn()
    give_back = queue.take(within_s=ACQUIRE_S)
    if give_back is not None:
        _mine.turn = queue, give_back
        _first.nobody.wait(PRIORITIZED_S)


def release_turn() -> None:
    """Release the turn of this thread, which computes little from here on, or waits. A second call
    does nothing.
    """
    turn: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "turn", None)
    _mine.turn = None
    if turn is not None:
        turn[1]()


@contextmanager
def turn_released() -> Iterator[None]:
    """Release the turn of this thread in the context, where it waits or computes outside of the
    interpreter, and take another after it.
    """
    turn: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "turn", None)
    release_turn()
    try:
        yield
    finally:
        if turn is not None:
            acquire_turn(turn[0])


@contextmanager
def prioritized() -> Iterator[None]:
    """Let no thread acquire a turn in the context, for PRIORITIZED_S at most. For the thread of a
    device; prioritized threads do not wait for each other.
    """
    _first.begin()
    try:
        yield
    finally:
        _first.end()
