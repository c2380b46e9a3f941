"""How many threads torch works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Asked:
    threads: int | None = None
    before: int | None = None  # torch's, before anybody asked


_asked = _Asked()


def ask_threads(count: int | None) -> None:
    """So many, for the whole process: torch in this thread and those that begin with it from now
    on, and machine code, which else finds out by itself how many are best. None: as before.
    """
    if _asked.before is None:
        _asked.before = torch.get_num_threads()
    torch.set_num_threads(count or _asked.before)
    _asked.threads = count


def asked_threads() -> int | None:
    """What was asked for last, None where nobody has."""
    return _asked.threads


@contextmanager
def one_thread() -> Iterator[None]:
    """torch works in this thread alone meanwhile.

    For what takes less time than to wake others up, or runs beside the thread that computes:
    OpenMP keeps a pool for every thread that has used it, and while there are more threads in pools
    than cores, every one of them goes to sleep at each wait, those that compute too. Where another
    process has a core, waiting for a second thread takes as long as that process is let run.
    """
    count = torch.get_num_threads()
    if count == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
