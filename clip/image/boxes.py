"""The size of an AVIF or HEIC picture from its boxes (ISO/IEC 14496-12 and 23008-12): that of the
item which the file calls its primary one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

BOXES_MAX = 4096
"""In all; a telephone's picture has about a hundred, most of them tiles."""
ITEMS_MAX = 4096


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.left = data, BOXES_MAX

    def boxes(self, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """(type, start, end) of the content of each box between `start` and `end`."""
        end = min(end, len(self._data))
        while start + 8 <= end:
            self.left -= 1
            if self.left < 0:
                raise TooManyBoxes(f"more than {BOXES_MAX:,} boxes")
            size, kind = struct.unpack_from(">I4s", self._data, start)
            head = 8
            if size == 1:
                (size,) = struct.unpack_from(">Q", self._data, start + 8)
                head = 16
            elif size == 0:  # to the end of the file
                size = end - start
            if size < head:
                raise ValueError("a box that ends before it starts")
            yield kind, start + head, min(start + size, end)
            start += size

    def find(self, kind: bytes, start: int, end: int) -> tuple[int, int]:
        for result, first, last in self.boxes(start, end):
            if result == kind:
                return first, last
        raise EOFError


class TooManyBoxes(Exception):
    """A header that is right and senseless."""


def still_size(data: bytes) -> tuple[int, int]:
    """(width, height), before it is turned or cut. Raises TooManyBoxes, and EOFError, ValueError or
    struct.error where there is none.
    """
    reader = _Reader(data)
    first, last = reader.find(b"meta", 0, len(data))
    first += 4  # version and flags
    primary = _primary(data, *reader.find(b"pitm", first, last))
    properties = reader.find(b"iprp", first, last)
    sizes = {
        number: struct.unpack_from(">II", data, start + 4)
        for number, (kind, start, _) in enumerate(
            reader.boxes(*reader.find(b"ipco", *properties)), 1
        )
        if kind == b"ispe"
    }
    for kind, start, end in reader.boxes(*properties):
        if kind == b"ipma":
            for number in _properties_of(data, start, end, primary):
                if number in sizes:
                    width, height = sizes[number]
                    return int(width), int(height)
    raise EOFError


def _primary(data: bytes, start: int, _: int) -> int:
    return int(struct.unpack_from(">H" if data[start] == 0 else ">I", data, start + 4)[0])


def _properties_of(data: bytes, start: int, end: int, item: int) -> list[int]:
    """Return the numbers of properties, from 1 on; of ItemPropertyAssociationBox."""
    version, long = data[start], data[start + 3] & 1
    (count,) = struct.unpack_from(">I", data, start + 4)
    if count > ITEMS_MAX:
        raise TooManyBoxes(f"{count:,} items")
    position = start + 8
    for _ in range(count):
        (number,) = struct.unpack_from(">H" if version == 0 else ">I", data, position)
        position += 2 if version == 0 else 4
        associations = data[position]
        position += 1
        if position + associations * (1 + long) > end:
            raise EOFError
        result = [
            struct.unpack_from(">H", data, position + 2 * n)[0] & 0x7FFF
            if long
            else data[position + n] & 0x7F
            for n in range(associations)
        ]
        position += associations * (1 + long)
        if number == item:
            return result
    raise EOFError
