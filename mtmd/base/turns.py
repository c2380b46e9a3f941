"""Turns of several threads at the same resource.

`Turns` follow the rule of `fair_queue`. For whom a thread works is said once, by `work_for`, where
a request comes in.

Threads that compute in Python share one interpreter, and with every one more of them each waits
longer for it, the device's thread too. So those that answer requests `sit_down` at a desk with few
seats, one after another by owner, and get up while they wait for something else (`moved`). Those
who have to ask for the interpreter at every small step of their work, the device's thread and the
server's loop among them, `goes_first`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from mtmd.base.cancellation import wait
from mtmd.base.fair_queue import FairSlots

_for: ContextVar[str] = ContextVar("for whom", default="")
_mine = threading.local()
STANDS_S = 1.0  # for a seat
STANDS_BACK_S = (
    0.03  # at most, for one who goes first: work that takes longer is not hurt by others
)


def work_for(owner: str) -> None:
    """Attribute what this thread does from now on to `owner`, "" for nobody."""
    _for.set(owner)


def for_whom() -> str:
    """Return the owner that `work_for` has set."""
    return _for.get()


class _First:
    """Set of those who go first: any number of threads, until each has ended."""

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
        """Waits for a turn; what is returned ends it, once. None where it has not come in time.
        Raises LeftError where that is any time.
        """
        may = threading.Event()
        claim = self._slots.request(lambda _: may.set(), for_whom(), weight)
        give_back = partial(self._slots.release, claim)
        if may.is_set():
            return give_back
        try:
            with moved():
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


def sit_down(queue: Turns) -> None:
    """This thread computes at `queue` until it gets up, once it is its turn there and nobody goes
    first; after a while without: whoever sits there for long keeps nobody from anything.
    """
    get_up()
    give_back = queue.take(within_s=STANDS_S)
    if give_back is not None:
        _mine.member = queue, give_back
        _first.nobody.wait(STANDS_BACK_S)


def get_up() -> None:
    """Release the seat: from here on it computes little, or waits. Any number of times."""
    member: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "member", None)
    _mine.member = None
    if member is not None:
        member[1]()


@contextmanager
def moved() -> Iterator[None]:
    """While this thread waits, or does what others need not wait for, its seat is another's."""
    member: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "member", None)
    get_up()
    try:
        yield
    finally:
        if member is not None:
            sit_down(member[0])


@contextmanager
def goes_first() -> Iterator[None]:
    """Nobody else sits down to compute meanwhile, for a moment at most. For the thread of a device,
    and those that hand on what others wait for: they do not wait for each other.
    """
    _first.begin()
    try:
        yield
    finally:
        _first.end()
