"""Schemas of answers that ask for more than a grammar can promise, in every interface: what can be
promised is, unless the schema is strict, and the receipt says what is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from serving import client_for, running

from mtmd import Service, load

SAY = [{"role": "user", "content": "Hi"}]
MORE = {"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"a": MORE}, "required": ["a"]}
CHAT, RESPONSES, PLAIN = "/v1/chat/completions", "/v1/responses", "/v1/completions"


def named(strict: bool | None = None, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"name": "s", "schema": schema} | ({} if strict is None else {"strict": strict})


def reported(body: Any) -> tuple[str, list[str]]:
    """The text of a chat, and warnings."""
    return body["choices"][0]["message"]["content"], body["usage"]["mtmd_receipt"]["warnings"]


WAYS: dict[str, tuple[str, dict[str, Any], Callable[[Any], tuple[str, list[str]]]]] = {
    "chat": (
        CHAT,
        {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": named()}},
        reported,
    ),
    "chat, not strict": (
        CHAT,
        {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": named(False)}},
        reported,
    ),
    "chat, llama.cpp's object with a schema": (
        CHAT,
        {"messages": SAY, "response_format": {"type": "json_object", "schema": SCHEMA}},
        reported,
    ),
    "chat, llama.cpp's json_schema": (CHAT, {"messages": SAY, "json_schema": SCHEMA}, reported),
    "chat, vLLM's guided_json as a text": (
        CHAT,
        {"messages": SAY, "guided_json": json.dumps(SCHEMA)},
        reported,
    ),
    "chat, vLLM's structured_outputs": (
        CHAT,
        {"messages": SAY, "structured_outputs": {"json": SCHEMA}},
        reported,
    ),
    "chat beside tools": (
        CHAT,
        {
            "messages": SAY,
            "response_format": {"type": "json_schema", "json_schema": named()},
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "tool_choice": "auto",
        },
        # a call may come in place of the answer
        lambda body: (reported(body)[0] or json.dumps({"a": [7, 7]}), reported(body)[1]),
    ),
    "completions": (
        PLAIN,
        {"prompt": "Hi", "json_schema": SCHEMA},
        lambda b: (b["choices"][0]["text"], b["usage"]["mtmd_receipt"]["warnings"]),
    ),
    "responses": (
        RESPONSES,
        {"input": "Hi", "text": {"format": {"type": "json_schema", **named()}}},
        lambda b: (b["output"][0]["content"][0]["text"], b["usage"]["mtmd_receipt"]["warnings"]),
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": SAY,
            "max_tokens": 40,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        lambda b: (b["content"][0]["text"], b["usage"]["mtmd_receipt"]["warnings"]),
    ),
    "Ollama": (
        "/api/chat",
        {"messages": SAY, "format": SCHEMA, "stream": False},
        lambda b: (b["message"]["content"], b["mtmd_receipt"]["warnings"]),
    ),
    "llama.cpp's completion": (
        "/completion",
        {"prompt": "Hi", "json_schema": SCHEMA},
        lambda b: (b["content"], b["mtmd_receipt"]["warnings"]),
    ),
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service(load(threads=1))
    yield service
    service.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_no_grammar_can_promise_is_passed_over_and_told(service: Service, way: str) -> None:
    path, body, read = WAYS[way]
    result = client_for(service, any_model=True).post(path, json={"model": "demo", **body})
    assert result.status_code == 200, result.text
    text, warnings = read(result.get_json())
    assert json.loads(text) == {"a": [7, 7]}
    assert any("uniqueItems" in warning for warning in warnings)


@pytest.mark.parametrize(
    "path, body",
    [
        (
            CHAT,
            {
                "messages": SAY,
                "response_format": {"type": "json_schema", "json_schema": named(True)},
            },
        ),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", **named(True)}}}),
        (  # which is no schema at all
            CHAT,
            {
                "messages": SAY,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": named(None, {"type": "string", "pattern": "(("}),
                },
            },
        ),
    ],
)
def test_what_is_strict_is_refused(service: Service, path: str, body: dict[str, Any]) -> None:
    result = client_for(service, any_model=True).post(path, json={"model": "demo", **body})
    assert result.status_code == 400
    assert result.get_json()["error"]["message"].startswith("json_schema: ")


def test_the_official_clients_read_such_answers(service: Service) -> None:
    with (
        running(service, any_model=True) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as chat,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
        ollama.Client(host=server.url) as llama,
    ):
        result = chat.chat.completions.create(
            model="demo",
            messages=SAY,
            response_format={"type": "json_schema", "json_schema": named()},
        )
        assert json.loads(result.choices[0].message.content) == {"a": [7, 7]}
        message = claude.messages.create(
            model="demo",
            max_tokens=40,
            messages=SAY,
            extra_body={"output_config": WAYS["messages"][1]["output_config"]},
        )
        assert json.loads(message.content[0].text) == {"a": [7, 7]}
        assert "uniqueItems" in message.usage.mtmd_receipt["warnings"][0]
        answer = llama.chat(model="demo", messages=SAY, format=SCHEMA)
        assert json.loads(answer.message.content) == {"a": [7, 7]}
