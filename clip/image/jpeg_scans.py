"""The scans of a JPEG: how often its pixels would be gone over, and whether all of them are there
where the marker that ends the file is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtmd.clip.image.headers import ALONE, END, FRAMES, SCAN, TooMuch

SCANS_MAX = 100
"""Of a progressive JPEG: usual are 10. Each goes over all pixels (libjpeg-turbo's own advice on
"two issues with the JPEG standard" is a limit of this kind)."""
END_MARKER = bytes((0xFF, END))
# Data as a scan may have it, which no decoder reads where the scan before is whole.
OTHER_DATA = b"\xaa\x55" * 32

# In the data of a scan a marker is what follows 0xFF, but for stuffing and restarts (ITU T.81, B.1)
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})


def check_scans(data: bytes) -> None:
    """Raises TooMuch for a JPEG of more scans than `SCANS_MAX`."""
    # Other data, such as a film behind the picture, has these bytes by chance.
    if data.count(b"\xff\xda") > SCANS_MAX:
        for _ in _segments(data):
            pass


def lacks_end(data: bytes) -> bool:
    """Return whether no marker ends a JPEG's scans."""
    return not data.endswith(END_MARKER) and all(kind != END for kind, _ in _segments(data))


def two_endings(data: bytes) -> tuple[bytes, bytes] | None:
    """Return a JPEG that `lacks_end` with two endings, which are the same picture where the data
    of its last scan is whole; None where scans are missing.
    """
    if not _has_all_scans(data):
        return None
    stem = data.rstrip(b"\0")
    if stem.endswith(b"\xff") and len(stem) < len(data):
        stem += b"\0"  # a byte of data and its stuffing
    return stem + END_MARKER, stem + OTHER_DATA + END_MARKER


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each marker and what belongs to it, up to the end. Raises TooMuch for too many scans."""
    position, scans = 2, 0
    while marker := _NEXT_MARKER.search(data, position):
        kind, position = data[marker.end() - 1], marker.end()
        if kind in ALONE:
            continue
        scans += kind == SCAN
        if scans > SCANS_MAX:
            raise TooMuch(f"more than {SCANS_MAX} scans over all pixels")
        length = max(int.from_bytes(data[position : position + 2], "big"), 2)
        yield kind, data[position + 2 : position + length]
        if kind == END or position + 2 > len(data):
            return
        position += length


def _has_all_scans(data: bytes) -> bool:
    """Return whether each component is in a scan and, in a progressive JPEG, each of its
    coefficients in its last bit (ITU T.81, B.2.2 and B.2.3).
    """
    components: tuple[int, ...] = ()
    sequential, lowest_bit = False, dict[tuple[int, int], int]()
    for kind, body in _segments(data):
        if kind in FRAMES:
            components, sequential = tuple(body[6::3]), kind in _SEQUENTIAL
        if kind == SCAN and body and len(body) >= 4 + 2 * body[0]:
            first, last, bits = body[1 + 2 * body[0] : 4 + 2 * body[0]]
            for component in body[1 : 1 + 2 * body[0] : 2]:
                for k in range(first, min(last, 63) + 1):
                    lowest_bit[component, k] = bits & 15
    needed = [(component, k) for component in components for k in range(1 if sequential else 64)]
    return bool(needed) and all(lowest_bit.get(one) == 0 for one in needed)
