"""Memory of a run's large results on the CPU, and of caches.

A run makes results of the same few sizes again and again. Left to the allocator, those that it
takes from the system cost a fault for each 4 KiB when they are first written to, and those that it
keeps are cut up for smaller ones, so that a heap grows to twice what is in use. So a run has pieces
of its own: each is used again as soon as nobody holds the tensor in it, and all are gone with the
run, those excepted that somebody still holds and a few MiB for the next run. Linux gives pages of
2 MiB to who asks for them, which costs a third.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

LARGE = 2 << 20  # bytes; what is smaller is the allocator's
SPARE = 8 << 20  # bytes that may be kept beyond what has been held at once, and for the next run
FITTING = 1.25  # times what is needed, at most, is a piece that is used again
_current = threading.local()
_spare: list[mmap.mmap] = []  # of the last run
_sparing = threading.Lock()


class ResultMemory:
    """Pieces of one run. Used by one thread at a time; what is in them may be let go by any."""

    def __init__(self) -> None:
        with _sparing:
            self._free = _spare[:]
            _spare.clear()
        self._closed = False
        self.bytes = sum(map(len, self._free))
        """Of all pieces that there are."""
        self._maximum = 0  # bytes that were held at once: as much may be kept
        self.highest = 0
        """The most bytes that were held at once, since it was set to those of then."""

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory that is not set. Raises MemoryError."""
        size = prod(shape) * dtype.itemsize
        piece = self._piece(size)
        # The tensor's storage holds the array: when the array goes, nobody sees the piece any more
        array = np.frombuffer(piece, np.uint8, size)
        weakref.finalize(array, self._take_back, piece).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _piece(self, size: int) -> mmap.mmap:
        fitting = [p for p in self._free if size <= len(p) <= size * FITTING]
        if fitting:
            piece = min(fitting, key=len)
            self._free.remove(piece)
            self.highest = max(self.highest, self.used)
            return piece
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._maximum = max(self._maximum, self.used + size)
        while self._free and self.bytes + size > self._maximum + SPARE:
            self.bytes -= len(self._free.pop(0))
        piece = _mapped(size, huge=True)
        self.bytes += len(piece)
        self.highest = max(self.highest, self.used)
        return piece

    @property
    def used(self) -> int:
        """Bytes of pieces that are in use."""
        return self.bytes - sum(map(len, self._free))

    def leave(self, size: int) -> None:
        """Give free pieces back until no more than so many bytes of them are left: others take
        memory, too.
        """
        while self._free and sum(map(len, self._free)) > size:
            self.bytes -= len(self._free.pop(0))

    def _take_back(self, piece: mmap.mmap) -> None:
        if self._closed:
            self.bytes -= len(piece)
        else:
            self._free.append(piece)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """`new_result` takes from it meanwhile, in this thread."""
        before = getattr(_current, "memory", None)
        _current.memory = self
        try:
            yield
        finally:
            _current.memory = before

    def close(self) -> None:
        """Give free memory back to the system or to the next run; memory in use follows once it is
        released.
        """
        self._closed = True
        free, self._free, saved = self._free, [], list[mmap.mmap]()
        self.bytes -= sum(map(len, free))
        for piece in sorted(free, key=len, reverse=True):
            if sum(map(len, saved)) + len(piece) <= SPARE:
                saved.append(piece)
        with _sparing:
            _spare[:] = saved


def new_result(*shape: int, dtype: torch.dtype) -> Tensor:
    """Memory that is not set, of the run that is under way where it is large."""
    memory: ResultMemory | None = getattr(_current, "memory", None)
    if memory is None or prod(shape) * dtype.itemsize < LARGE:
        return torch.empty(shape, dtype=dtype)
    return memory.new(*shape, dtype=dtype)


def zeros_untouched(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which the system gives what is written to when it is: torch.zeros writes to all.
    In pages of the usual size: a cache is written to in few places of many tensors, each of which
    would take 2 MiB of larger ones. Raises MemoryError.
    """
    size = prod(shape) * dtype.itemsize
    if size < LARGE:
        return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
    return (
        torch.from_numpy(np.frombuffer(_mapped(size, huge=False), np.uint8, size))
        .view(dtype)
        .view(shape)
    )


def _mapped(size: int, *, huge: bool) -> mmap.mmap:
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        piece = mmap.mmap(-1, size, **flags)
    except OSError as error:
        raise MemoryError(f"{size} bytes for a result ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            piece.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return piece
