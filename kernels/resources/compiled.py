"""Count of the kernels that this process has compiled for its CPU so far: who waits for an answer
waits for those that its computation needs, once on a machine, as their code is kept on disk. Loads
without the compiler.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelsCompiled:
    """Count of compiled kernels, without those whose code lay on disk."""

    kernels: int = 0
    ms: float = 0.0


class _Counter:
    def __init__(self) -> None:
        self.count, self._lock = KernelsCompiled(), threading.Lock()

    def note(self, ms: float) -> None:
        with self._lock:
            self.count = KernelsCompiled(self.count.kernels + 1, self.count.ms + ms)


_counter = _Counter()


def note_compiled(ms: float) -> None:
    """One more, which took so long."""
    _counter.note(ms)


def kernels_compiled() -> KernelsCompiled:
    """Return the number of kernels compiled so far."""
    return _counter.count
