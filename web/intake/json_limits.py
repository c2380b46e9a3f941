"""Describes what JSON would make once it is read, found out before it is: in time linear in its
length, and without building anything of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from mtmd.web.errors import ApiError
from mtmd.web.settings import JsonLimits

# begins a picture in base64: the first bytes of its file, as PNG, JPEG (with a slash that may be
# escaped), GIF, WebP, BMP and TIFF have them
BASE64 = (
    b"iVBORw0KGgo", b"/9j/", b"\\/9j\\/", b"R0lGOD", b"UklGR", b"Qk", b"SUkqA", b"TU0AK"
)  # fmt: skip
PICTURES = (b"data:", *BASE64)  # begins one that comes along
PIECE = 16 << 10  # bytes; what works on one keeps the interpreter to itself meanwhile
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_json(data: bytes, limits: JsonLimits, escapes: int = 0) -> None:
    """Raises ApiError (413, 400 for depth) for a body that is over a limit, for the first that it
    comes to. One that is no JSON may pass. `escapes`: backslashes of pictures that are not in it
    any more.
    """
    alongside = values = depth = 0
    is_text = is_picture = False  # what goes on where a piece begins
    for start, piece in _pieces(data):
        parts = _without_escapes(piece).split(b'"')
        texts, outside = parts[not is_text :: 2], b"".join(parts[is_text::2])
        begun = texts[is_text:]
        alongside += len(piece) - sum(len(text) for text in begun if text.startswith(PICTURES))
        if is_text and is_picture:
            alongside -= len(texts[0])
        is_text ^= len(parts) % 2 == 0
        if is_text and begun:  # the last goes on, and may not show yet what it is
            is_picture = data.startswith(PICTURES, start + len(piece) - len(begun[-1]))
            if is_picture and not begun[-1].startswith(PICTURES):
                alongside -= len(begun[-1])
        escapes += piece.count(b"\\")
        if max(alongside, escapes) > limits.bytes:
            raise _too_large(f"{limits.bytes:,} bytes beside pictures in base64")
        brackets = outside.translate(None, _NO_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        if depth + opened > limits.deep:
            steps = accumulate(map(_STEPS.__getitem__, brackets), initial=depth)
            if max(steps) > limits.deep:
                raise ApiError(
                    400,
                    f"found more than {limits.deep} lists and objects in one another, the most "
                    "that a request may have",
                )
        depth += 2 * opened - len(brackets)
        values += len(begun) + outside.count(b",") + opened
        if values > limits.values:
            raise _too_large(f"{limits.values:,} names and values")


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Each with where it begins. Escapes are not cut in two."""
    start = 0
    while start < len(data):
        piece = data[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = data[start : start + PIECE + 1]
        yield start, piece
        start += len(piece)


def _without_escapes(piece: bytes) -> bytes:
    """Return the without escapes of the same length, with no quotation marks but those that begin
    or end a text. A run of backslashes begins an escape, so pairs are found from the left.
    """
    if b"\\" not in piece or b'\\"' not in piece:  # to look for one byte takes a tenth
        return piece
    return piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")


def _too_large(what: str) -> ApiError:
    return ApiError(
        413, f"found more than {what}, the maximum for a request", code="body_too_large"
    )
