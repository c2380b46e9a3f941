"""Ranks that are threads of one process: what several processes compute, quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Meeting:
    """Where the ranks' tensors meet."""

    def __init__(self, size: int):
        self.size = size
        self.values: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.calls = 0

    def _all(self, x: Tensor) -> list[Tensor]:
        self.calls += 1
        meeting = self._meeting
        meeting.values[self.rank] = x
        meeting.barrier.wait()
        found = [v for v in meeting.values if v is not None]
        meeting.barrier.wait()
        return found

    def sum(self, x: Tensor) -> Tensor:
        result = sum(self._all(x.clone())[1:], self._all(x.clone())[0])
        assert isinstance(result, Tensor)
        return result

    def gather(self, x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        parts = self._all(x.clone())
        assert tuple(p.shape[axis] for p in parts) == sizes
        return torch.cat(parts, axis)


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """`work(group)` of every rank, at once; the ranks' results."""
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        if first or errors:
            raise first or errors[0]
        return [f.result() for f in futures]
