"""Describes how measurements are taken: samples, the peak of memory, and processes that keep cores
busy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mtmd.base import process_memory as memory

# How far two counters of the same memory may be apart: other threads go on between two readings.
SLACK = 16 << 20
# A busy process ends by itself when the one that started it is gone.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n sum(range(1000000))"


@dataclass(frozen=True)
class Sample:
    """Values of one quantity, in the order they were measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        return min(self.values)

    @property
    def maximum(self) -> float:
        return max(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.values) < 2 or not self.median:
            return 0.0
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return (third - first) / 2 / self.median


class HostPeak:
    """The most memory this process holds, in bytes, from `restart` on. None where the system does
    not tell, or does not let the count start anew (a sandboxed kernel may take the request and go
    on counting): what was held before would be counted to what is measured.
    """

    def __init__(self) -> None:
        self._restarted = False

    def restart(self) -> None:
        try:
            # proc(5): VmHWM starts anew at what is held.
            (memory.PROC / "clear_refs").write_text("5")
        except OSError:
            self._restarted = False
            return
        peak, stored = memory.status_bytes("VmHWM"), memory.resident_bytes()
        self._restarted = peak is not None and stored is not None and peak <= stored + SLACK

    def read(self) -> int | None:
        return memory.status_bytes("VmHWM") if self._restarted else None


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run so many processes beside this one that never rest."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen([sys.executable, "-S", "-c", BUSY]))
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def exponent(points: list[tuple[float, float]]) -> float | None:
    """The slope of log y over log x by least squares: 1 is linear growth, 2 quadratic. None for
    fewer than three points.
    """
    if len(points) < 3 or min(min(p) for p in points) <= 0:
        return None
    from math import log

    line = statistics.linear_regression([log(x) for x, _ in points], [log(y) for _, y in points])
    return float(line.slope)
