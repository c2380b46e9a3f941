"""The machine that a model computes with."""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.cores import Cores
from mtmd.base.throttling import Throttled

USED_UP = 0.25  # of a CPU quota's periods, from which on it is told
SPARE = 0.25  # of a core: threads have to wait where others take more than that of their cores


@dataclass(frozen=True)
class MachineFacts:
    """`threads` compute on `cores`. `others`: so many of the cores that this process may run on
    were taken by others while it was checked, None where that was not measured. The rates are those
    that the device reaches at best, measured for this report, None where they say nothing about it.
    `throttled`: how often the CPU quota was used up meanwhile, None where there is none.
    """

    cores: Cores
    threads: int
    others: float | None = None
    read_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    throttled: Throttled | None = None

    @property
    def oversubscribed(self) -> bool:
        return self.threads > self.cores.usable

    @property
    def is_limited(self) -> bool:
        """Return whether the quota stops this process's threads again and again."""
        return self.throttled is not None and self.throttled.share >= USED_UP

    @property
    def crowded(self) -> bool:
        """Return whether others take time from this process's threads."""
        if self.others is None or self.others <= SPARE:
            return False
        return min(self.threads, self.cores.usable) + self.others > self.cores.affinity + SPARE


def thread_report(threads: int, cores: Cores) -> str:
    """Return the sentence that there are more threads than can run."""
    verb = "share" if threads > 1 else "has"
    return f"{threads} threads {verb} {cores}"
