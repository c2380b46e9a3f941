"""A PNG without what is no pixel. A text or a colour profile that is too large, or damaged, is no
reason to refuse a picture that others show, and less work where a file is hostile.

PNG (third edition, 2025): chunks in 5.3, critical and ancillary ones in 5.4, errors in 13.1.
"""

from __future__ import annotations

import zlib
from collections import Counter

from mtmd.clip.image.headers import TooMuch

SIGNATURE = 8  # bytes
CHUNKS_MAX = 1 << 17  # of a file of 64 MiB, where encoders write 8 KiB of data in each
TEXT_BYTES_MAX = 1 << 20  # of a text in which an orientation is looked for; Pillow's own limit

# What decides about pixels: transparency, the orientation, frames that move. Others are left out.
_NEEDED = frozenset({b"tRNS", b"eXIf", b"acTL", b"fcTL", b"fdAT"})
_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
_WITH_ORIENTATION = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_ANCILLARY = 0x20  # of the first letter


def pixels_only(data: bytes) -> tuple[bytes, list[str]]:
    """Return a PNG without the chunks that do not decide about its pixels, and without damaged ones
    that a decoder may pass over, as libpng does; and a note on the latter, one for each type.
    Raises TooMuch.
    """
    saved: list[memoryview] = []
    damaged: Counter[bytes] = Counter()
    view, position, start = memoryview(data), SIGNATURE, 0
    for _ in range(CHUNKS_MAX):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if end > len(data) or len(kind) < 4 or kind == b"IEND":
            break
        if kind[0] & _ANCILLARY and not _is_needed(kind, view[position + 4 : end], damaged):
            saved.append(view[start:position])
            start = end
        position = end
    else:
        raise TooMuch(f"more than {CHUNKS_MAX:,} chunks")
    notes = [_note(kind, count) for kind, count in damaged.items()]
    if not start:
        return data, notes
    return b"".join([*saved, view[start:]]), notes


def _note(kind: bytes, count: int) -> str:
    parts = "a damaged part" if count == 1 else f"{count:,} damaged parts"
    return f"{parts} of the PNG ({kind.decode()}) {'was' if count == 1 else 'were'} left out"


def _is_needed(kind: bytes, chunk: memoryview, damaged: Counter[bytes]) -> bool:
    """`chunk`: from its type to its checksum. One that is damaged is counted."""
    if kind in _TEXTS:
        return _may_have_orientation(kind, bytes(chunk[4:-4])) and _is_whole(chunk)
    if kind not in _NEEDED:
        return False
    if not _is_whole(chunk):
        damaged[kind] += 1
        return False
    return True


def _is_whole(chunk: memoryview) -> bool:
    return zlib.crc32(chunk[:-4]) == int.from_bytes(chunk[-4:], "big")


def _may_have_orientation(kind: bytes, body: bytes) -> bool:
    """ImageMagick writes EXIF, and Adobe XMP, as texts."""
    if not body.startswith(_WITH_ORIENTATION):
        return False
    text, packed = body.partition(b"\0")[2], kind == b"zTXt"
    if kind == b"iTXt":  # whether it is packed and how, a language, a translated keyword, the text
        packed, text = text[:1] == b"\1", text[2:].split(b"\0", 2)[-1]
    if not packed:
        return len(text) <= TEXT_BYTES_MAX
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(text[kind == b"zTXt" :], TEXT_BYTES_MAX)
    except zlib.error:
        return False
    return unpacker.eof
