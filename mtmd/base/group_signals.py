"""Describes what a terminal or systemd sends to all processes of a server, kept from those that the
server ends itself: they have to live until answers under way are written.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
GROUP = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]  # Windows has no SIGHUP


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Start processes in this context with the signals blocked, until `outlive`: they would end it
    while it imports libraries.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive() -> None:
    """Ignore the signals, in the main thread of a process that was started so. No program that it
    starts inherits that.
    """
    for number in GROUP:
        signal.signal(number, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP)
