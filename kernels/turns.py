"""Whose turn it is, where several want the same: nobody's many requests stand before another's one.

`Shares` is the rule, `Turns` the rule for threads that wait. For whom a thread works is said once,
by `work_for`, where a request comes in.

Threads that compute in Python share one interpreter, and with every one more of them each waits
longer for it, the device's thread too. So those that answer requests `sit_down` at a desk with few
seats, one after another by owner, and get up while they wait for something else (`aside`).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_for: ContextVar[str] = ContextVar("for whom", default="")
_mine = threading.local()


def work_for(owner: str) -> None:
    """What this thread does from now on is for `owner`, "" for nobody."""
    _for.set(owner)


def for_whom() -> str:
    """As `work_for` has said."""
    return _for.get()


class Shares:
    """How much each of those who want something has had of it: who has had least goes first. One
    who comes anew begins where the least of the others stands, as nobody saves up by not asking.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), all weights equal.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}

    def order(self, owners: Iterable[str]) -> list[str]:
        """Those who want some now, each once, who has had least first, in the given order where
        that is equal. Others are forgotten.
        """
        wanting = dict.fromkeys(owners)
        self._had = {owner: had for owner, had in self._had.items() if owner in wanting}
        least = min(self._had.values(), default=0.0)
        # One who comes anew goes before those who stand where he begins.
        new = [owner for owner in wanting if owner not in self._had]
        self._had |= dict.fromkeys(new, least)
        places = {owner: (self._had[owner], owner not in new) for owner in wanting}
        return sorted(wanting, key=places.__getitem__)

    def add(self, owner: str, amount: float) -> None:
        """It has had so much more, if it still wants some."""
        if owner in self._had:
            self._had[owner] += amount


class _Waiter:
    def __init__(self, weight: int) -> None:
        self.weight, self.may = weight, threading.Event()


class Turns:
    """Lets `count` threads at a time do something; of one owner in the order in which they came,
    of several by `Shares`. `most`: of their weights together; what weighs more goes alone.
    Thread-safe.
    """

    def __init__(self, count: int, most: int | None = None) -> None:
        self._count, self._most = count, most
        self._lock = threading.Lock()
        self._weights = Counter[int]()  # of those who have their turn
        self._lines: dict[str, deque[_Waiter]] = {}
        self._shares = Shares()

    @contextmanager
    def one(self, weight: int = 1) -> Iterator[None]:
        self.take(weight)
        try:
            yield
        finally:
            self.give_back(weight)

    def take(self, weight: int = 1) -> None:
        """Waits for a turn, which `give_back` ends."""
        owner, me = for_whom(), _Waiter(weight)
        with self._lock:
            self._lines.setdefault(owner, deque()).append(me)
            self._let_in()
        if me.may.is_set():
            return
        try:
            with aside():
                me.may.wait()
        except BaseException:
            with self._lock:
                had = me.may.is_set()
                if not had:
                    self._leave(owner, me)
            if had:
                self.give_back(weight)
            raise

    def give_back(self, weight: int = 1) -> None:
        with self._lock:
            self._weights[weight] -= 1
            self._weights += Counter()
            self._let_in()

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._lines.values()))

    def _let_in(self) -> None:
        while self._lines:
            owner = self._shares.order(self._lines)[0]
            first = self._lines[owner][0]
            if not self._has_room(first.weight):
                return
            self._weights[first.weight] += 1
            self._shares.add(owner, first.weight)
            self._leave(owner, first)
            first.may.set()

    def _leave(self, owner: str, waiter: _Waiter) -> None:
        self._lines[owner].remove(waiter)
        if not self._lines[owner]:
            del self._lines[owner]

    def _has_room(self, weight: int) -> bool:
        at_work = self._weights.total()
        if not at_work:
            return True
        held = sum(each * number for each, number in self._weights.items())
        return at_work < self._count and (self._most is None or held + weight <= self._most)


def sit_down(desk: Turns) -> None:
    """This thread computes at `desk` until it gets up, once it is its turn there."""
    get_up()
    desk.take()
    _mine.desk = desk


def get_up() -> None:
    """From here on it computes little, or waits: others may have its seat. Any number of times."""
    desk: Turns | None = getattr(_mine, "desk", None)
    _mine.desk = None
    if desk is not None:
        desk.give_back()


@contextmanager
def aside() -> Iterator[None]:
    """While this thread waits, or does what others need not wait for, its seat is another's."""
    desk: Turns | None = getattr(_mine, "desk", None)
    get_up()
    try:
        yield
    finally:
        if desk is not None:
            sit_down(desk)
