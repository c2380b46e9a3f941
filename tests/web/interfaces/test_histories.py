"""Conversations that clients send again and again: a call that was cut, and one whose result was an
error; conversations of system messages alone. In every interface, as each writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import client_for

from mtmd import Service, load

CUT = '{"text": "This is a short'
SYSTEM = "You are a pirate. Say hi."
CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(load(threads=1)) as service:
        yield service


def requested(service: Service, path: str, body: dict[str, Any]) -> Any:
    small = {"max_output_tokens": 4} if path == RESPONSES else {"max_tokens": 4}
    if path == OLLAMA:
        small = {"options": {"num_predict": 4}, "stream": False}
    client = client_for(service, any_model=True)
    return client.post(path, json={"model": "demo", **small, **body})


@pytest.mark.parametrize("arguments", [CUT, "{", "", "[]", "not JSON", '{"a": 1}{'])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_call_with_broken_arguments_is_read_again(
    service: Service, path: str, arguments: str
) -> None:
    """Agents send back what the model wrote: refused, the conversation would be at its end."""
    function = {"name": "note", "parameters": {"type": "object", "properties": {}}}
    if path == CHAT:
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "note", "arguments": arguments},
        }
        body: dict[str, Any] = {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "Error: cut"},
                {"role": "user", "content": "go on"},
            ],
            "tools": [{"type": "function", "function": function}],
        }
    else:
        body = {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c1", "name": "note", "arguments": arguments},
                {"type": "function_call_output", "call_id": "c1", "output": "Error: cut"},
                {"role": "user", "content": "go on"},
            ],
            "tools": [{"type": "function", **function}],
        }
    result = requested(service, path, body)
    assert result.status_code == 200, result.text
    shown = client_for(service).post("/apply-template", json=body) if path == CHAT else None
    if shown is not None and arguments == CUT:
        assert "This is a short" in shown.get_json()["prompt"]


@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": [{"role": "system", "content": SYSTEM}]}),
        (
            CHAT,
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": SYSTEM}]}]},
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}]},
        ),
        (RESPONSES, {"input": [{"role": "system", "content": SYSTEM}]}),
        (MESSAGES, {"system": SYSTEM, "messages": [{"role": "system", "content": SYSTEM}]}),
        (OLLAMA, {"messages": [{"role": "system", "content": SYSTEM}]}),
    ],
)
def test_system_messages_alone_are_answered(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    result = requested(service, path, body)
    assert result.status_code == 200, result.text
