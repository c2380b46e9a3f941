"""What JSON would make once it is read, found out before it is: in time linear in its length, and
without building anything of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.web.errors import ApiError
from mtmd.web.settings import JsonLimits

_PICTURE = b"data:"  # begins the URL of a picture that comes along
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")


@dataclass(frozen=True)
class JsonSize:
    """`bytes` without data URLs; `values`: names, texts and what commas and brackets part; `deep`:
    lists and objects in one another, 0 where there are none.
    """

    bytes: int
    values: int
    deep: int


def check_json(data: bytes, limits: JsonLimits) -> None:
    """Raises ApiError (413, 400 for depth) for a body that is over a limit. One that is no JSON may
    pass.
    """
    if data.count(b"\\") > limits.bytes:
        raise _too_large("bytes of text", limits.bytes)
    if data.count(b'"') > 2 * limits.values:
        raise _too_large("names and values", limits.values)
    size = measure(data)
    if size.deep > limits.deep:
        raise ApiError(
            400,
            f"found more than {limits.deep} lists and objects in one another, the most that "
            "a request may have",
        )
    if size.bytes > limits.bytes:
        raise _too_large("bytes beside pictures as data URLs", limits.bytes)
    if size.values > limits.values:
        raise _too_large("names and values", limits.values)


def measure(data: bytes) -> JsonSize:
    """Of valid JSON. Costs memory for each quotation mark."""
    # No quotation mark is left but those that begin or end a text. A run of backslashes begins an
    # escape, so pairs are found from the left.
    plain = data.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in data else data
    parts = plain.split(b'"')
    texts, outside = parts[1::2], b"".join(parts[::2])
    pictures = sum(len(text) for text in texts if text.startswith(_PICTURE))
    brackets = outside.translate(None, _NO_BRACKETS)
    opened = brackets.count(b"[") + brackets.count(b"{")
    return JsonSize(
        len(data) - pictures, len(texts) + outside.count(b",") + opened, _deepest(brackets)
    )


def _deepest(brackets: bytes) -> int:
    now = deepest = 0
    for bracket in brackets:
        if bracket in b"[{":
            now += 1
            deepest = max(deepest, now)
        else:
            now -= 1
    return deepest


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(
        413,
        f"found more than {most:,} {what}, the most that a request may have",
        code="body_too_large",
    )
