"""A server that is to end: what has come is answered, and nothing else is taken."""

from __future__ import annotations

import json
import signal
import socket
import threading
from types import SimpleNamespace

import pytest
from fake_service import FakeService, until
from serving import raw_request, user

from mtmd.commands.serve import _stop_on_signals
from mtmd.web.app import create_app
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings


@pytest.fixture
def served():
    """A server that answers when `service.open` is set, the thread it runs in, and what else it
    waits for.
    """
    service = FakeService()
    service.open, service.busy = threading.Event(), False
    answer = service.answer
    service.answer = lambda *given: (service.open.wait(30), answer(*given))[1]
    settings = ServerSettings(port=0, queue=20)
    server = Server(create_app(service, settings), settings, bind(settings))
    thread = threading.Thread(
        target=server.serve, args=(service.close, lambda: service.busy), daemon=True
    )
    thread.start()
    yield service, server, thread
    service.open.set()
    server.stop()
    thread.join(10)


def read(sock):
    received = b""
    while piece := sock.recv(1 << 16):
        received += piece
    return received


def test_what_has_come_is_answered_and_nobody_new_is_let_in(served):
    service, server, thread = served
    address = server.host, server.port
    body = {"messages": [user("hi")]}
    socks = [raw_request(server, body | {"stream": n % 2 == 0}) for n in range(20)]
    idle, late = (socket.create_connection(address, timeout=10) for _ in range(2))
    late.sendall(b"GET /health HTTP/1.1\r\n")
    assert until(lambda: len(service.tickets) == 20 and len(server.connections) == 22)
    assert until(lambda: any(c.phase == "head" for c in server.connections))
    server.drain(30)
    assert idle.recv(100) == b""
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=10)
    late.sendall(b"Host: localhost\r\n\r\n")
    reported = read(late)
    assert reported.startswith(b"HTTP/1.1 503 ") and b'"shutting_down"' in reported
    assert thread.is_alive() and not any(t.cancelled.is_set() for t in service.tickets)
    service.open.set()
    for number, sock in enumerate(socks):
        received = read(sock)
        if number % 2 == 0:
            assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            answer = json.loads(received.partition(b"\r\n\r\n")[2])
            assert answer["choices"][0]["finish_reason"] == "stop"
    thread.join(10)
    assert not thread.is_alive() and "shutting_down" not in str(service.ended)
    for sock in (*socks, idle, late):
        sock.close()


def test_what_no_client_waits_for_is_waited_for_too(served):
    service, server, thread = served
    service.busy = True
    server.drain(30)
    assert until(lambda: hasattr(server, "wsgi") and server.wsgi.closed) and thread.is_alive()
    service.busy = False
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("ends", ["time", "stop"])
def test_what_takes_too_long_is_told_so(served, ends):
    service, server, thread = served
    with raw_request(server, {"messages": [user("hi")], "stream": True}) as sock:
        assert until(lambda: service.tickets)
        server.drain(0.1 if ends == "time" else 300)
        if ends == "stop":
            assert until(lambda: hasattr(server, "wsgi") and server.wsgi.closed)
            server.stop()
        service.close()
        service.open.set()
        assert b'"shutting_down"' in read(sock)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_has_answers_written_and_a_second_one_does_not(number, handlers):  # noqa: ARG001
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore it
    stated = []
    server = SimpleNamespace(drain=stated.append, stop=lambda: stated.append("stop"))
    _stop_on_signals(server, 7)
    signal.raise_signal(number)
    assert stated == [7]
    signal.raise_signal(number)
    assert stated == [7, "stop"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_hang_up_that_is_to_be_ignored_is(handlers):  # noqa: ARG001
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
    _stop_on_signals(SimpleNamespace(), 7)
    signal.raise_signal(signal.SIGHUP)


@pytest.fixture
def handlers():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
