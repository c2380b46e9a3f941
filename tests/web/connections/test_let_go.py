"""What a request took is free once it is answered, without a garbage collection: all threads stand
still in one, and until it came bodies and answers would be kept.
"""

from __future__ import annotations

import gc
import json
import socket
import weakref

import pytest
from fake_service import FakeService, until
from serving import running

from mtmd.web.answering.delivery import Delivery
from mtmd.web.connections.parser import Parser
from mtmd.web.connections.task import Task
from mtmd.web.telemetry.record import Record
from mtmd.web.waiting.waits import Waits

OURS = (Delivery, Parser, Record, Task, Waits)
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def made(monkeypatch):
    """Weak references to all of `OURS` that are made. Not by `gc.get_objects`: its list would hold
    what other threads are making.
    """
    references = []
    for kind in OURS:

        def init(self, *arguments, begin=kind.__init__, **chosen):
            references.append(weakref.ref(self))
            begin(self, *arguments, **chosen)

        monkeypatch.setattr(kind, "__init__", init)
    return references


def post(body):
    text = json.dumps(body)
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}"
    ).encode()


def answered(server, request):
    address = server.effective_host, int(server.effective_port)
    with socket.create_connection(address, timeout=20) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "asked",
    [
        post(CHAT),
        post(CHAT | {"stream": True}),
        post({"messages": 1}),
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n",
        b"PUT /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ],
    ids=["chat", "stream", "refused", "not found", "page not found", "no such method", "health"],
)
def test_an_answered_request_is_free_without_a_garbage_collection(asked, made):
    with running(FakeService()) as server:
        answered(server, asked)  # what is made once
        assert until(lambda: gc.collect() == 0)
        made.clear()
        gc.disable()
        try:
            for _ in range(3):
                assert answered(server, asked).startswith(b"HTTP/1.1 ")
            assert len(made) >= 9
            assert until(lambda: not any(reference() for reference in made)), made
        finally:
            gc.enable()
