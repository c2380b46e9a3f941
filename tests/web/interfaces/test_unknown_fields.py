"""Fields that nobody knows, in requests of other interfaces: named in a header, or refused."""

from __future__ import annotations

import pytest
from fake_service import FakeService
from serving import client_for

STATED = [{"role": "user", "content": "hi"}]
REQUESTS = {
    "/v1/messages": {"model": "fake", "max_tokens": 4, "messages": STATED},
    "/v1/messages/count_tokens": {"model": "fake", "messages": STATED},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/api/chat": {"model": "fake", "messages": STATED, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "hi", "stream": False},
    "/completion": {"prompt": "hi", "n_predict": 4},
    "/v1/chat/completions": {"model": "fake", "messages": STATED},
    "/v1/chat/completions/input_tokens": {"model": "fake", "messages": STATED},
    "/v1/completions": {"model": "fake", "prompt": "hi"},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
COUNTED = {"/v1/messages/count_tokens", "/v1/chat/completions/input_tokens"}
HARMLESS = {
    "/v1/messages": {"metadata": {"user_id": "me"}, "service_tier": "auto"},
    "/v1/messages/count_tokens": {"service_tier": "auto"},
    "/v1/responses": {"user": "me", "service_tier": "auto"},
    "/api/chat": {"keep_alive": "5m"},
    "/api/generate": {"keep_alive": 0},
    "/completion": {"cache_prompt": True, "id_slot": -1},
    "/v1/chat/completions": {"user": "me", "service_tier": "auto"},
    "/v1/chat/completions/input_tokens": {"user": "me"},
    "/v1/completions": {"user": "me"},
}


@pytest.mark.parametrize("route", REQUESTS)
def test_a_field_that_nobody_knows_is_named_or_refused(route):
    body = REQUESTS[route] | {"colour": "red", "größe\r\n": 3}
    result = client_for(FakeService()).post(route, json=body)
    assert result.status_code == 200, result.text
    assert result.headers["X-Mtmd-Ignored"] == r"colour, gr\xf6\xdfe\r\n"
    strict = client_for(FakeService(), unknown_fields="refuse")
    refused = strict.post(route, json=body)
    assert refused.status_code == 400 and "colour: unknown" in refused.text


@pytest.mark.parametrize("route", STREAMED)
def test_a_stream_names_the_field_in_its_header(route):
    body = REQUESTS[route] | {"colour": "red", "stream": True}
    result = client_for(FakeService()).post(route, json=body)
    assert result.status_code == 200 and result.mimetype == "text/event-stream"
    assert result.headers["X-Mtmd-Ignored"] == "colour"


@pytest.mark.parametrize("route", REQUESTS)
def test_what_an_interface_knows_and_changes_nothing_is_taken(route):
    strict = client_for(FakeService(), unknown_fields="refuse")
    result = strict.post(route, json=REQUESTS[route] | HARMLESS[route])
    assert result.status_code == 200, result.text
    assert "X-Mtmd-Ignored" not in result.headers


@pytest.mark.parametrize("route", sorted(REQUESTS.keys() - COUNTED))
def test_a_top_p_of_nothing_is_the_best_token_alone(route):
    service = FakeService()
    options = {"options": {"top_p": 0}} if route.startswith("/api/") else {"top_p": 0}
    result = client_for(service).post(route, json=REQUESTS[route] | options)
    assert result.status_code == 200, result.text
    assert service.tickets[0].settings.top_p == 0


def test_the_header_of_unknown_fields_is_short():
    """And pages of other origins may read it."""
    body = REQUESTS["/v1/completions"] | {f"{chr(0x1F600 + i) * 60}": i for i in range(20)}
    client = client_for(FakeService(), cors_origins=("https://a.example",))
    result = client.post("/v1/completions", json=body, headers={"Origin": "https://a.example"})
    assert result.status_code == 200, result.text
    ignored = result.headers["X-Mtmd-Ignored"]
    assert len(ignored) == 1000 and ignored.startswith(r"\U0001f600")
    assert "X-Mtmd-Ignored" in result.headers["Access-Control-Expose-Headers"].split(", ")
