"""What clients leave here for later, in a file: it takes the disk and no memory."""

from __future__ import annotations

import tempfile
import weakref
from bisect import insort
from dataclasses import dataclass
from threading import Lock
from typing import IO


@dataclass(eq=False)
class Piece:
    """Where in the file something is. `there`: until it is let go."""

    start: int
    size: int
    there: bool = True


class Spool:
    """One temporary file without a name, which nobody else can open and which goes with the
    process. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._file: IO[bytes] | None = None
        self._free: list[tuple[int, int]] = []  # (start, end) of each hole, none beside another
        self._end = 0

    def write(self, data: bytes) -> Piece:
        """Raises OSError where the disk has no room."""
        with self._lock:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as we do
                weakref.finalize(self, self._file.close)
            piece, left = Piece(self._take(len(data)), len(data)), memoryview(data)
            try:
                self._file.seek(piece.start)
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._let_go(piece)
                raise
            return piece

    def read(self, piece: Piece) -> bytes | None:
        """None where it has been let go. Raises OSError."""
        with self._lock:
            if not piece.there or self._file is None:
                return None
            self._file.seek(piece.start)
            data = bytearray()
            while part := self._file.read(piece.size - len(data)):
                data += part
            return bytes(data)

    def let_go(self, piece: Piece) -> None:
        """Its place is for others now."""
        with self._lock:
            if piece.there:
                self._let_go(piece)

    def _take(self, size: int) -> int:
        """The start of the first hole that is large enough, or the end."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        start, self._end = self._end, self._end + size
        return start

    def _let_go(self, piece: Piece) -> None:
        piece.there = False
        if not piece.size:
            return
        insort(self._free, (piece.start, piece.start + piece.size))
        joined = list[tuple[int, int]]()
        for start, end in self._free:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        if joined[-1][1] == self._end:
            self._end = joined.pop()[0]
            if self._file is not None:
                self._file.truncate(self._end)
        self._free = joined
