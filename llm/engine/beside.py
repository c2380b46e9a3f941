"""How much of prompts is read in a batch in which somebody waits for his next token: as much as
makes the wait no more than twice what it would be, by the times that such batches have taken.
Plain Python, no tensors.

A batch has one of few sizes. What each costs is a matter of the model and the machine: where every
step reads all weights from memory, many more rows cost little; a small model on a busy machine
takes longer for each; on others it is the first row of a prompt that costs most. So each size is
tried, one after the other, and stays in use while it takes at most `LONGER` times a step without
prompts, or `SHORT_S`, or `ALIKE` times the size below it: prompts have to be read, and with twice
the rows in nearly the same time all wait less. One that takes too long is tried more and more
rarely, `FORGOTTEN` batches and `RARELY_S` apart in the end: a small model makes hundreds of batches
a second, and each trial is a pause for all who wait.

What a step takes without prompts has to be known for that. Where prompts come all the time, one in
`PLAIN` batches reads none.

Promised is that no batch takes longer than that, which by `ALIKE` from size to size is at most
twice the smallest, but for those by which it is found out, at most one in `FORGOTTEN` once all is
known;
and that of what could be read within it nine tenths are.

`Alone` is for prompts beside which nobody waits. Batches of a few rows are run by machine code that
is made for few, others by what is made for hundreds: between the two, depending on weights and
processor, 32 rows take up to twice as long as twice 16. Both are timed, and the faster is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

SIZES = (16, 32, 64, 128)  # rows; up to 16 run as machine code, where there is some
WORTH = 4  # rows of prompts, at least, for which a batch is worth having a size
LONGER = 2.0  # than without prompts
ALIKE = 1.25  # of two sizes, for which the larger one is taken whatever it takes
SHORT_S = 0.005  # what takes no longer keeps nobody waiting
SAMPLES = 5  # of a size's time: the middle one counts
STEPS = 32  # without prompts: the fastest counts, the one that nobody else slowed down
FEW = 5  # of them; fewer say nothing
PLAIN, EARLY = 48, 4  # batches from one of them to the next, and as long as they are few
SOON = 8  # batches after which a size that took too long once is tried anew
FORGOTTEN = 256  # batches after which a time says nothing any more
RARELY_S = 8.0  # from one trial to the next, in the end
MIDDLING = (32, 64, 128, 256)  # rows; more are fastest at once
CLEARLY = 0.9  # of the time at once, that a few rows after each other have to stay below
OTHERWISE = 64  # decisions of which one is for the other way, which may have become the faster one
TRIED = 2  # times of each way, at least, by which one is chosen


class Alone:
    """By how many rows prompts are read of which at most 256 are left: all at once, or `few` at a
    time.
    """

    def __init__(self, few: int) -> None:
        self._few = few
        self._few_s = deque[float](maxlen=SAMPLES)
        self._many_s = {size: deque[float](maxlen=SAMPLES) for size in MIDDLING}
        self._decisions = dict.fromkeys(MIDDLING, 0)

    def rows(self, left: int) -> int:
        """Of the next batch, of so many."""
        size = next((size for size in MIDDLING if left <= size), None)
        if size is None or left <= self._few:
            return left
        many, few = self._many_s[size], self._few_s
        if len(many) < TRIED:
            return left
        if len(few) < TRIED:
            return self._few
        parts = -(-left // self._few)
        is_faster = parts * median_low(few) < CLEARLY * median_low(many)
        self._decisions[size] += 1
        if self._decisions[size] % OTHERWISE == 0:
            is_faster = not is_faster
        return self._few if is_faster else left

    def ran(self, rows: int, seconds: float) -> None:
        """A batch of so many rows of prompts, and nothing else, has taken so long."""
        size = next((size for size in MIDDLING if rows <= size), None)
        if rows == self._few:
            self._few_s.append(seconds)
        elif size is not None and rows > self._few:
            self._many_s[size].append(seconds)


class _Ran(NamedTuple):
    """A batch: its number, rows of answers in it, and how long it took."""

    batch: int
    used: int
    seconds: float


@dataclass
class _Size:
    ran: deque[_Ran] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    pause: int = 0
    again: int = 0
    """The batch from which on it is tried though it took too long."""
    again_s: float = 0.0
    """And the time, in seconds of batches."""


class Beside:
    """Of one engine."""

    def __init__(self) -> None:
        self._plain: deque[_Ran] = deque(maxlen=STEPS)
        self._sizes = {size: _Size() for size in SIZES}
        self._batch = self._plain_again = 0
        self._spent_s = 0.0  # by all batches

    def rows(self, used: int) -> int:
        """Of the next batch, in which `used` rows are of those who wait for their next token; as
        many where nothing is to be read. Called once for each batch.
        """
        self._batch += 1
        steps = self._steps(used)
        is_early = len(steps) < FEW
        is_due = is_early or self._batch - steps[-1].batch >= PLAIN
        if is_due and self._batch >= self._plain_again:
            self._plain_again = self._batch + (EARLY if is_early else PLAIN)
            return used
        best, *larger = [s for s in SIZES if s - used >= WORTH] or [used + SIZES[0]]
        for size in larger:
            known, seen, limit = self._seconds(best), self._seconds(size), self._limit(used, best)
            if seen and median_low(seen) <= limit:
                best = size
                continue
            # One size after the other, and none is tried by one sample that may have been slow.
            is_known = len(known) == SAMPLES or (known and median_low(known) <= limit)
            return size if is_known and self._is_due(size) else best
        return best

    def ran(self, used: int, rows: int, seconds: float) -> None:
        """That batch has had so many rows, `used` of them of answers, and taken so long, the making
        of its plan left out.
        """
        ran = _Ran(self._batch, used, seconds)
        self._spent_s += seconds
        if used == rows:
            self._plain.append(ran)
            return
        size = next((size for size in SIZES if rows <= size), None)
        if size is None or 2 * rows <= size:
            return  # a block that is not cut, or the end of a prompt
        seen, smaller = self._sizes[size], SIZES[max(SIZES.index(size) - 1, 0)]
        is_slow = seconds > self._limit(used, smaller)
        seen.ran.append(ran)
        seen.pause = min(max(2 * seen.pause, SOON), FORGOTTEN) if is_slow else 0
        seen.again = self._batch + seen.pause
        seen.again_s = self._spent_s + (RARELY_S if seen.pause == FORGOTTEN else 0.0)

    def _is_due(self, size: int) -> bool:
        """Whether one that has taken too long may be tried."""
        seen = self._sizes[size]
        return self._batch >= seen.again and self._spent_s >= seen.again_s

    def _limit(self, used: int, smaller: int) -> float:
        """Seconds that the size after `smaller` may take."""
        limit, steps = SHORT_S, self._steps(used)
        if len(steps) < FEW:
            steps = self._lately(self._plain)
        if len(steps) >= FEW:
            limit = max(limit, LONGER * min(ran.seconds for ran in steps))
        if len(self._seconds(smaller)) == SAMPLES:
            # Fewer rows take no longer than more: that tells where all were slow by chance.
            least = min(s for size in SIZES if size >= smaller for s in self._seconds(size))
            limit = max(limit, ALIKE * least)
        return limit

    def _steps(self, used: int) -> list[_Ran]:
        """Those without prompts, of about as many rows."""
        return [
            ran
            for ran in self._lately(self._plain)
            if ran.used <= 2 * used and used <= 2 * ran.used
        ]

    def _seconds(self, size: int) -> list[float]:
        return [ran.seconds for ran in self._lately(self._sizes[size].ran)]

    def _lately(self, batches: Iterable[_Ran]) -> list[_Ran]:
        return [ran for ran in batches if self._batch - ran.batch < FORGOTTEN]
