"""Who steps back lets the others of the process go first, and nobody else is touched."""

from __future__ import annotations

import os
import sys
import threading

from mtmd.kernels.resources.priority import BEHIND, NICEST, step_back


def priority() -> int:
    """Of this thread, as the system has it."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_that_steps_back_is_behind_with_all_that_it_starts() -> None:
    found: list[int] = []

    def later() -> None:
        found.append(priority())

    def work() -> None:
        step_back()
        found.append(priority())
        step_back()  # of one who is there already
        found.append(priority())
        thread = threading.Thread(target=later)
        thread.start()
        thread.join()

    before = os.getpriority(os.PRIO_PROCESS, os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    behind = min(before + BEHIND, NICEST) if sys.platform == "linux" else before
    assert found == [behind] * 3
    assert priority() == os.getpriority(os.PRIO_PROCESS, os.getpid()) == before
