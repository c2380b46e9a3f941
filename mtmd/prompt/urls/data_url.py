"""Data URLs of RFC 2397, base64 only. The media type that one claims does not matter: the first
bytes decide. Loads without numpy.
"""

from __future__ import annotations

import base64

from mtmd.kernels.errors import ImageError

URL_BYTES_MAX = 64 << 20  # of what a URL holds or leads to, as of a request to the server
PIECE = 1 << 18  # characters; what decodes one keeps the interpreter to itself meanwhile
_LINE_BREAKS = {10: None, 13: None}


def base64_of(url: str) -> str:
    """What stands after "base64,". Raises ValueError for a URL of another form."""
    head, comma, encoded = url.partition(",")
    if not comma or head[-7:].lower() != ";base64":
        raise ValueError("not of the form data:TYPE;base64,...")
    return encoded


def byte_count(encoded: str) -> int:
    """The most bytes that it may hold, known before it is decoded."""
    return len(encoded) * 3 // 4


def decoded(encoded: str) -> bytes:
    """Raises ValueError for what is not base64; line breaks may stand in it."""
    plain = encoded.translate(_LINE_BREAKS) if "\n" in encoded else encoded
    padding = plain.find("=")
    if 0 <= padding < len(plain) - 2:
        raise ValueError("not base64")
    try:
        pieces = (plain[start : start + PIECE] for start in range(0, len(plain), PIECE))
        return b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
    except ValueError as error:  # what is not ASCII, too
        raise ValueError("not base64") from error


def read_data_url(url: str, max_bytes: int, name: str) -> bytes:
    """Raises ImageError, which calls it `name`, for one of another form or of more bytes."""
    try:
        encoded = base64_of(url)
        if byte_count(encoded) <= max_bytes:
            return decoded(encoded)
    except ValueError as error:
        raise ImageError(
            f"{name}: found a data URL that is {error}, expected data:image/png;base64,... with "
            "the whole file"
        ) from None
    raise ImageError(
        f"{name}: found a data URL of some {byte_count(encoded):,} bytes, expected at most "
        f"{max_bytes:,}; scale the picture down, or give a path"
    )
