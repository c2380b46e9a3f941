"""Memory of a run's large results: used again when nobody holds it, gone with the run."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from mtmd.kernels.resources import result_memory
from mtmd.kernels.resources.result_memory import LARGE, ResultMemory, new_result, zeros_untouched

ROWS = LARGE // 4096  # of 1,024 numbers in fp32


@pytest.fixture
def memory(monkeypatch) -> ResultMemory:
    monkeypatch.setattr(result_memory, "_spare", [])
    monkeypatch.setattr(result_memory, "SPARE", LARGE)
    return ResultMemory()


def new(rows: int = ROWS) -> torch.Tensor:
    return new_result(rows, 1024, dtype=torch.float32)


def test_a_result_is_a_tensor_as_any_other(memory):
    with memory.in_use():
        x = new_result(3, ROWS, 1024, dtype=torch.bfloat16)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((3, ROWS, 1024), torch.bfloat16, True)
    x.fill_(2)
    assert x.sum(dtype=torch.float64) == 2 * x.numel() and memory.bytes >= x.nbytes


def test_memory_is_used_again_when_the_last_view_of_it_is_gone(memory):
    with memory.in_use():
        first = new()
        at, view = first.data_ptr(), first[1:].view(-1)
        del first
        other = new()
        assert other.data_ptr() != at, "a view still reads it"
        del view
        assert new().data_ptr() == at


def test_memory_that_fits_badly_goes_before_more_is_taken_than_was_held_at_once(memory):
    with memory.in_use():
        both = new(3 * ROWS), new(3 * ROWS)
        maximum = memory.bytes
        del both
        more = [new(), new()]
        assert memory.bytes <= maximum + LARGE and sum(x.nbytes for x in more) * 3 == maximum


def test_small_results_and_those_outside_of_runs_are_the_allocators(memory):
    with memory.in_use():
        new(ROWS - 1)
    new()
    assert memory.bytes == 0


def test_it_is_the_threads_own_and_what_was_before_comes_back(memory):
    seen = []
    with memory.in_use():
        with ResultMemory().in_use():
            new()
        other = threading.Thread(target=lambda: seen.append(new()))
        other.start()
        other.join()
        assert memory.bytes == 0 and len(seen) == 1
        saved = new()
        assert memory.bytes == saved.nbytes


def test_with_the_run_everything_goes_but_what_somebody_holds(memory):
    with memory.in_use():
        free, spare, saved = new(2 * ROWS), new(), new().fill_(3)
        del free
        del spare
    memory.close()
    assert memory.bytes == saved.nbytes
    assert saved.eq(3).all()
    del saved
    assert memory.bytes == 0 and not memory._free
    following = ResultMemory()
    assert following.bytes == LARGE, "what was spare, and no more"
    assert ResultMemory().bytes == 0, "one run has it"


def test_what_cannot_be_had_is_a_lack_of_memory(memory):
    with memory.in_use(), pytest.raises(MemoryError, match="bytes for a result"):
        new_result(1 << 40, 1 << 10, dtype=torch.float32)
    assert memory.bytes == 0


def test_systems_without_pages_of_their_own_kind(monkeypatch, memory):
    monkeypatch.delattr(result_memory.mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(result_memory.mmap, "MAP_PRIVATE", raising=False)
    with memory.in_use():
        assert new().fill_(1).sum() == ROWS * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much is resident")
def test_zeros_take_no_memory_before_they_are_written_to():
    before = resident_bytes()
    zeros = zeros_untouched(100 * ROWS, 1024, dtype=torch.float32)
    assert zeros[-1].fill_(2).sum() == 2048 and zeros[0].eq(0).all()
    for row in range(0, 100 * ROWS, 5 * ROWS):
        zeros[row].fill_(0)
    assert resident_bytes() - before < 8 * LARGE, "for rows of 4 KiB in twenty places"
    zeros[: 10 * ROWS].fill_(1)
    assert resident_bytes() - before >= 9 * LARGE, "which this measure shows"


def test_few_zeros_are_the_allocators_and_zeros_in_memory_that_was_used_before(monkeypatch):
    monkeypatch.delattr(result_memory, "_mapped")
    for rows in (1, 3, ROWS - 1):
        for _ in range(3):
            zeros = zeros_untouched(rows, 1024, dtype=torch.float32)
            assert zeros.shape == (rows, 1024) and not zeros.count_nonzero()
            zeros.fill_(torch.nan)
            del zeros


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_free_memory_is_given_back_down_to_what_may_stay(memory):
    with memory.in_use():
        first, second = new(), new(2 * ROWS)
    assert memory.highest == memory.used == first.nbytes + second.nbytes
    del first, second
    memory.leave(3 * LARGE)
    assert memory.bytes == 3 * LARGE
    memory.leave(2 * LARGE)
    assert memory.bytes == 2 * LARGE, "the oldest piece is gone"
    memory.leave(-1)
    assert memory.bytes == 0


def test_what_is_held_at_most_counts_a_piece_that_is_used_again_once(memory):
    with memory.in_use():
        for _ in range(3):
            assert new().nbytes == memory.highest == LARGE
        assert memory.used == 0
        first, second = new(), new()
    assert memory.highest == memory.used == first.nbytes + second.nbytes
