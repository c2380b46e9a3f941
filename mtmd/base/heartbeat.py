"""Signs of life of a thread that prepares and runs plans: one for each weight, kernel, node or
program, for who watches it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()


class Heartbeat:
    """`beats` so far. `limit_s`: the longest that may pass between two of them in what is being
    done now, None where nothing is done, or nobody knows how long it takes; `more_s` is added to
    it while a node runs that may take long. `at`: the name of what it is at; `waits`: it does
    nothing until another process has come as far.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.limit_s: float | None = None
        self.more_s = 0.0
        self.at = ""
        self.waits = False

    def count_this_thread(self) -> None:
        _here.heart = self


def heart_here() -> Heartbeat | None:
    """This thread's, where it is watched."""
    heart: Heartbeat | None = getattr(_here, "heart", None)
    return heart


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Allow what runs inside to take so long."""
    heart = heart_here()
    if heart is None:
        yield
        return
    before, heart.more_s = heart.more_s, max(seconds, heart.more_s)
    try:
        yield
    finally:
        heart.more_s = before


def beat(at: str | None = None) -> None:
    """Report that the work of this thread goes on, now with what is called `at`."""
    heart = heart_here()
    if heart is not None:
        heart.beats += 1
        heart.at = heart.at if at is None else at


@contextmanager
def waiting() -> Iterator[None]:
    """Note that the code inside waits for other processes."""
    heart = heart_here()
    if heart is None:
        yield
        return
    before, heart.waits = heart.waits, True
    try:
        yield
    finally:
        heart.waits = before
