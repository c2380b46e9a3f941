"""What is sent to a server on one connection, and requests to make it of."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Generator = Callable[[random.Random, str], "Attempt"]
"""Makes an attempt out of chance and the attacker's key. The same chance makes the same."""


@dataclass(frozen=True)
class Attempt:
    """`whole`: it is a request that has to be answered; of others it is enough that their
    connection ends. `leaves`: its client closes the connection at once.
    """

    what: str
    data: bytes
    whole: bool = True
    leaves: bool = False


def request(
    method: str,
    path: str,
    body: bytes = b"",
    kind: str = "application/json",
    key: str = "",
    headers: dict[str, str] | None = None,
) -> bytes:
    """A request that is right in its form, whatever the parts of it are."""
    lines = {"Host": "localhost", "Connection": "close"}
    if key:
        lines["Authorization"] = f"Bearer {key}"
    if body or method in ("POST", "PUT", "PATCH"):
        lines |= {"Content-Type": kind, "Content-Length": str(len(body))}
    lines |= headers or {}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return head.encode("utf-8", "surrogateescape") + b"\r\n" + body


def post(path: str, body: Any, key: str) -> bytes:
    return request("POST", path, json.dumps(body).encode(), key=key)


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    """The body of a question that is answered in a few tokens."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def picture_part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def damaged(data: bytes, rng: random.Random, maximum: int = 6) -> bytes:
    """With bytes changed, cut out, put in or doubled, or its end gone."""
    out = bytearray(data)
    for _ in range(rng.randint(1, maximum)):
        at = rng.randrange(len(out) + 1)
        length = rng.choice((1, 1, 2, 4, 16))
        how = rng.randrange(6)
        if how == 0:
            out[at : at + length] = rng.randbytes(length)
        elif how == 1:
            out[at : at + length] = b""
        elif how == 2:
            out[at:at] = rng.randbytes(length)
        elif how == 3:
            out[at:at] = out[at : at + 64]
        elif how == 4:
            out[at : at + length] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * length
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)
