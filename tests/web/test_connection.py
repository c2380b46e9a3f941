"""Heads and bodies as they come over a connection: those made to take time while they are read, and
usual ones.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress

import pytest
from fake_service import FakeService
from serving import running

from mtmd.web.connection import CHUNKED, HEADERS

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
LONG = 32_000  # of a head, which may have 32 KiB
HEADS = {
    "blanks before what is no value": (GET + b"X:" + b" " * LONG + b"\x01\r\n\r\n", 400),
    "blanks before a value": (GET + b"X:" + b" \t" * (LONG // 2) + b"a\r\n\r\n", 400),
    "blanks within a value": (GET + b"Accept: a=" + b" " * LONG + b"x\r\n\r\n", 400),
    "some blanks": (GET + (b"X:" + b" " * 63 + b"a\r\n") * 90 + b"\r\n", 200),
    "folded": (GET + b"X:\r\n" + b" " * 60 + b"a\r\n\r\n", 400),
    "a line that goes on": (GET + b"X: a\rb\r\n\r\n", 400),
    "no address": (b"GET x://" + b"a" * 8000 + b" x\r\n\r\n", 400),
    "a long address": (b"GET /" + b"a" * LONG + b" HTTP/1.1\r\n\r\n", 414),
    "a long header": (GET + b"X: " + b"a" * (40 << 10) + b"\r\n\r\n", 431),
    "many headers": (GET + b"X:a\r\n" * (HEADERS + 1) + b"\r\n", 431),
    "a number of digits": (GET + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a length with a sign": (GET + b"Content-Length: +3\r\n\r\nabc", 400),
    "two lengths": (GET + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    "another encoding": (GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "a length of no digits": (GET + b"Content-Length: \r\n\r\n", 400),
    "a length said twice": (GET + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a length and chunks": (
        GET + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        400,
    ),
    "a length after a blank": (GET + b"Content-Length : 3\r\n\r\nabc", 400),
    "a length after a line of one word": (GET + b"word\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a length after the line of a mailbox": (
        b"GET /version HTTP/1.1\r\nFrom me\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        400,
    ),
    "a header without a name": (GET + b": 3\r\n\r\n", 400),
    "a version that is no number": (b"GET /version HTTP/1.x\r\n\r\n", 400),
    "another protocol": (
        b"GET /version HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        200,
    ),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"Host: localhost\r\n\r\n", 400),
    "no host, of old": (b"GET /version HTTP/1.0\r\n\r\n", 200),
    "a whole address": (GET.replace(b"/version", b"http://localhost/version") + b"\r\n", 200),
    "another host's whole address": (
        GET.replace(b"/version", b"http://evil.example/version") + b"\r\n",
        403,
    ),
    "no method": (b"\x16\x03\x01\x02\r\n\r\n", 400),
}
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)
CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = {
    "small": b"1\r\nx\r\n",
    "with words around them": b"8;" + b"a" * 100 + b"\r\n12345678\r\n",
    "what follows without end": b"0\r\n" + b"a: b\r\n" * 10_000,
}


@pytest.fixture(scope="module")
def server():
    with running(FakeService()) as running_server:
        yield running_server


def exchange(server, data):
    """(status, body) of the answer to it."""
    with socket.create_connection((server.host, server.port), timeout=30) as sock:
        with suppress(ConnectionError):  # it is refused while it comes
            sock.sendall(data)
        received = b""
        try:
            while piece := sock.recv(1 << 16):
                received += piece
        except ConnectionResetError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize("head, status", HEADS.values(), ids=HEADS)
def test_no_head_takes_long(server, head, status):
    """What would, is refused before it is read."""
    result, body = exchange(server, head)
    assert result == status and json.loads(body)


@pytest.mark.parametrize("part", MANY.values(), ids=MANY)
def test_chunks_have_more_in_them_than_around_them(server, part):
    result, body = exchange(server, CHUNKS + part * (1 + (8 * CHUNKED) // len(part)))
    assert result == 400 and b"chunks" in body and not server.bodies.stored


@pytest.mark.parametrize("size", [1, 7, 8192])
def test_usual_chunks_are_read(server, size):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode().ljust(2000)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    result, reported = exchange(server, CHUNKS + data + b"0\r\nA: b\r\n\r\n")
    assert result == 200 and json.loads(reported)["choices"]


def test_chunks_that_are_damaged_are_refused(server):
    assert exchange(server, CHUNKS + b"xyz\r\nabc\r\n")[0] == 400


def test_a_client_that_waits_is_asked_for_its_body(server):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((server.host, server.port), timeout=30) as sock:
        sock.sendall(head)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_refused_is_not_asked_for(server):
    head = POST + b"Expect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
    assert exchange(server, head)[0] == 413
