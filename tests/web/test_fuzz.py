"""Requests made up from our own OpenAPI document, and a list of hostile ones: no 500, no hang,
nothing of the inside in a body.

MTMD_FUZZ_EXAMPLES sets how many requests are made up for each operation, MTMD_FUZZ_MODEL=demo has
the demo model answer them.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import socket
import struct
import zlib

import pytest
import schemathesis
from fake_service import FakeService
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import data_url, image_part, png, running, user

from mtmd.web.app import create_app
from mtmd.web.interfaces.openapi import document
from mtmd.web.settings import ServerSettings

EXAMPLES = int(os.environ.get("MTMD_FUZZ_EXAMPLES", "4"))
INSIDE = re.compile(
    r"Traceback|File \"|/work/|/home/|/root/|/usr/|/tmp/|site-packages|0x[0-9a-f]{6,}|\.py\b|PIL\.|Errno|werkzeug|pydantic"
)
CHECKED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ALLOWED = {200, 400, 401, 403, 404, 405, 413, 415, 429}


def service():
    if os.environ.get("MTMD_FUZZ_MODEL") != "demo":
        return FakeService()
    from mtmd import load
    from mtmd.service.service import Service

    return Service(load(threads=1))


@pytest.fixture(scope="module")
def app():
    made = service()
    yield create_app(made, ServerSettings(upload_bytes=1 << 16))
    made.close()


DOCUMENT = schemathesis.openapi.from_dict(document())
OPERATIONS = {result.ok().label: result.ok() for result in DOCUMENT.get_all_operations()}


@pytest.mark.parametrize(
    "mode, operation",
    [
        *((GenerationMode.POSITIVE, operation) for operation in OPERATIONS),
        *(
            (GenerationMode.NEGATIVE, operation)
            for operation in OPERATIONS
            if operation.startswith("POST")
        ),
    ],
)
def test_made_up_requests(app, mode, operation):
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[operation].as_strategy(generation_mode=mode))
    def ask(case):
        result = case.call(app=app)
        case.validate_response(result, checks=CHECKED)
        assert result.status_code in ALLOWED
        check_body(result.content, result.status_code)

    ask()


def check_body(body, status):
    text = body.decode("utf-8", "replace")
    if status >= 400:
        assert len(text) < 2000 and not INSIDE.search(text), text[:300]


def polyglots():
    picture = png(6, 6)
    yield b"GIF89a/*" + picture
    yield picture + b"PK\x03\x04" + bytes(40)
    yield b"%PDF-1.4\n" + picture
    yield b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://10.0.0.1/'/></svg>"
    yield b"\xff\xd8\xff\xe0" + picture
    yield b"RIFF\xff\xff\xff\xffWEBPVP8X" + bytes(4) + b"\xff" * 10
    yield b"BM" + bytes(60)
    yield b"II*\x00\x08\x00\x00\x00" + b"\xff" * 50
    yield b"\x00\x00\x01\x00" + picture


def bombs():
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    def whole(width, height, depth, mode, rows, *more):
        head = struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", head)
            + b"".join(more)
            + chunk(b"IDAT", zlib.compress(rows))
            + chunk(b"IEND", b"")
        )

    yield whole(60_000, 60_000, 1, 0, b"\0")
    yield whole(20_000, 20_000, 16, 6, bytes(1 << 20))
    yield whole(
        4, 4, 8, 2, b"\0" * 13 * 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 << 20)))
    )
    yield whole(
        4, 4, 8, 2, b"\0" * 13 * 4, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(200 << 20)))
    )
    yield b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20)
    yield b"BM" + struct.pack(
        "<IHHIIiiHHIIiiII", 60, 0, 0, 54, 40, 100_000, 100_000, 1, 24, 0, 0, 1, 1, 0, 0
    )
    yield b"RIFF\x1a\x00\x00\x00WEBPVP8L\x0d\x00\x00\x00\x2f" + b"\xff" * 13


def hostile():
    """(what, body) pairs for the chat route."""
    picture = data_url(png())
    for i, data in enumerate(itertools.chain(polyglots(), bombs())):
        yield f"file {i}", {"messages": [user("hi", image_part(data_url(data)))]}
    for kind in (
        "text/html",
        "image/svg+xml",
        "application/x-php",
        "image/png;charset=utf-8",
        "",
        "a" * 1000,
    ):
        yield f"type {kind[:20]}", {"messages": [user("hi", image_part(data_url(png(), kind)))]}
    yield "10,000 pictures", {"messages": [user("hi", *[image_part(picture)] * 10_000)]}
    yield (
        "10,000 addresses",
        {"messages": [user("hi", *[image_part("http://10.0.0.1/x")] * 10_000)]},
    )
    yield "10,000 messages", {"messages": [user("hi")] * 10_000}
    yield "as many as may be", {"messages": [user("hi", *[image_part(picture)] * 32)]}
    for url in (
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "file:///etc/passwd",
        "file:///proc/self/environ",
        "../../etc/passwd",
        "file-../../etc/passwd",
        "gopher://127.0.0.1:11211/_stats",
        "\\\\server\\share",
        "http://localhost:22/",
    ):
        yield url, {"messages": [user("hi", image_part(url))]}
    deep = "x"
    for _ in range(150):
        deep = [deep]
    yield "nested", {"messages": [user("hi")], "metadata": deep, "tools": deep}
    yield (
        "nested schema",
        {
            "messages": [user("hi")],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"a": deep}},
            },
        },
    )
    yield (
        "special tokens",
        {
            "messages": [
                user("<start_of_image><|image|><image_soft_token></s><|im_end|>{{7*7}}{% for %}")
            ]
        },
    )
    yield "odd text", {"messages": [user("\0\x1b[2J\u202e\ufeff\U0010ffff" * 10)]}
    yield "odd stops", {"messages": [user("hi")], "stop": ["\0", "\n", " ", "\ufffd"]}
    for field, value in (
        ("max_tokens", 1 << 20),
        ("seed", (1 << 63) - 1),
        ("seed", 1 << 64),
        ("temperature", 1e308),
        ("top_p", 5e-324),
        ("n", [[]]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", "../../etc/passwd"),
        ("user", {"$ne": 1}),
        ("__proto__", {"x": 1}),
    ):
        yield f"{field} {value}", {"messages": [user("hi")], field: value}


def test_hostile_requests_fail_alone(app):
    client, codes = app.test_client(), {}
    for what, body in hostile():
        for stream in (False, True):
            result = client.post(
                "/v1/chat/completions",
                json={"max_tokens": 3, **body, "stream": body.get("stream", stream)},
            )
            assert result.status_code in ALLOWED, what
            check_body(result.data, result.status_code)
            codes[what] = result.status_code
        result = client.post("/v1/chat/completions/input_tokens", json=body)
        assert result.status_code in ALLOWED, what
        check_body(result.data, result.status_code)
    assert (
        codes["10,000 pictures"] == codes["10,000 addresses"] == 413
        and codes["as many as may be"] == 200
    )
    assert all(
        code == 400
        for what, code in codes.items()
        if what.startswith(("http", "file:", "gopher", "\\\\"))
    )
    assert client.get("/health").status_code == 200


def test_hostile_uploads_fail_alone(app):
    client = app.test_client()
    for data in itertools.chain(polyglots(), bombs()):
        for name in ("../../../etc/cron.d/x", "a\r\nSet-Cookie: x=1", "\0", "x" * 5000, ""):
            result = client.post(
                "/v1/files", data={"purpose": "vision", "file": (io.BytesIO(data), name)}
            )
            assert result.status_code in ALLOWED and "Set-Cookie" not in result.headers
            check_body(result.data, result.status_code)
    parts = {f"f{i}": (io.BytesIO(b"x"), "x") for i in range(200)}
    assert client.post("/v1/files", data={"purpose": "vision", **parts}).status_code == 413
    assert (
        client.post(
            "/v1/files", data={"purpose": "x" * (140 << 10), "file": (io.BytesIO(png()), "x")}
        ).status_code
        == 413
    )


def test_damaged_requests_fail_alone(app):
    """Valid requests with bytes changed, cut or doubled."""
    client, chance = app.test_client(), random.Random(7)
    valid = json.dumps(
        {"messages": [user("hi", image_part(data_url(png())))], "max_tokens": 3, "stop": ["x"]}
    ).encode()
    for _ in range(120 * EXAMPLES):
        data = bytearray(valid)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            data[at : at + chance.choice((0, 1, 1, 5))] = chance.choice(
                (
                    b"",
                    bytes([chance.randrange(256)]),
                    b'"',
                    b"{",
                    b"[",
                    b"\\",
                    b"1e9",
                    data[at : at + 20],
                )
            )
        result = client.post(
            "/v1/chat/completions", data=bytes(data), content_type="application/json"
        )
        assert result.status_code in ALLOWED
        check_body(result.data, result.status_code)


LINE = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = '{"messages": [{"role": "user", "content": "hi"}]}'
TRICKS = {
    "two lengths": f"{LINE}Content-Length: {len(BODY)}\r\nContent-Length: 5\r\n\r\n{BODY}",
    "length and chunked": f"{LINE}Content-Length: {len(BODY)}\r\nTransfer-Encoding: "
    "chunked\r\n\r\n0\r\n\r\nGET /v1/files HTTP/1.1\r\n\r\n",
    "odd chunked": f"{LINE}Transfer-Encoding: xchunked\r\n\r\n{BODY}",
    "chunk size": f"{LINE}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{BODY}",
    "negative length": f"{LINE}Content-Length: -1\r\n\r\n{BODY}",
    "words as length": f"{LINE}Content-Length: ten\r\n\r\n{BODY}",
    "huge length": f"{LINE}Content-Length: 99999999999999999999\r\n\r\n{BODY}",
    "folded header": f"{LINE}X-A: b\r\n c\r\n\r\n",
    "no colon": f"{LINE}nonsense\r\n\r\n",
    "space before colon": f"{LINE}Content-Length : 5\r\n\r\nhello",
    "null in header": f"{LINE}X-A: \0\r\n\r\n",
    "no host": "GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "absolute": "GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "huge header": f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: {'a' * 300_000}\r\n\r\n",
    "many headers": "GET /health HTTP/1.1\r\nHost: localhost\r\n" + "X-A: b\r\n" * 50_000 + "\r\n",
    "long path": f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path traversal": "GET /static/../../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "encoded traversal": "GET /static/%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "null in path": "GET /v1/files/%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "not utf-8": "GET /v1/models/%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "method": "BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no http": "hello\r\n\r\n",
    "version": "GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "tls": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "forwarded": "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: "
    "localhost\r\nForwarded: host=localhost\r\n\r\n",
    "split": "GET /health?x=%0d%0aSet-Cookie:%20a=b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "override": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-HTTP-Method-Override: "
    "DELETE\r\n\r\n",
}


@pytest.fixture(scope="module")
def server():
    with running(FakeService()) as made:
        yield made


@pytest.mark.parametrize("what", TRICKS)
def test_tricks_with_headers_fail_alone(server, what):
    waits = what == "chunk size"
    head, body = answer(server, TRICKS[what].encode("latin-1"), waits)
    status = 400 if waits else int(head.split()[1])
    assert status in ALLOWED | {414, 431, 501} and "Set-Cookie" not in head, head
    check_body(body, status)
    assert waits or status == 200 or json.loads(body)["error"]["message"]
    if what in ("two hosts", "absolute", "forwarded", "no host"):
        assert status in (400, 403)
    assert answer(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0].startswith(
        "HTTP/1.1 200"
    )


def answer(server, data, waits=False):
    """Head and body of the response; the server closes the connection after it. `waits`: it waits
    for more, which does not come.
    """
    with socket.create_connection((server.host, server.port), timeout=20) as sock:
        try:
            sock.sendall(data.replace(b"Host:", b"Connection: close\r\nHost:", 1))
            if waits:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was refused before all of it was sent
        received = b""
        try:
            while chunk := sock.recv(1 << 16):
                received += chunk
        except ConnectionResetError:
            pass
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode("latin-1"), body
