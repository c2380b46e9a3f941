"""Heads and bodies made to take time while they are read: they are, in the loop that everybody waits
for.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from waitress.adjustments import Adjustments

from mtmd.web.bodies.body_budget import BodyBudget
from mtmd.web.connections.parser import CHUNKED, HEADERS, Parser

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LONG = 32_000  # of a head, which may have 32 KiB
HEADS = {
    "blanks before what is no value": (GET + b"X:" + b" " * LONG + b"\x01\r\n\r\n", 400),
    "blanks before a value": (GET + b"X:" + b" \t" * (LONG // 2) + b"a\r\n\r\n", 400),
    "blanks within a value": (GET + b"Accept: a=" + b" " * LONG + b"x\r\n\r\n", 400),
    "some blanks before many": (GET + (b"X:" + b" " * 63 + b"a\r\n") * 250 + b"\r\n", None),
    "blanks of several headers": (
        GET + b"".join(b"X:" + b" " * 8000 + b"\0\r\n" for _ in "abc") + b"\r\n",
        400,
    ),
    "no address": (b"GET x://" + b"a" * LONG + b" x\r\n\r\n", 400),
    "folded": (GET + b"X:\r\n" + b" " * LONG + b"a\r\n\r\n", 400),
    "folded often": (GET + b"X: a\r\n" + b" \r\n" * (LONG // 3) + b"\r\n", 431),
    "an address that is none": (GET.replace(b"/health", b"a://[[") + b"\r\n", 400),
    "a number of digits": (GET + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
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


CHUNKS = GET.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = {
    "small": b"1\r\nx\r\n",
    "with words beside them": b"8;" + b"a" * 100 + b"\r\n12345678\r\n",
    "a line without end": b"1;aaa" * 10,
    "what follows without end": b"0\r\n" + b"a: b\r\n" * 10_000,
}


@pytest.mark.parametrize("part", MANY.values(), ids=MANY)
def test_chunks_have_more_in_them_than_beside_them(part: bytes) -> None:
    data = CHUNKS + part * (1 + (4 * CHUNKED) // len(part))
    _, found = seconds(data)
    assert found.error and found.error.code == 400 and found.body_bytes_received < 2 * CHUNKED


@pytest.mark.parametrize("size, count", [(1, 3000), (16, 20_000), (8192, 100)])
def test_usual_chunks_are_read(size: int, count: int) -> None:
    data = (b"%x\r\n" % size + b"x" * size + b"\r\n") * count + b"0\r\nA: b\r\n\r\n"
    _, found = seconds(CHUNKS + data)
    assert found.completed and found.error is None
    assert found.headers["CONTENT_LENGTH"] == str(size * count)
    found.close()
