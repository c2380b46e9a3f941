"""Sums and gathers of ranks on one machine, through memory that they share: what gloo hands over
between threads and sockets, some hundred microseconds of a step of decoding for each of its sums,
is here a copy and a look at each other's counters.

Every collective has a number, the same on every rank. A rank copies its values to its place, writes
the number to its counter, waits until all counters have come so far, and reads the others' places.
There are two places a rank, in turn: who writes to one again has waited for all to begin the
collective after it, and so to have read it.

Stores have to be seen in the order they were made, which x86 promises; elsewhere there is no such
memory, and gloo does it. Raises TimeoutError where a rank does not come, ConnectionError where one
is gone.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

SLOT = 4 << 20  # bytes of values, at most, that go this way; untouched memory costs nothing
LINE = 64  # bytes: counters on lines of their own
SPIN_S = 0.02  # for which a rank looks again and again, yielding to others
NAP_S = 0.0002


def new_memory(size: int) -> int | None:
    """A descriptor of memory for so many ranks, to be handed to processes; None where this system
    has none. It is gone with the last process that holds it.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    memory = os.memfd_create("mtmd-ranks")
    os.ftruncate(memory, _bytes(size))
    return memory


def _header_bytes(size: int) -> int:
    """Whole pages for a counter of each rank, and for whether one is lost."""
    return -(-(size + 1) * LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes(size: int) -> int:
    return _header_bytes(size) + 2 * size * SLOT


class SharedMemory:
    """One rank's side. It closes the descriptor."""

    def __init__(self, memory: int, rank: int, size: int):
        self.rank, self.size, self._number = rank, size, 0
        try:
            mapped = mmap.mmap(memory, _bytes(size))
        finally:
            os.close(memory)
        self._counters = memoryview(mapped)[: _header_bytes(size)].cast("Q")
        self._locations = torch.frombuffer(mapped, dtype=torch.uint8)[_header_bytes(size) :]
        self._lost_at = size * LINE // 8
        self._parent = os.getppid() if rank else None

    def takes(self, size: int) -> bool:
        """Return whether values of so many bytes go this way."""
        return size <= SLOT

    def give_up(self) -> None:
        """A rank is gone: nobody waits any longer."""
        self._counters[self._lost_at] = 1

    def sum(self, x: Tensor, seconds: float) -> Tensor:
        """Sum in the order of ranks, on every one: all have the same to the last bit."""
        first, *others = self._exchange(x, [x.nbytes] * self.size, seconds)
        total = first.view(x.dtype)
        for other in others:
            total = total + other.view(x.dtype)
        return x.copy_(total.view(x.shape))

    def gather(self, x: Tensor, axis: int, sizes: Sequence[int], seconds: float) -> Tensor:
        each = x.nbytes // x.shape[axis]
        parts = self._exchange(x, [each * size for size in sizes], seconds)
        shapes = ((*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes)
        return torch.cat(
            [part.view(x.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)],
            axis,
        )

    def _exchange(self, x: Tensor, sizes: Sequence[int], seconds: float) -> list[Tensor]:
        """Every rank's bytes, which are to be read before the next exchange."""
        self._number += 1
        turn = self._number % 2 * self.size
        mine = self._locations.narrow(0, (turn + self.rank) * SLOT, x.nbytes)
        mine.copy_(x.contiguous().view(-1).view(torch.uint8))
        self._counters[self.rank * LINE // 8] = self._number
        self._wait(seconds)
        return [
            self._locations.narrow(0, (turn + rank) * SLOT, size) for rank, size in enumerate(sizes)
        ]

    def _wait(self, seconds: float) -> None:
        counters, number, start = self._counters, self._number, time.monotonic()
        for rank in range(self.size):
            at = rank * LINE // 8
            while counters[at] < number:
                os.sched_yield()
                if counters[self._lost_at]:
                    raise ConnectionError("another rank is gone")
                waited = time.monotonic() - start
                if waited > SPIN_S:
                    if self._parent is not None and os.getppid() != self._parent:
                        raise ConnectionError("the first rank is gone")
                    if waited > seconds:
                        raise TimeoutError(f"timed out after {seconds:g} s")
                    time.sleep(NAP_S)
