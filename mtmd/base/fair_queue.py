"""Fair sharing among owners: many requests of one owner never delay another owner's only request.

`FairShares` is the rule, `FairQueue` holds waiting lines that follow it, and `FairSlots` gives a
limited number of slots to those who wait in such lines.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

REMEMBERED = 1024  # owners whose share is kept after they have left
NONE: Mapping[str, int] = MappingProxyType({})


class FairShares:
    """Track how much each owner has been given: the one with the smallest amount comes first.

    An owner who arrives starts at the smallest amount of the others, so that nobody saves up by
    staying away; and no lower than where it left, so that nobody gains by requesting one thing
    after another.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), all weights equal.
    """

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._last: dict[str, int] = {}
        """The number of the latest charge of each."""
        self._charges = 0
        self._waiting: set[str] = set()
        self._start = 0.0
        """The amount at which an unknown owner starts."""

    def order(self, owners: Iterable[str]) -> list[str]:
        """Return each of the waiting `owners` once, the smallest amount first, of equals the one
        who has been given something longest ago. Owners who have left are forgotten once the others
        catch up.
        """
        waiting = dict.fromkeys(owners)
        if not waiting:
            self._amounts, self._start = {}, 0.0
        stayed = [self._amounts[owner] for owner in waiting if owner in self._waiting]
        self._start = max(self._start, min(stayed, default=0.0))
        gone = [o for o, n in self._amounts.items() if o not in waiting and n > self._start]
        saved = dict.fromkeys([*waiting, *gone[-REMEMBERED:]])
        self._amounts = {o: n for o, n in self._amounts.items() if o in saved}
        start = self._start
        new = {o for o in waiting if self._amounts.get(o, start) <= start} - self._waiting
        self._amounts |= dict.fromkeys(new, start)
        self._waiting = set(waiting)
        self._last = {o: number for o, number in self._last.items() if o in self._amounts}
        ranks = {owner: (self._amounts[owner], self._last.get(owner, 0)) for owner in waiting}
        return sorted(waiting, key=ranks.__getitem__)

    def charge(self, owner: str, amount: float = 1.0) -> None:
        """Add to the amount of an owner, if `order` has seen it."""
        if owner in self._amounts:
            self._charges += 1
            self._last[owner] = self._charges
            self._start = max(self._start, self._amounts[owner])
            self._amounts[owner] += amount


class Owned(Protocol):
    @property
    def owner(self) -> str: ...


T = TypeVar("T", bound=Owned)


class FairQueue(Generic[T]):
    """One waiting line per owner. Not thread-safe, but for `len` and `owners`."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[T]] = {}
        self._shares = FairShares()
        self._count = 0

    def append(self, item: T) -> None:
        self._lines.setdefault(item.owner, deque()).append(item)
        self._count += 1

    def appendleft(self, item: T) -> None:
        """Add an item before the others of its owner."""
        self._lines.setdefault(item.owner, deque()).appendleft(item)
        self._count += 1

    def next(self, running: Mapping[str, int] = NONE, full: Container[str] = ()) -> T | None:
        """Return the first item of the owner who has the fewest `running`, or among equals has been
        served least; None if nobody waits but owners who are `full`.
        """
        order = [owner for owner in self._shares.order(self._lines) if owner not in full]
        owner = min(order, key=lambda each: running.get(each, 0), default=None)
        return None if owner is None else self._lines[owner][0]

    def serve(self, item: T, cost: float = 1.0) -> None:
        """Remove an item that was given what it waited for."""
        self._shares.charge(item.owner, cost)
        self.remove(item)

    def remove(self, item: T) -> None:
        line = self._lines[item.owner]
        line.remove(item)
        self._count -= 1
        if not line:
            del self._lines[item.owner]

    @property
    def owners(self) -> int:
        """Return how many owners wait."""
        return len(self._lines)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from line

    def __contains__(self, item: T) -> bool:
        return item in self._lines.get(item.owner, ())


@dataclass(eq=False)
class Claim:
    """A request for a slot, until it is released."""

    granted: Callable[[Claim], None]
    owner: str
    weight: float
    is_granted: bool = field(default=False, init=False)


class FairSlots:
    """Grant at most `count` slots at a time, None for any number; at most `total_weight` together,
    where a heavier claim is granted alone; and at most `each` to one owner. Thread-safe.
    """

    def __init__(
        self, count: int | None, total_weight: float | None = None, each: int | None = None
    ) -> None:
        self.count, self.total_weight, self.each = count, total_weight, each
        self._lock = threading.Lock()
        self._granted: set[Claim] = set()
        self._queue = FairQueue[Claim]()

    def request(
        self, granted: Callable[[Claim], None], owner: str = "", weight: float = 1.0
    ) -> Claim:
        """Wait for a slot. `granted` is called once, here or by the thread that releases a slot,
        and may not take a lock that is held around `request` or `release`.
        """
        claim = Claim(granted, owner, weight)
        with self._lock:
            self._queue.append(claim)
        self._grant()
        return claim

    def cancel(self, claim: Claim) -> bool:
        """Stop waiting. Returns False if it no longer waits: a granted slot has to be released."""
        with self._lock:
            if claim not in self._queue:
                return False
            self._queue.remove(claim)
        self._grant()  # another claim may fit where this one did not
        return True

    def release(self, claim: Claim) -> None:
        """Free a granted slot, or stop waiting for it. Releasing it again does nothing."""
        if not self.cancel(claim):
            with self._lock:
                self._granted.discard(claim)
            self._grant()

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._queue)

    @property
    def in_use(self) -> int:
        with self._lock:
            return len(self._granted)

    def _grant(self) -> None:
        while True:
            with self._lock:
                claim = self._next()
                if claim is None:
                    return
                claim.is_granted = True
                self._granted.add(claim)
                self._queue.serve(claim, claim.weight)
            claim.granted(claim)

    def _next(self) -> Claim | None:
        full = set[str]()
        if self.each is not None:
            used = Counter(claim.owner for claim in self._granted)
            full = {owner for owner, number in used.items() if number >= self.each}
        claim = self._queue.next(full=full)
        return claim if claim is not None and self._fits(claim.weight) else None

    def _fits(self, weight: float) -> bool:
        if not self._granted:
            return True
        if self.count is not None and len(self._granted) >= self.count:
            return False
        used = sum(claim.weight for claim in self._granted)
        return self.total_weight is None or used + weight <= self.total_weight
