"""Headers of picture files, read without a decoder: the size in pixels, and of a JPEG how often its
pixels would be gone over.

Before anything is decoded it has to be known whether it fits. Asking the decoder's own reader would
be work of unknown size already: a TIFF's directory may hold megabytes of tags, a JPEG millions of
segments. Here a few fixed places are looked at, and what is gone through is limited.
"""

from __future__ import annotations

import re
import struct

from mtmd.clip.image.boxes import TooManyBoxes, still_size
from mtmd.clip.image.formats import PAGE_SIDE
from mtmd.clip.image.signatures import webp_size

SEGMENTS_MAX = 4096
"""Of a JPEG before its pixels, and entries of a TIFF's directory: cameras write some dozens."""
BLOCKS_MAX = 1 << 16
"""Of 255 bytes at most, of a GIF before its first frame."""
FILL_MAX = 1 << 16
"""Fill bytes between a JPEG's segments; usual are none."""

FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length: TEM, RST, SOI
END, SCAN = 0xD9, 0xDA
_NOT_FILL = re.compile(rb"[^\xff]")
_TIFF_COUNTS = {1: "B", 3: "H", 4: "I", 16: "Q"}  # unsigned types that a size may have


class TooMuch(Exception):
    """A header that is right and senseless: its text says what there is too much of."""


def header_size(kind: str, data: bytes) -> tuple[int, int]:
    """(width, height) as the file holds its pixels, or at most will have them, `kind` a key of
    `signatures.NAMES`. Raises TooMuch, and EOFError, ValueError or struct.error where there is
    none.
    """
    if kind == "JPEG":
        return _jpeg_size(data)
    if kind == "PNG":
        if data[12:16] != b"IHDR":
            raise ValueError("no IHDR")
        width, height = struct.unpack_from(">II", data, 16)
    elif kind == "GIF":
        width, height = _gif_size(data)
    elif kind == "BMP":
        (head,) = struct.unpack_from("<I", data, 14)
        if head == 12:  # OS/2's
            width, height = struct.unpack_from("<HH", data, 18)
        else:
            width, height = struct.unpack_from("<ii", data, 18)
        height = abs(height)  # below zero: rows from the top
    elif kind == "WEBP":
        size = webp_size(data)
        if size is None:
            raise ValueError("no chunk with a size")
        width, height = size
    elif kind in ("AVIF", "HEIF"):
        try:
            width, height = still_size(data)
        except TooManyBoxes as error:
            raise TooMuch(str(error)) from error
    elif kind == "PDF":
        width = height = PAGE_SIDE  # as large as a page is drawn at most
    else:
        width, height = _tiff_size(data)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Return the size in the last frame header before the first scan."""
    position, fill, size = 2, 0, None
    for _ in range(SEGMENTS_MAX):
        result = _NOT_FILL.search(data, position)
        fill += (result.start() if result else len(data)) - position
        if fill > FILL_MAX:
            raise TooMuch(f"more than {FILL_MAX:,} fill bytes")
        if result is None:
            break
        if result.start() == position:  # no marker: what stands here is passed over
            position = data.find(b"\xff", position, position + FILL_MAX)
            if position < 0:
                raise ValueError("no marker")
            continue
        kind, position = data[result.start()], result.end()
        if kind in ALONE or kind == 0:
            continue
        if kind in (END, SCAN):
            break
        if kind in FRAMES and position + 7 <= len(data):
            height, width = struct.unpack_from(">HH", data, position + 3)
            size = width, height
        if position + 2 > len(data):
            break
        position += max(int.from_bytes(data[position : position + 2], "big"), 2)
    else:
        raise TooMuch(f"more than {SEGMENTS_MAX:,} segments before its pixels")
    if size is None:
        raise EOFError
    return size


def _gif_size(data: bytes) -> tuple[int, int]:
    """Return the size of the screen, or as far as the first frame reaches beyond it (GIF89a)."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position, left = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0), BLOCKS_MAX
    while left:
        left -= 1
        kind = data[position : position + 1]
        if kind == b",":
            x, y, wide, high = struct.unpack_from("<HHHH", data, position + 1)
            return max(width, x + wide), max(height, y + high)
        if kind in (b"", b";"):
            return width, height
        position += 1
        if kind == b"!":
            position += 1  # its label; blocks follow, each with its length, and an empty one
            while left and (length := data[position : position + 1]) not in (b"", b"\0"):
                position, left = position + 1 + length[0], left - 1
    raise TooMuch(f"more than {BLOCKS_MAX:,} blocks before its first frame")


def _tiff_size(data: bytes) -> tuple[int, int]:
    """ImageWidth and ImageLength of the first directory (TIFF 6.0 section 2; BigTIFF)."""
    order = "<" if data[:2] == b"II" else ">"
    big = 43 in data[2:4]
    start, count, entry = ("Q", "Q", "HHQ") if big else ("I", "H", "HHI")
    (directory,) = struct.unpack_from(order + start, data, 8 if big else 4)
    if directory > len(data):
        raise EOFError
    (entries,) = struct.unpack_from(order + count, data, directory)
    if entries > SEGMENTS_MAX:
        raise TooMuch(f"{entries:,} entries in its directory")
    position = directory + struct.calcsize(order + count)
    sizes: dict[int, int] = {}
    for _ in range(entries):
        tag, type_, values = struct.unpack_from(order + entry, data, position)
        position += struct.calcsize(order + entry)
        if tag in (256, 257):
            if values != 1 or type_ not in _TIFF_COUNTS:
                raise ValueError("a size that is no number")
            (sizes[tag],) = struct.unpack_from(order + _TIFF_COUNTS[type_], data, position)
        position += 8 if big else 4
    if len(sizes) < 2:
        raise EOFError
    return sizes[256], sizes[257]
