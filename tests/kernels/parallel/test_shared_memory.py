"""Collectives through memory: of ranks that are threads, with a mapping each."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TypeVar

import pytest
import torch

from mtmd.kernels.parallel import shared_memory
from mtmd.kernels.parallel.shared_memory import SharedMemory, new_memory
from mtmd.options.load import RANKS_MAX

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[SharedMemory], T]) -> list[T]:
    memory = new_memory(size)
    assert memory is not None, "tests run on Linux on x86"
    ranks = [SharedMemory(os.dup(memory), rank, size) for rank in range(size)]
    os.close(memory)
    with ThreadPoolExecutor(size) as pool:
        return [f.result() for f in [pool.submit(work, rank) for rank in ranks]]


@pytest.mark.parametrize("size", (2, 3))
def test_many_collectives_one_after_another(size: int) -> None:
    """Of other sizes and types each time; ranks come early and late."""

    def work(memory: SharedMemory) -> None:
        shapes, own = Random(0), Random(memory.rank)
        for number in range(120):
            dtype = shapes.choice((torch.float32, torch.bfloat16))
            rows, width = shapes.choice((1, 1, 5)), shapes.choice((1, 7, 640))
            parts = [
                torch.randn(
                    rows, width + rank, generator=torch.Generator().manual_seed(number * 9 + rank)
                ).to(dtype)
                for rank in range(size)
            ]
            for _ in range(own.randrange(3)):
                os.sched_yield()
            sizes = tuple(p.shape[1] for p in parts)
            whole = memory.gather(parts[memory.rank], 1, sizes, 20)
            assert torch.equal(whole, torch.cat(parts, 1))
            addends = [p[:, :width] for p in parts]
            given = addends[memory.rank].clone()
            total = memory.sum(given, 20)
            expected = addends[0]
            for other in addends[1:]:
                expected = expected + other
            assert total is given and torch.equal(total, expected)

    on_ranks(size, work)


def test_as_many_ranks_as_there_may_be() -> None:
    """Whose counters, and the one for a loss, take more than a page."""
    memory = new_memory(RANKS_MAX)
    assert memory is not None
    ranks = [SharedMemory(os.dup(memory), rank, RANKS_MAX) for rank in range(RANKS_MAX)]
    os.close(memory)
    with ThreadPoolExecutor(RANKS_MAX) as pool:
        totals = [*pool.map(lambda r: r.sum(torch.tensor([r.rank + 1.0]), 60).item(), ranks)]
    assert set(totals) == {RANKS_MAX * (RANKS_MAX + 1) / 2}
    ranks[-1].give_up()
    with pytest.raises(ConnectionError, match="another rank is gone"):
        ranks[0].sum(torch.ones(1), 60)


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SPIN_S", 0.0)

    def work(memory: SharedMemory) -> str:
        if memory.rank:
            return ""
        with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s"):
            memory.sum(torch.zeros(3), 0.05)
        memory.give_up()
        with pytest.raises(ConnectionError, match="another rank is gone"):
            memory.sum(torch.zeros(3), 600)
        return "told"

    assert on_ranks(2, work) == ["told", ""]


def test_what_is_too_large_goes_another_way() -> None:
    memory = new_memory(2)
    assert memory is not None
    rank = SharedMemory(memory, 0, 2)
    assert rank.takes(shared_memory.SLOT) and not rank.takes(shared_memory.SLOT + 1)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(memory)
