"""How many programs this process has compiled so far: one compiled while an answer is computed is a
pause that somebody waits through, and is told. No Triton here: whoever imports it passes it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Any

log = logging.getLogger("mtmd.kernels")


@dataclass(frozen=True)
class Compilations:
    """Programs compiled, and those that lay in Triton's cache on disk."""

    compiled: int = 0
    from_cache: int = 0
    compile_ms: float = 0.0


class _Counter:
    def __init__(self) -> None:
        self.count, self.lock = Compilations(), threading.Lock()
        self.quiet = 0  # of how many who compile ahead

    def note(self, name: str, times: Any, cache_hit: bool) -> None:
        spent = times.total / 1e3
        with self.lock:
            now = self.count
            self.count = (
                replace(now, from_cache=now.from_cache + 1)
                if cache_hit
                else replace(now, compiled=now.compiled + 1, compile_ms=now.compile_ms + spent)
            )
            told = not cache_hit and not self.quiet
        if told:
            log.warning("compiled %s in %.0f ms, which a warm-up had not foreseen", name, spent)


_counter = _Counter()


def compilations() -> Compilations:
    """So far."""
    return _counter.count


class ahead:
    """Around what compiles before anybody waits for an answer: nothing is logged of it."""

    def __enter__(self) -> None:
        with _counter.lock:
            _counter.quiet += 1

    def __exit__(self, *_: object) -> None:
        with _counter.lock:
            _counter.quiet -= 1


def listen(triton: Any) -> None:
    """Have Triton tell of everything that it compiles; who listened before goes on to."""
    before = triton.knobs.compilation.listener

    def heard(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        _counter.note(src.name, times, cache_hit)
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = heard
