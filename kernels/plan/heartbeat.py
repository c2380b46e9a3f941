"""Signs of life of a thread that runs plans, one for each node or program, for who watches it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


class Heartbeat:
    """`beats` so far. `limit_s`: the longest that may pass between two of them in what is being
    done now, None where nothing is done, or nobody knows how long it takes; `more_s` is added to
    it while a node runs that may take long.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.limit_s: float | None = None
        self.more_s = 0.0

    def count_this_thread(self) -> None:
        _here.heart = self


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """For what runs inside and may take so long."""
    heart: Heartbeat | None = getattr(_here, "heart", None)
    if heart is None:
        yield
        return
    heart.more_s = seconds
    try:
        yield
    finally:
        heart.more_s = 0.0


def beat() -> None:
    """What this thread does goes on."""
    heart: Heartbeat | None = getattr(_here, "heart", None)
    if heart is not None:
        heart.beats += 1
