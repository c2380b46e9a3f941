"""Heads and bodies made to take time while they are read: they are, in the loop that everybody waits
for.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from waitress.adjustments import Adjustments

from mtmd.web.connections.body_budget import BodyBudget
from mtmd.web.connections.parser import HEADERS, Parser

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LONG = 32_000  # of a head, which may have 32 KiB
HEADS = {
    "blanks before what is no value": (GET + b"X:" + b" " * LONG + b"\x01\r\n\r\n", 400),
    "blanks before a value": (GET + b"X:" + b" \t" * (LONG // 2) + b"a\r\n\r\n", None),
    "blanks of several headers": (
        GET + b"".join(b"X:" + b" " * 8000 + b"\0\r\n" for _ in "abc") + b"\r\n",
        400,
    ),
    "no address": (b"GET x://" + b"a" * LONG + b" x\r\n\r\n", 400),
    "folded": (GET + b"X:\r\n" + b" " * LONG + b"a\r\n\r\n", 400),
    "folded often": (GET + b"X: a\r\n" + b" \r\n" * (LONG // 3) + b"\r\n", 431),
    "many": (GET + b"X:a\r\n" * (LONG // 5) + b"\r\n", 431),
}


def parser() -> Parser:
    rules = SimpleNamespace(
        who=lambda _: "",
        route=lambda *_: (1 << 30, None),
        bodies=BodyBudget(1 << 30),
        draining=False,
    )
    return Parser(rules, Adjustments(max_request_header_size=32 << 10))


def seconds(data: bytes, piece: int = 8192) -> tuple[float, Parser]:
    """Of processor time, to read it as it comes."""
    made, start = parser(), time.thread_time()
    while data and not made.completed:
        data = data[made.received(data[:piece]) :]
    return time.thread_time() - start, made


@pytest.mark.parametrize("head, status", HEADS.values(), ids=HEADS)
def test_no_head_takes_long(head: bytes, status: int | None) -> None:
    """No longer than a thousand usual ones; some took ten thousand times as long as one."""
    usual = sum(seconds(GET + b"X: " + b"a" * 1000 + b"\r\n\r\n")[0] for _ in range(1000))
    took, found = seconds(head)
    assert found.completed and took < usual
    assert (found.error and found.error.code) == status


def test_what_heads_have_is_read() -> None:
    lines = [b"A:b", b"C:  d: e  ", b"C:\tf", b"D: ", *(b"X%d: y" % n for n in range(HEADERS - 5))]
    _, found = seconds(b"GET /a?b=c HTTP/1.1\r\n" + b"\r\n".join([*lines, b"", b""]))
    assert found.error is None and found.path == "/a" and found.query == "b=c"
    known = [found.headers[name] for name in ("A", "C", "D")]
    assert known == ["b", "d: e, f", ""] and len(found.headers) == HEADERS - 2
