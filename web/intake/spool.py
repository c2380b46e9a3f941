"""What clients leave here for later, in a file: it takes the disk and no memory."""

from __future__ import annotations

import tempfile
import weakref
from bisect import bisect
from dataclasses import dataclass
from threading import Lock
from typing import IO

BLOCK = 4096  # bytes; so long are the places in the file, or some times that


@dataclass(eq=False)
class Piece:
    """Where in the file something of `size` bytes is: from the start to the end of each place.
    `there`: until it is let go.
    """

    size: int
    places: list[tuple[int, int]]
    there: bool = True


class Spool:
    """One temporary file without a name, which nobody else can open and which goes with the
    process. It never has more blocks than what was in it at one time. Thread-safe.
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
            piece, left = Piece(len(data), self._take(len(data))), memoryview(data)
            try:
                for start, end in piece.places:
                    self._file.seek(start)
                    here, left = left[: end - start], left[end - start :]
                    while here:
                        here = here[self._file.write(here) :]
            except OSError:
                self._let_go(piece)
                raise
            return piece

    def read(self, piece: Piece) -> bytes | None:
        """None where it has been let go. Raises OSError."""
        with self._lock:
            if not piece.there or self._file is None:
                return None
            parts, left = list[bytes](), piece.size
            for start, end in piece.places:
                self._file.seek(start)
                here = min(end - start, left)
                left -= here
                while part := self._file.read(here):
                    parts.append(part)
                    here -= len(part)
        return b"".join(parts)  # mostly one, of which no copy is made

    def let_go(self, piece: Piece) -> None:
        """Its places are for others now."""
        with self._lock:
            if piece.there:
                self._let_go(piece)

    def _take(self, size: int) -> list[tuple[int, int]]:
        """The first holes, then what follows the end."""
        places, left = list[tuple[int, int]](), -(-size // BLOCK) * BLOCK
        for start, end in self._free:
            if not left:
                break
            places.append((start, min(end, start + left)))
            left -= places[-1][1] - start
        if places:
            rest = places[-1][1], self._free[len(places) - 1][1]
            self._free[: len(places)] = [rest] if rest[0] < rest[1] else []
        if left:
            places.append((self._end, self._end + left))
            self._end += left
        return places

    def _let_go(self, piece: Piece) -> None:
        piece.there = False
        for start, end in piece.places:
            self._free_place(start, end)
        if self._free and self._free[-1][1] == self._end:
            self._end = self._free.pop()[0]
            if self._file is not None:
                self._file.truncate(self._end)

    def _free_place(self, start: int, end: int) -> None:
        """One hole with those beside it."""
        index = bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
