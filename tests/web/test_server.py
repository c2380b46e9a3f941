"""The web server as `mtmd serve` has it: in a process of its own, where threads are greenlets."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from fake_service import until
from serving import data_url, image_part, noise, raw_request, user

PROGRAM = Path(__file__).parents[1] / "support" / "patched_server.py"
REQUESTED = {"messages": [user("hi")], "stream": True, "max_tokens": 1000}
MANY = 200


@contextmanager
def serving(words, pace_s):
    command = [sys.executable, "-W", "error", str(PROGRAM), str(words), str(pace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(process.stdout.readline())
            yield (
                process,
                SimpleNamespace(host="127.0.0.1", port=port, url=f"http://127.0.0.1:{port}"),
            )
        finally:
            process.kill()


def read(sock):
    received = b""
    while piece := sock.recv(1 << 16):
        received += piece
    return received


def running_in(server):
    with urlopen(f"{server.url}/metrics", timeout=30) as reported:
        return reported.read().decode()


def test_streams_beside_many_that_wait_come_whole_and_a_drain_waits_for_them():
    with serving(40, 0.05) as (process, server), ExitStack() as stack:
        address = server.host, server.port
        for data in (b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nX: "):
            for _ in range(MANY):
                sock = stack.enter_context(socket.create_connection(address, timeout=60))
                sock.sendall(data)
        requested = [stack.enter_context(raw_request(server, REQUESTED)) for _ in range(MANY)]
        for sock in requested:
            sock.settimeout(60)
            assert sock.recv(12) == b"HTTP/1.1 200"
        with urlopen(f"{server.url}/health", timeout=60) as reported:
            assert reported.status == 200
        process.send_signal(signal.SIGTERM)
        for sock in requested:
            received = read(sock)
            assert (
                received.count(b'"content": " word"') + received.count(b'"content": "word"') == 40
            )
            assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        stack.close()
        assert process.wait(60) == 0 and int(process.stdout.readline()) == MANY


def test_long_bodies_are_read_beside_others():
    """In native threads, whose locks are the system's, while greenlets are answered."""
    pictures = [image_part(data_url(noise(seed, width=2000))) for seed in range(3)]
    body = json.dumps({"messages": [user("what?", *pictures)]}).encode()
    assert len(body) > 3 << 20
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with serving(3, 0.0) as (_, server), ExitStack() as stack:
        address = server.host, server.port
        socks = [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(8)
        ]
        senders = [threading.Thread(target=sock.sendall, args=(head + body,)) for sock in socks]
        for sender in senders:
            sender.start()
        with urlopen(f"{server.url}/health", timeout=60) as reported:
            assert reported.status == 200
        for sender, sock in zip(senders, socks, strict=True):
            answer = read(sock)
            sender.join()
            assert answer.startswith(b"HTTP/1.1 200 ") and b"word word word" in answer


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_gives_the_answer_up(stream):
    with serving(40, 60.0) as (_, server):
        with raw_request(server, REQUESTED | {"stream": stream}):
            assert until(lambda: "mtmd_requests_total 1" in running_in(server), 30)
        assert until(lambda: 'status="499"} 1.0' in running_in(server), 30)
