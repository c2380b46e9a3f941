"""Pictures, requests, and a server on a free port, for the tests of the server."""

from __future__ import annotations

import base64
import io
import json
import random
import socket
import threading
from contextlib import contextmanager

from PIL import Image

from mtmd.web.app import create_app
from mtmd.web.intake.long_texts import LONG
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings


def png(width=20, height=10, color="red", kind="PNG"):
    out = io.BytesIO()
    Image.new("RGB", (width, height), color).save(out, kind)
    return out.getvalue()


def noise(seed, width=200, kind="PNG"):
    """A picture so large that it is taken out of a body of JSON before that is read."""
    out = io.BytesIO()
    pixels = random.Random(seed).randbytes(width * 150 * 3)
    Image.frombytes("RGB", (width, 150), pixels).save(out, kind)
    assert out.tell() > LONG
    return out.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts):
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def loose(schema):
    """A schema that is not strict, as the service gets it."""
    return {"schema": schema, "strict": False}


def client_for(service, **settings):
    return create_app(service, ServerSettings(**settings)).test_client()


def post_chat(client, *parts, **body):
    return client.post("/v1/chat/completions", json={"messages": [user(*parts)], **body})


@contextmanager
def running(service, app=None, **settings):
    """A real server; gives its address, and ends it."""
    chosen = ServerSettings(port=0, **settings)
    server = Server(app or create_app(service, chosen), chosen, bind(chosen))
    thread = threading.Thread(target=server.serve, args=(service.close,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def raw_request(server, body, path="/v1/chat/completions", method="POST", receive=None):
    """A connection on which a JSON request was sent and nothing has been read. `receive`: bytes
    that the system takes in for it.
    """
    sock = socket.socket()
    if receive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    sock.settimeout(10)
    sock.connect((server.host, server.port))
    data = json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sock.sendall(head.encode() + data)
    return sock
