"""How much of prompts is read in a batch in which somebody waits for his next token: as much as
makes the wait no more than twice what it would be, by the times that such batches have taken.
Plain Python, no tensors.

A batch has one of few sizes. What each costs is a matter of the model and the machine: where every
step reads all weights from memory, many more rows cost little; a small model on a busy machine
takes longer for each.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SIZES = (16, 32, 64, 128)  # rows; up to 16 run as machine code, where there is some
WORTH = 4  # rows of prompts, at least, for which a batch is worth having a size
LONGER = 2.0  # than without prompts
SHORT_S = 0.005  # what takes no longer keeps nobody waiting
SAMPLES = 7  # of a size's time: the middle one counts
STEPS = 32  # without prompts: the fastest counts, the one that nobody else slowed down
FORGOTTEN = 256  # batches after which a size that took too long is tried anew


class Beside:
    """Of one engine."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=STEPS)
        self._times: dict[int, deque[float]] = {}
        self._until: dict[int, int] = {}
        self._batches = 0

    def rows(self, used: int) -> int:
        """Of a batch in which `used` rows are of those who wait for their next token."""
        sizes = [size for size in SIZES if size - used >= WORTH] or [used + SIZES[0]]
        best = sizes[0]
        for size in sizes[1:]:
            if self._expected(size, best) > max(SHORT_S, LONGER * self._step):
                break
            best = size
        return best

    def ran(self, used: int, rows: int, seconds: float) -> None:
        """A batch of so many rows, `used` of them of answers, took so long. Not to be told of one
        that has been planned anew.
        """
        self._batches += 1
        if used == rows:
            self._plain.append(seconds)
            return
        size = next((size for size in SIZES if rows <= size), None)
        if size is None or 2 * rows <= size:
            return  # a block that is not cut, or the end of a prompt
        self._times.setdefault(size, deque(maxlen=SAMPLES)).append(seconds)
        self._until[size] = self._batches + FORGOTTEN

    @property
    def _step(self) -> float:
        return min(self._plain, default=0.0)

    def _expected(self, size: int, smaller: int) -> float:
        """Seconds, guessed by a smaller size where it has not been seen lately."""
        if size in self._times and self._batches < self._until[size]:
            return median(self._times[size])
        self._times.pop(size, None)
        if smaller not in self._times:
            return float("inf")  # one size after the other
        seen = median(self._times[smaller])
        return self._step + max(seen - self._step, 0.0) * size / smaller
