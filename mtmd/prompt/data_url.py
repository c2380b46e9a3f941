"""Data URLs of RFC 2397, base64 only. The media type that one claims does not matter: the first
bytes decide. Loads without numpy.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

from mtmd.base.errors import ImageError

URL_BYTES_MAX = 64 << 20  # of what a URL holds or leads to, as of a request to the server
PIECE = 1 << 18  # characters; what decodes one keeps the interpreter to itself meanwhile
_LINE_BREAKS = b"\r\n"
_STANDARD = bytes.maketrans(b"-_", b"+/")  # of the alphabet for URLs and file names, RFC 4648
_ESCAPES = [
    (f"%{digits}", character)
    for character in "+/=\r\n"
    for digits in {f"{ord(character):02X}", f"{ord(character):02x}"}
]


def base64_of(url: str) -> str:
    """Return what stands after "base64,". Raises ValueError for a URL of another form."""
    head, comma, encoded = url.partition(",")
    if not comma or head[-7:].lower() != ";base64":
        raise ValueError("not of the form data:TYPE;base64,...")
    return encoded


def data_url(data: bytes, kind: str) -> str:
    """Return the data url of the media type `kind`."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def byte_count(characters: int) -> int:
    """The most bytes that so many characters may hold, known before they are decoded."""
    return characters * 3 // 4


def decoded(encoded: str) -> bytes:
    """Return the decoded of either alphabet of RFC 4648, with padding or without; line breaks may
    stand in it, and what URLs escape of all this. Raises ValueError for what is not base64.
    """
    if "%" in encoded:
        for escape, character in _ESCAPES:
            encoded = encoded.replace(escape, character)
    pieces = (encoded[start : start + PIECE] for start in range(0, len(encoded), PIECE))
    try:
        plain = (piece.encode("ascii").translate(None, _LINE_BREAKS) for piece in pieces)
        return b"".join(decoded_pieces(plain))
    except ValueError as error:  # what is not ASCII, too
        raise ValueError("not base64") from error


def decoded_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what base64 without line breaks says that comes in pieces of any length, in either
    alphabet. At its end stand at most two "=", also where none is needed; all of them may be
    missing. Raises ValueError.
    """
    rest, padding = b"", 0
    for piece in filter(None, pieces):
        plain = piece.translate(_STANDARD).rstrip(b"=")
        if b"=" in plain or (plain and padding):
            raise ValueError("found more after the padding")
        padding += len(piece) - len(plain)
        if padding > 2:
            raise ValueError(f"found {padding} characters of padding, expected at most two")
        plain = rest + plain
        whole = len(plain) // 4 * 4
        yield base64.b64decode(plain[:whole], validate=True)
        rest = plain[whole:]
    if rest:
        yield base64.b64decode(rest + b"=" * (padding or -len(rest) % 4), validate=True)


def read_data_url(url: str, max_bytes: int, name: str) -> bytes:
    """Raises ImageError, which calls it `name`, for one of another form or of more bytes."""
    try:
        encoded = base64_of(url)
        if byte_count(len(encoded)) <= max_bytes:
            return decoded(encoded)
    except ValueError as error:
        raise ImageError(
            f"{name}: found a data URL that is {error}, expected data:image/png;base64,... with "
            "the whole file"
        ) from None
    raise ImageError(
        f"{name}: found a data URL of some {byte_count(len(encoded)):,} bytes, expected at most "
        f"{max_bytes:,}; scale the picture down, or give a path"
    )
