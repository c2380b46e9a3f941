"""Describes which thread of this process the system lets run first, where there are too few cores
for all.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

# Half of a processor that a thread wants that has not stepped back. Python's threads share one
# lock: with much less, one that holds it stands still for tens of milliseconds beside any other
# program, and all the others with it.
BEHIND = 3
NICEST = 19
T = TypeVar("T")
_lock = threading.Lock()
_starters: dict[int, ThreadPoolExecutor] = {}
"""By process, as a child has none of its parent's threads: one thread that never steps back."""


def lower_thread_priority(steps: int = BEHIND) -> None:
    """This thread lets those go first that have the priority of the process, from now on, and so do
    threads and processes that it starts, but for `ahead`: only a privileged process could take it
    back. Linux knows priorities of threads; elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        requested = min(_of_process() + steps, NICEST)
        if os.getpriority(os.PRIO_PROCESS, thread) < requested:
            _keep_starter()
            os.setpriority(os.PRIO_PROCESS, thread, requested)


def ahead(start: Callable[[], T]) -> T:
    """Return what `start` returns or raises. Threads and processes that it starts have the priority
    of the process, though this thread may have stepped back: then another one calls it.
    """
    starter = _starters.get(os.getpid())
    if starter is None or _is_ahead():
        return start()
    return starter.submit(start).result()


def _of_process() -> int:
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _is_ahead() -> bool:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) <= _of_process()


def _keep_starter() -> None:
    """Keep a thread that starts others: one that has not stepped back yet, and could start none
    later.
    """
    with _lock:
        if os.getpid() not in _starters and _is_ahead():
            starter = ThreadPoolExecutor(1, "mtmd starter")
            starter.submit(os.getpid).result()  # its thread is started here
            _starters[os.getpid()] = starter
