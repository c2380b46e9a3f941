"""How many threads torch works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
