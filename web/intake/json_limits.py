"""What JSON would make once it is read, found out before it is: in time linear in its length, and
without building anything of it.
"""

from __future__ import annotations

from itertools import accumulate

from mtmd.web.errors import ApiError
from mtmd.web.settings import JsonLimits

# begins a picture that comes along: its URL, or, in base64, the first bytes of its file, as PNG,
# JPEG (with a slash that may be escaped), GIF, WebP, BMP and TIFF have them
PICTURES = (
    b"data:", b"iVBORw0KGgo", b"/9j/", b"\\/9j\\/", b"R0lGOD", b"UklGR", b"Qk", b"SUkqA", b"TU0AK"
)  # fmt: skip
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def check_json(data: bytes, limits: JsonLimits, escapes: int = 0) -> None:
    """Raises ApiError (413, 400 for depth) for a body that is over a limit. One that is no JSON may
    pass. `escapes`: backslashes of pictures that are not in it any more.
    """
    words = f"{limits.bytes:,} bytes beside pictures in base64"
    if data.count(b"\\") + escapes > limits.bytes or (
        len(data) > limits.bytes and not any(b'"' + begin in data for begin in PICTURES)
    ):
        raise _too_large(words)
    plain = _without_escapes(data)
    values = f"{limits.values:,} names and values"
    if plain.count(b'"') > 2 * limits.values:
        raise _too_large(values)
    parts = plain.split(b'"')
    texts, outside = parts[1::2], b"".join(parts[::2])
    if len(data) - sum(len(t) for t in texts if t.startswith(PICTURES)) > limits.bytes:
        raise _too_large(words)
    brackets = outside.translate(None, _NO_BRACKETS)
    first = brackets[: 2 * limits.values]
    if max(accumulate(map(_STEPS.__getitem__, first)), default=0) > limits.deep:
        raise ApiError(
            400,
            f"found more than {limits.deep} lists and objects in one another, the most that a "
            "request may have",
        )
    opened = brackets.count(b"[") + brackets.count(b"{")
    if len(texts) + outside.count(b",") + opened > limits.values:
        raise _too_large(values)


def _without_escapes(data: bytes) -> bytes:
    """JSON of the same length with no quotation marks but those that begin or end a text. A run of
    backslashes begins an escape, so pairs are found from the left.
    """
    if b"\\" not in data:
        return data
    return data.replace(b"\\\\", b"..").replace(b'\\"', b"..")


def _too_large(what: str) -> ApiError:
    return ApiError(
        413, f"found more than {what}, the most that a request may have", code="body_too_large"
    )
