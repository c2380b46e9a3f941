"""Priorities of threads, which Linux alone knows."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from mtmd.base.priority import lower_thread_priority

T = TypeVar("T")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities here")


def priority() -> int:
    """Of this thread, as the system has it; of the process where it knows none of threads."""
    thread = threading.get_native_id() if sys.platform == "linux" else 0
    return os.getpriority(os.PRIO_PROCESS, thread)


def behind(work: Callable[[], T]) -> T:
    """What it gives on a thread that has stepped back."""
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        return pool.submit(work).result()
