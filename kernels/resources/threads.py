"""Number of threads that torch works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mtmd.base.cores import Cores, usable_cores


@dataclass
class _Requested:
    threads: int | None = None
    before: int | None = None  # torch's, before anybody asked
    why: str = ""


_requested = _Requested()


def ask_threads(count: int | None, why: str = "as asked") -> None:
    """Set the number of threads for the whole process: torch in this thread and those that begin
    with it from now on, and machine code, which else finds out by itself how many are best. None:
    as before. `why` is for people.
    """
    if _requested.before is None:
        _requested.before = torch.get_num_threads()
    torch.set_num_threads(count or _requested.before)
    _requested.threads, _requested.why = count, why if count else ""


def settle_cores() -> Cores:
    """Before a model is loaded. Where nobody asked for a number, there are no more threads than
    have cores: torch knows which ones this process may run on, and not how much of their time it is
    given.
    """
    cores = usable_cores()
    if _requested.threads is None and torch.get_num_threads() > cores.usable:
        torch.set_num_threads(cores.usable)
        _requested.before = None  # whatever it was, it is more
    return cores


def why_threads() -> str:
    """Why there are so many, "" where nobody has asked for a number."""
    return _requested.why


def requested_threads() -> int | None:
    """Return what was asked for last, None where nobody has."""
    return _requested.threads


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
