"""Number of threads that run a program: chosen by measuring the runs that are needed anyway.

More threads are not always faster: small programs lose more by handing work over than they gain,
memory is often read at its speed by fewer threads than there are cores, and cores differ. So
counts are tried from the most down, by halves, until one is clearly slower than the best; the
fastest is kept, and all is tried again now and then, as other processes come and go.
"""

from __future__ import annotations

from threading import Lock

TRIES = 3  # runs of each count, of which the fastest is taken
ENOUGH = 2  # where those are clearly slower already
WORSE = 1.3  # so much slower than the best, fewer threads are not tried
SAVED = 512  # runs until all is tried again


class ThreadChoice:
    """Among 1 to `maximum`; just `maximum` where that is `fixed`. Used by several threads."""

    def __init__(self, maximum: int, fixed: bool = False):
        self.counts = [maximum]
        while not fixed and self.counts[-1] > 1:
            self.counts.append(self.counts[-1] // 2)
        self.best = maximum
        self.seconds: dict[int, float] = {}
        """Of the fastest run with so many threads, when they were tried last."""
        self._lock = Lock()
        self._at: int | None = 0 if len(self.counts) > 1 else None  # the count that is tried
        self._times: list[float] = []
        self._result: dict[int, float] = {}
        self._runs = 0

    @property
    def settled(self) -> bool:
        """Return whether nothing is being tried."""
        return self._at is None

    def next(self) -> int:
        """Threads for a run."""
        at = self._at
        return self.best if at is None else self.counts[at]

    def took(self, threads: int, seconds: float) -> None:
        """A run of so many threads is over."""
        with self._lock:
            if self._at is None:
                self._runs += 1
                if self._runs % SAVED == 0 and len(self.counts) > 1:
                    self._at = 0
                return
            if threads != self.counts[self._at]:
                return  # it began before
            self._times.append(seconds)
            fastest = min(self._times)
            slow = fastest > WORSE * min(self._result.values(), default=fastest)
            if len(self._times) < (ENOUGH if slow else TRIES):
                return
            self._result[threads], self._times = fastest, []
            if not slow and self._at + 1 < len(self.counts):
                self._at += 1
                return
            self.seconds, self._result, self._at = self._result, {}, None
            self.best = min(self.seconds, key=self.seconds.__getitem__)
