"""Streams by a model that is being loaded: signs of life in every interface's form, then the answer."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from fake_models import FakeLoader, registry_of
from fake_service import until
from serving import raw_request, running, user

from mtmd import ModelError
from mtmd.web.app import create_app_of_many
from mtmd.web.settings import ServerSettings

REQUESTED = {"messages": [user("hi")], "stream": True}
BODIES = {
    "/v1/chat/completions": REQUESTED,
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/responses": {"input": "hi", "stream": True},
    "/v1/messages": {**REQUESTED, "max_tokens": 9},
    "/completion": {"prompt": "hi", "stream": True},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
}
COMMENT = ": loading, 25%\n\n"


@pytest.fixture
def loader():
    made = FakeLoader({"slow": 4})
    made.gate.clear()
    made.read = (1, 4)
    return made


@pytest.fixture
def registry(loader, monkeypatch):
    monkeypatch.setattr("mtmd.web.answering.response_streams.BEAT_S", 0.001)
    made, _ = registry_of(loader.needs, loader=loader)
    made.start()
    made.load("slow")
    assert until(lambda: made.loading() is not None and made.loading()["progress"] == 0.25)
    yield made
    loader.gate.set()
    made.close()


@pytest.fixture
def requested(registry):
    """Sends a body; the response, and its pieces as they come."""
    client = create_app_of_many(registry, ServerSettings()).test_client()

    def ask(path, body):
        response = client.post(path, json=body | {"model": "slow"}, buffered=False)
        return response, (piece.decode() for piece in response.iter_encoded())

    return ask


@pytest.mark.parametrize("path", BODIES)
def test_there_is_something_while_it_is_loaded_and_then_the_answer(
    path, requested, loader, registry
):
    response, pieces = requested(path, BODIES[path])
    assert response.status_code == 200 and response.headers["X-Accel-Buffering"] == "no"
    signs = list(itertools.islice(pieces, 3))
    if path.startswith("/api/"):
        assert response.mimetype == "application/x-ndjson"
        lines = [json.loads(line) for line in "".join(signs).splitlines()]
        texts = [
            line["message"]["content"] if "chat" in path else line["response"] for line in lines
        ]
        assert texts == [""] * 3 and not any(line["done"] for line in lines)
    else:
        assert response.mimetype == "text/event-stream" and signs == [COMMENT] * 3
    loader.gate.set()
    answer = "".join(pieces)
    assert (
        "slow" in answer and "says" in answer and "error" not in answer.replace('"error": null', "")
    )
    entry = registry._entries["slow"]
    assert not entry.users and not entry.waiters and not registry._slots.taken
    response.close()


@pytest.mark.parametrize("path", BODIES)
def test_one_that_cannot_be_loaded_ends_the_stream_with_its_error(
    path, requested, loader, registry
):
    loader.fails["slow"] = ModelError("tokenizer.json: not there")
    response, pieces = requested(path, BODIES[path])
    next(pieces)
    loader.gate.set()
    rest = "".join(pieces)
    assert "tokenizer.json: not there" in rest
    ends = {"/v1/chat/completions": "data: [DONE]\n\n", "/v1/completions": "data: [DONE]\n\n"}
    assert rest.endswith(ends.get(path, "\n"))
    response.close()
    again, _ = requested(path, BODIES[path])
    assert again.status_code == 503, "known before anything is sent"
    assert not registry._entries["slow"].waiters and not registry._slots.taken


def test_what_is_wrong_with_a_request_is_told_in_the_stream_and_nothing_is_held(
    requested, loader, registry
):
    response, pieces = requested("/v1/chat/completions", {"messages": [user("")], "stream": True})
    next(pieces)
    loader.gate.set()
    assert "the prompt is empty" in "".join(pieces)
    response.close()
    assert not registry._entries["slow"].users


@pytest.mark.parametrize("read", [0, 1])
def test_who_leaves_meanwhile_has_no_place_any_more(read, requested, registry):
    response, pieces = requested("/v1/chat/completions", REQUESTED)
    list(itertools.islice(pieces, read))
    assert registry._slots.taken == 1
    pieces.close()
    response.close()
    assert not registry._entries["slow"].waiters and not registry._slots.taken


def test_what_is_not_streamed_waits_in_silence(requested, monkeypatch):
    monkeypatch.setattr("mtmd.web.models.registry.LONGEST_WAIT_S", 0.0)
    response, _ = requested("/v1/chat/completions", {"messages": [user("hi")]})
    assert response.status_code == 503 and response.get_json()["error"]["code"] == "model_loading"


def test_a_connection_goes_on_once_the_model_is_there(registry, loader):
    app = create_app_of_many(registry, ServerSettings())
    closed = SimpleNamespace(close=lambda: None)
    with running(closed, app) as server, raw_request(server, REQUESTED | {"model": "slow"}) as sock:
        received = b""
        while received.count(COMMENT.encode()) < 2:
            received += sock.recv(4096)
        loader.pace_s = 60.0
        loader.gate.set()
        while b"data: " not in received:
            received += sock.recv(4096)
        registry._entries["slow"].served.service.tickets[-1].cancel()
        while b"[DONE]" not in received:
            received += sock.recv(4096)
    assert received.startswith(b"HTTP/1.1 200 OK") and b"shutting_down" in received
