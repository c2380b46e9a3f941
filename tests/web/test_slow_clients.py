"""Clients that keep connections and give nothing for them, on real sockets: everybody else is
answered meanwhile, and each of them gets an end.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import struct
import time
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from fake_service import FakeService, until
from serving import raw_request, running, user

from mtmd import BusyError
from mtmd.web.answering import response_streams
from mtmd.web.app import create_app
from mtmd.web.settings import ConnectionLimits, ServerSettings

KEY = "a-long-enough-key"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
MANY = 300


def limits(**chosen):
    return ConnectionLimits(**{"head_s": 300, "body_s": 300, "idle_s": 300, **chosen})


def connect(server, data=b""):
    sock = socket.create_connection((server.host, server.port), timeout=30)
    sock.sendall(data)
    return sock


def crowd(stack, server, data, count=MANY):
    return [stack.enter_context(connect(server, data)) for _ in range(count)]


def response(sock):
    """(status, body) of what comes until the connection is closed."""
    received = b""
    try:
        while chunk := sock.recv(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    head, _, body = received.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


def healthy(sock):
    """Whether the answer of /health comes, whole."""
    received = b""
    while not received.endswith(b"}\n") and (chunk := sock.recv(4096)):
        received += chunk
    return received.startswith(b"HTTP/1.1 200")


def health(server):
    with urllib.request.urlopen(f"{server.url}/health", timeout=30) as result:
        return result.status


SLOW = {
    "idle": b"",
    "head": HEAD,
    "body": HEAD + b"Content-Length: 1000\r\n\r\n{",
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\n{",
}


@pytest.mark.parametrize("kind", SLOW)
def test_clients_that_wait_take_nothing_from_others(kind):
    with running(FakeService(), connections=limits()) as server, ExitStack() as stack:
        crowd(stack, server, SLOW[kind])
        assert until(lambda: len(server.connections) == MANY)
        assert health(server) == 200
        with raw_request(server, {"messages": [user("hi")]}) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "kind, chosen",
    [("head", {"head_s": 0.5}), ("body", {"body_s": 0.5}), ("chunked", {"body_s": 0.5})],
)
def test_a_request_that_does_not_come_is_told_so(kind, chosen):
    with running(FakeService(), connections=limits(**chosen)) as server, ExitStack() as stack:
        socks = crowd(stack, server, SLOW[kind], 20)
        for sock in socks:
            status, body = response(sock)
            assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")
            sock.close()
        assert until(lambda: not server.connections)


def test_many_requests_that_come_together_are_all_answered():
    last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with running(FakeService()) as server, connect(server, HEALTH * 400 + last) as sock:
        received = b""
        while chunk := sock.recv(1 << 16):
            received += chunk
        assert received.count(b"HTTP/1.1 200") == 401
        assert until(lambda: not server.connections)


def test_a_byte_now_and_then_is_no_reason_to_wait_longer():
    with running(FakeService(), connections=limits(head_s=1)) as server, connect(server) as sock:
        sock.settimeout(0.1)
        received = b""
        for _ in range(300):
            try:
                sock.sendall(b"X")
                received += sock.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if b"too_slow" in received:
                break
        assert received.startswith(b"HTTP/1.1 408")


def test_a_body_that_comes_fast_enough_may_take_its_time():
    body = json.dumps({"messages": [user("x" * 4000)]}).encode()
    head = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode()
    with (
        running(FakeService(), connections=limits(body_s=0.5, body_rate=1000)) as server,
        connect(server, head) as sock,
    ):
        for start in range(0, len(body), 500):
            sock.sendall(body[start : start + 500])
            time.sleep(0.15)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_connection_that_nothing_comes_on_is_closed():
    with (
        running(FakeService(), connections=limits(idle_s=0.5)) as server,
        connect(server) as new,
        connect(server, HEALTH) as used,
    ):
        assert healthy(used)
        assert response(new) == response(used) == (0, b"")


def test_the_oldest_that_wait_make_room_for_those_that_come():
    with running(FakeService(), connections=limits(total=64)) as server, ExitStack() as stack:
        crowd(stack, server, HEAD)
        assert health(server) == 200
        assert len(server.connections) <= 65


def test_who_has_a_key_stays_when_room_is_made():
    with (
        running(FakeService(), api_keys=(KEY,), connections=limits(total=64)) as server,
        ExitStack() as stack,
    ):
        ask = HEALTH[:-2] + f"Authorization: Bearer {KEY}\r\n\r\n".encode()
        known = stack.enter_context(connect(server, ask))
        assert healthy(known)
        crowd(stack, server, HEAD)
        known.sendall(HEALTH)
        assert healthy(known)


def test_who_is_being_answered_stays_and_the_next_is_turned_away():
    service = FakeService(pace_s=60)
    with running(service, connections=limits(total=16), queue=30) as server, ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(raw_request(server, {"messages": [user("hi")], "stream": True}))
        assert until(lambda: len(service.tickets) == 16)
        status, body = response(stack.enter_context(connect(server)))
        assert (status, json.loads(body)["error"]["code"]) == (503, "server_busy")
        assert not service.ended


def test_one_address_has_so_many_connections(monkeypatch):
    monkeypatch.setattr("mtmd.web.server.is_here", lambda _: False)
    service = FakeService(pace_s=60)
    with (
        running(service, connections=limits(per_address=5), queue=30) as server,
        ExitStack() as stack,
    ):
        crowd(stack, server, HEAD, 20)
        assert until(lambda: len(server.connections) == 5)
        for _ in range(5):  # each in the place of one that waits
            stack.enter_context(raw_request(server, {"messages": [user("hi")], "stream": True}))
        assert until(lambda: len(service.tickets) == 5)
        status, body = response(stack.enter_context(connect(server)))
        assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_connections")


def test_bodies_that_stand_still_make_room_for_those_that_move():
    chosen = limits(body_bytes=1 << 20)
    with running(FakeService(), connections=chosen) as server, ExitStack() as stack:
        half = HEAD + b"Content-Length: 200000\r\n\r\n" + b" " * 100_000
        socks = crowd(stack, server, half, 10)
        assert until(lambda: server.bodies.stored == 1_000_000)
        for connection in server.connections:
            connection.began -= 10
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'.ljust(200_000)
        with connect(server, HEAD + b"Content-Length: 200000\r\n\r\n" + body) as sock:
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        reported = []
        for sock in socks:
            sock.settimeout(0.2)
            with suppress(TimeoutError):
                reported.append(response(sock)[0])
        assert reported and set(reported) <= {503, 0}
        stack.close()  # the server sees them leave before it is stopped
        assert until(lambda: server.bodies.stored == 0)


def test_a_body_there_is_no_room_for_is_told_so():
    with running(FakeService(), connections=limits(body_bytes=1000)) as server:
        with connect(server, HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 60000) as sock:
            status, body = response(sock)
        assert (status, json.loads(body)["error"]["code"]) == (503, "server_busy")


@pytest.mark.parametrize("framing", [b"Content-Length: 9000000", b"Transfer-Encoding: chunked"])
def test_a_body_longer_than_its_route_takes_is_refused_while_it_comes(framing):
    request = HEAD.replace(b"/v1/chat/completions", b"/v1/completions") + framing + b"\r\n\r\n"
    with running(FakeService()) as server, connect(server, request) as sock:
        if b"chunked" in framing:
            piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
            try:
                for _ in range(20):
                    sock.sendall(piece)
            except OSError:
                pass
        status, body = response(sock)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_is_given_up(stream):
    service = FakeService()
    service.words = " ".join(["x" * (1 << 20)] * 40)
    chosen = limits(unread_s=0.5)
    with running(service, connections=chosen) as server, ExitStack() as stack:
        body = {"messages": [user("hi")], "stream": stream, "max_tokens": 1 << 20}
        for _ in range(3):
            stack.enter_context(raw_request(server, body))
        assert until(lambda: len(service.tickets) == 3)
        assert health(server) == 200
        assert until(lambda: not server.connections, 30)
        assert stream is False or all(t.cancelled.is_set() for t in service.tickets)


def test_a_long_answer_waits_for_its_client():
    service = FakeService()
    service.words = "x" * (40 << 20)
    with running(service) as server, raw_request(server, {"messages": [user("hi")]}) as sock:
        assert until(lambda: any(c.phase == "answering" for c in server.connections))
        received = 0
        while received < 40 << 20:
            received += len(sock.recv(1 << 20))
        assert health(server) == 200


def test_clients_that_leave_write_nothing_to_the_log(caplog):
    service = FakeService(pace_s=0.01)
    service.words = "word " * 10_000
    body = {"messages": [user("hi")], "stream": True, "max_tokens": 10_000}
    with running(service) as server, caplog.at_level(logging.INFO):
        for _ in range(20):
            sock = raw_request(server, body)
            assert sock.recv(100)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()  # by a reset
        assert until(lambda: all(t.cancelled.is_set() for t in service.tickets))
        assert until(lambda: not server.connections)
    assert "Traceback" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_panic_below_is_answered_and_its_connection_closed(caplog):
    class Panic(BaseException):
        pass

    def panic(*_, **__):
        raise Panic("inside a library")

    service = FakeService()
    app = create_app(service, ServerSettings())
    with running(service, app) as server:
        answering, app.wsgi_app = app.wsgi_app, panic  # the application answers its own
        with raw_request(server, {"messages": [user("hi")]}) as sock:
            response(sock)
        assert until(lambda: not server.connections)
        app.wsgi_app = answering
        assert health(server) == 200
    assert "Panic" in caplog.text


def test_many_requests_of_clients_that_read_no_answer_keep_nobody_waiting():
    request = b"GET /static/chat/chat.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(FakeService(), connections=limits()) as server, ExitStack() as stack:
        socks = []
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.connect((server.host, server.port))
            sock.sendall(request * 300)
            socks.append(sock)
        assert health(server) == 200
        count, before = 0, b""
        while count < 250:
            received = socks[0].recv(1 << 16)
            count += (before + received).count(b"HTTP/1.1 200") - before.count(b"HTTP/1.1 200")
            before = received[-11:]


@pytest.mark.parametrize("stream", [True, False])
def test_many_answers_are_waited_for_at_once(stream):
    service = FakeService(pace_s=60)
    with running(service, queue=MANY) as server, ExitStack() as stack:
        body = {"messages": [user("hi")], "stream": stream}
        socks = [stack.enter_context(raw_request(server, body)) for _ in range(MANY)]
        assert until(lambda: len(service.tickets) == MANY)
        assert health(server) == 200
        assert all(s.recv(1 << 16).startswith(b"HTTP/1.1 200") for s in socks if stream)
        for sock in socks:
            sock.close()
        assert until(lambda: all(t.cancelled.is_set() for t in service.tickets))
        assert until(lambda: not server.connections)


def test_what_is_asked_while_an_answer_is_waited_for_comes_after_it():
    service = FakeService(pace_s=0.01)
    with running(service) as server, connect(server) as sock:
        body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
        requested = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        last = requested.replace(b"Host:", b"Connection: close\r\nHost:")
        sock.sendall(requested.replace(b'"stream": true', b'"stream":false') * 2 + last)
        status, received = response(sock)
    assert status == 200 and received.count(b"HTTP/1.1 200 OK") == 2
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_an_answer_that_fails_after_a_wait_has_its_status_and_headers():
    service = FakeService()
    service.fails = BusyError("a worker is busy; try again later")
    with running(service) as server, raw_request(server, {"messages": [user("hi")]}) as sock:
        head = sock.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 429 TOO MANY REQUESTS\r\n")
    assert b"\r\nRetry-After: 1\r\n" in head and b"\r\nX-Request-Id: req-" in head
    assert head.count(b"Content-Type: application/json\r\n") == 1 and b"Connection" not in head


def test_who_waits_long_hears_that_the_server_is_there(monkeypatch):
    monkeypatch.setattr(response_streams, "BEAT_S", 0.0)
    monkeypatch.setattr(response_streams, "LOOK_S", 0.01)
    body = {"messages": [user("hi")], "stream": True}
    with running(FakeService(pace_s=60)) as server, raw_request(server, body) as sock:
        received = b""
        while received.count(b": still there\n\n") < 2:
            received += sock.recv(4096)


def test_many_questions_after_health_are_answered_in_order():
    other = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with running(FakeService()) as server, ExitStack() as stack:
        for sock in crowd(stack, server, HEALTH * 20 + other + HEALTH * 3 + last, 12):
            result = b"".join(iter(lambda: sock.recv(1 << 16), b""))  # noqa: B023
            statuses = re.findall(rb"HTTP/1.1 (\d+) ", result)
            assert statuses == [b"200"] * 20 + [b"404"] + [b"200"] * 4 and b"ready" in result
