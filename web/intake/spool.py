"""Describes what clients leave here for later, in a file: it takes the disk and no memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import IO

from mtmd.web.native_threads import waiting

BLOCK = 4096  # bytes; so long are the places in the file, or some times that


@dataclass(eq=False)
class Piece:
    """Describes where in the file something of `size` bytes is: from the start to the end of each
    place. `there`: until it is let go.
    """

    size: int
    locations: list[tuple[int, int]]
    there: bool = True


class Spool:
    """One temporary file without a name, which nobody else can open and which goes with the
    process. It never has more blocks than what was in it at one time. Thread-safe: nobody waits
    while another reads or writes, only while the end is cut off.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # of who has which place
        self._file: _File | None = None
        self._free: list[tuple[int, int]] = []  # (start, end) of each hole, none beside another
        self._end = 0

    def write(self, data: bytes) -> Piece:
        """Raises OSError where the disk has no room."""
        with self._lock:
            if self._file is None:
                self._file = _File()
                weakref.finalize(self, self._file.close)
            file, piece = self._file, Piece(len(data), self._take(len(data)))
        left = memoryview(data)
        try:
            for start, end in piece.locations:
                file.write(start, left[: end - start])
                left = left[end - start :]
        except OSError:
            self.let_go(piece)
            raise
        return piece

    def read(self, piece: Piece) -> bytes | None:
        """None where it has been let go, also meanwhile. Raises OSError."""
        file, parts, left = self._file, list[bytes](), piece.size
        if file is None or not piece.there:
            return None
        for start, end in piece.locations:
            here = min(end - start, left)
            left -= here
            parts += file.read(start, here)
        with self._lock:  # before its places are for others, it is marked as gone
            return b"".join(parts) if piece.there else None  # mostly one, which is not copied

    def let_go(self, piece: Piece) -> None:
        """Release its slots."""
        with self._lock:
            if piece.there:
                self._let_go(piece)

    def _take(self, size: int) -> list[tuple[int, int]]:
        """The first holes, then what follows the end."""
        slots, left = list[tuple[int, int]](), -(-size // BLOCK) * BLOCK
        for start, end in self._free:
            if not left:
                break
            slots.append((start, min(end, start + left)))
            left -= slots[-1][1] - start
        if slots:
            rest = slots[-1][1], self._free[len(slots) - 1][1]
            self._free[: len(slots)] = [rest] if rest[0] < rest[1] else []
        if left:
            slots.append((self._end, self._end + left))
            self._end += left
        return slots

    def _let_go(self, piece: Piece) -> None:
        piece.there = False
        for start, end in piece.locations:
            self._free_slot(start, end)
        if self._free and self._free[-1][1] == self._end:
            self._end = self._free.pop()[0]
            if self._file is not None:
                self._file.truncate(self._end)

    def _free_slot(self, start: int, end: int) -> None:
        """One hole with those beside it."""
        index = bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


class _File:
    """Read and written by several at once, each where it says."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as we do
        self._position = Lock()  # Windows has one for all

    def write(self, start: int, data: memoryview) -> None:
        """Raises OSError."""
        while data:
            count = self._write_some(start, data)
            start, data = start + count, data[count:]

    def read(self, start: int, count: int) -> Iterator[bytes]:
        """Read as much as there is of so many bytes. Raises OSError."""
        while part := self._read_some(start, count):
            yield part
            start, count = start + len(part), count - len(part)

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def close(self) -> None:
        self._file.close()

    def _write_some(self, start: int, data: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return waiting(os.pwrite, self._file.fileno(), data, start)
        with self._position:
            self._file.seek(start)
            return self._file.write(data)

    def _read_some(self, start: int, count: int) -> bytes:
        if hasattr(os, "pread"):
            return waiting(os.pread, self._file.fileno(), count, start)
        with self._position:
            self._file.seek(start)
            return self._file.read(count)
