"""Describes how many programs this process has compiled so far: one compiled while an answer is
computed is a pause that somebody waits through, and is told. No Triton here: whoever imports it
passes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("mtmd.kernels")


@dataclass(frozen=True)
class Compilations:
    """Programs compiled, and those that lay in Triton's cache on disk. `late`: of those compiled,
    the ones that no warm-up had foreseen, in `late_ms`.
    """

    compiled: int = 0
    from_cache: int = 0
    compile_ms: float = 0.0
    late: int = 0
    late_ms: float = 0.0


_ahead: ContextVar[bool] = ContextVar("ahead", default=False)


@contextmanager
def ahead() -> Iterator[None]:
    """Around what compiles before anybody waits for an answer, on this thread."""
    token = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(token)


class _Counter:
    def __init__(self) -> None:
        self.count, self._lock = Compilations(), threading.Lock()

    def note(self, name: str, ms: float, cache_hit: bool) -> None:
        late = not cache_hit and not _ahead.get()
        with self._lock:
            now = self.count
            self.count = Compilations(
                now.compiled + (not cache_hit),
                now.from_cache + cache_hit,
                now.compile_ms + (0.0 if cache_hit else ms),
                now.late + late,
                now.late_ms + (ms if late else 0.0),
            )
        if late:
            log.warning("compiled the GPU program %s in %.0f ms, as it was launched", name, ms)


_counter = _Counter()


def compilations() -> Compilations:
    """Return the number of compilations so far."""
    return _counter.count


def listen(triton: Any) -> None:
    """Have Triton tell of everything that it compiles; who listened before goes on to."""
    before = triton.knobs.compilation.listener

    def heard(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        _counter.note(src.name, times.total / 1e3, cache_hit)
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = heard
