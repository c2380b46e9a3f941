"""Whose turn it is, where several want the same: nobody's many requests stand before another's one.

`Shares` is the rule, `Turns` the rule for threads that wait. For whom a thread works is said once,
by `work_for`, where a request comes in.

Threads that compute in Python share one interpreter, and with every one more of them each waits
longer for it, the device's thread too. So those that answer requests `sit_down` at a desk with few
seats, one after another by owner, and get up while they wait for something else (`aside`). Those
who have to ask for the interpreter at every small step of their work, the device's thread and the
server's loop among them, `goes_first`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from mtmd.base.wanted import wait

_for: ContextVar[str] = ContextVar("for whom", default="")
_mine = threading.local()
STANDS_S = 1.0  # for a seat
LEFT = 1024  # owners whose share is known after they have left
STANDS_BACK_S = (
    0.03  # at most, for one who goes first: work that takes longer is not hurt by others
)


def work_for(owner: str) -> None:
    """What this thread does from now on is for `owner`, "" for nobody."""
    _for.set(owner)


def for_whom() -> str:
    """As `work_for` has said."""
    return _for.get()


class Shares:
    """How much each of those who want something has had of it: who has had least goes first. One
    who comes anew begins where the least of the others stands, as nobody saves up by not asking;
    and no earlier than where he left, as nobody gains by asking for one thing after another.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), all weights equal.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._wanting: set[str] = set()
        self._fresh: set[str] = set()
        """Who came anew and has had nothing since."""
        self._now = 0.0
        """Where one begins of whom nothing is known."""

    def order(self, owners: Iterable[str]) -> list[str]:
        """Those who want some now, each once, who has had least first, in the given order where
        that is equal. Others are forgotten once all have had as much.
        """
        wanting = dict.fromkeys(owners)
        if not wanting:
            self._had, self._now = {}, 0.0
        stayed = [self._had[owner] for owner in wanting if owner in self._wanting]
        self._now = max(self._now, min(stayed, default=0.0))
        left = [o for o, had in self._had.items() if o not in wanting and had > self._now]
        kept = dict.fromkeys([*wanting, *left[-LEFT:]])
        self._had = {o: had for o, had in self._had.items() if o in kept}
        new = {o for o in wanting if self._had.get(o, self._now) <= self._now} - self._wanting
        self._had |= dict.fromkeys(new, self._now)
        self._wanting = set(wanting)
        # One who came anew goes before those who stand where he begins and have had something.
        self._fresh = (self._fresh & self._wanting) | new
        places = {owner: (self._had[owner], owner not in self._fresh) for owner in wanting}
        return sorted(wanting, key=places.__getitem__)

    def add(self, owner: str, amount: float) -> None:
        """It has had so much more, if it is known."""
        if owner in self._had:
            self._fresh.discard(owner)
            self._now = max(self._now, self._had[owner])
            self._had[owner] += amount


class _First:
    """Who goes first: any number of threads, until each has ended."""

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


@dataclass(eq=False)
class _Waiter:
    owner: str
    weight: int
    may: threading.Event = field(default_factory=threading.Event)


class Turns:
    """Lets `count` threads at a time do something, or any number; of one owner in the order in
    which they came, of several by `Shares`. `most`: of their weights together; what weighs more
    goes alone. `each`: of one owner at a time. Thread-safe.
    """

    def __init__(self, count: int | None, most: int | None = None, each: int | None = None) -> None:
        self._count, self._most, self._each = count, most, each
        self._lock = threading.Lock()
        self._at_work: list[_Waiter] = []
        self._lines: dict[str, deque[_Waiter]] = {}
        self._shares = Shares()

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
        me = _Waiter(for_whom(), weight)
        with self._lock:
            self._lines.setdefault(me.owner, deque()).append(me)
            self._let_in()
        give_back = partial(self._end, me)
        if me.may.is_set():
            return give_back
        try:
            with aside():
                if within_s is None:
                    wait(me.may)
                    return give_back
                had = me.may.wait(within_s)
        except BaseException:
            give_back()
            raise
        if not had:
            give_back()
        return give_back if had else None

    def _end(self, waiter: _Waiter) -> None:
        """Its turn, or its waiting."""
        with self._lock:
            if waiter.may.is_set():
                self._at_work.remove(waiter)
            else:
                self._leave(waiter)
            self._let_in()

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._lines.values()))

    @property
    def at_work(self) -> int:
        with self._lock:
            return len(self._at_work)

    def _let_in(self) -> None:
        while first := self._next():
            self._at_work.append(first)
            self._shares.add(first.owner, first.weight)
            self._leave(first)
            first.may.set()

    def _next(self) -> _Waiter | None:
        for owner in self._shares.order(self._lines):
            if self._each is None or sum(w.owner == owner for w in self._at_work) < self._each:
                first = self._lines[owner][0]
                return first if self._has_room(first.weight) else None
        return None

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines[waiter.owner]
        line.remove(waiter)
        if not line:
            del self._lines[waiter.owner]

    def _has_room(self, weight: int) -> bool:
        if not self._at_work:
            return True
        held = sum(each.weight for each in self._at_work)
        fits = self._most is None or held + weight <= self._most
        return fits and (self._count is None or len(self._at_work) < self._count)


def sit_down(desk: Turns) -> None:
    """This thread computes at `desk` until it gets up, once it is its turn there and nobody goes
    first; after a while without: whoever sits there for long keeps nobody from anything.
    """
    get_up()
    give_back = desk.take(within_s=STANDS_S)
    if give_back is not None:
        _mine.seat = desk, give_back
        _first.nobody.wait(STANDS_BACK_S)


def get_up() -> None:
    """From here on it computes little, or waits: others may have its seat. Any number of times."""
    seat: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "seat", None)
    _mine.seat = None
    if seat is not None:
        seat[1]()


@contextmanager
def aside() -> Iterator[None]:
    """While this thread waits, or does what others need not wait for, its seat is another's."""
    seat: tuple[Turns, Callable[[], None]] | None = getattr(_mine, "seat", None)
    get_up()
    try:
        yield
    finally:
        if seat is not None:
            sit_down(seat[0])


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
