"""Requests with anything anywhere in them: every adapter refuses in its own form, nothing of the
inside in it, or answers.

MTMD_FUZZ_EXAMPLES sets how many requests are made up for each route.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import re

import pytest
from fake_service import FakeService
from serving import client_for, data_url, png

EXAMPLES = 8 * int(os.environ.get("MTMD_FUZZ_EXAMPLES", "12"))
INSIDE = re.compile(
    r"Traceback|File \"|/work/|/home/|/root/|/usr/|/tmp/|site-packages|0x[0-9a-f]{6,}|\.py\b|PIL\.|Errno|werkzeug|pydantic"
)
PICTURE = base64.b64encode(png(6, 6)).decode()
BLOCKS = [
    {"type": "text", "text": "hi"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
REQUESTS = {
    "/api/chat": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b", "images": [PICTURE]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "d", "tool_name": "f", "tool_call_id": "c"},
        ],
        "format": SCHEMA,
        "options": {"num_predict": 4, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 1},
        "stream": True,
        "keep_alive": "5m",
        "think": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/api/generate": {
        "model": "fake",
        "prompt": "a",
        "system": "b",
        "images": [PICTURE],
        "raw": False,
        "context": [],
        "stream": False,
        "options": {"mirostat": 0},
    },
    "/api/show": {"model": "fake", "name": "fake", "verbose": True},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "c"},
                    BLOCKS[0],
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": BLOCKS,
                        "is_error": True,
                    },
                    *BLOCKS,
                ],
            },
        ],
        "stop_sequences": ["x"],
        "temperature": 1,
        "top_k": 3,
        "stream": True,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "tools": [{"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    },
    "/v1/messages/count_tokens": {
        "model": "fake",
        "messages": [{"role": "user", "content": BLOCKS}],
    },
    "/v1/responses": {
        "model": "fake",
        "instructions": "a",
        "input": [
            {"role": "developer", "content": "b"},
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "c"},
                    {"type": "input_image", "image_url": data_url(png(6, 6)), "detail": "low"},
                ],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": data_url(png(6, 6))}],
            },
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        "metadata": {"a": "b"},
        "max_output_tokens": 4,
        "previous_response_id": None,
        "reasoning": {"effort": None},
        "store": True,
        "stream": True,
    },
    "/completion": {
        "prompt": ["a", [97, 98], ["a", 98]],
        "n_predict": 4,
        "return_tokens": True,
        "response_fields": ["content"],
        "logit_bias": [[5, False], [6, 1.5]],
        "n_probs": 2,
        "stop": ["x"],
        "temperature": 0.5,
    },
    "/tokenize": {"content": "a", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [97, 98]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
}
ANYTHING = (
    None, True, False, 0, -1, 1 << 70, 0.5, -1e308, "", "x" * 3000, "file:///etc/passwd", "file-1",
    "data:,", "data:image/png;base64,", "http://127.0.0.1/", "\ud800", "\x00", "../../x", [], {}, [[]],
    [None], {"type": "text"}, {"type": ["a"]}, {"type": "image", "source": None}, {"$ref": "#"}, [0] * 500,
)  # fmt: skip


def locations(value, location=()):
    yield location
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from locations(item, (*location, key))


def changed(body, chance):
    """`body` with anything at one or a few places, a place taken out, or one put twice."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        location = chance.choice(list(locations(body)))
        if not location:
            return copy.deepcopy(chance.choice(ANYTHING))
        inside = body
        for key in location[:-1]:
            inside = inside[key]
        what = chance.random()
        if what < 0.15:
            del inside[location[-1]]
        elif what < 0.25 and isinstance(inside, list):
            inside += copy.deepcopy([inside[location[-1]]] * chance.choice((1, 20)))
        else:
            inside[location[-1]] = copy.deepcopy(chance.choice(ANYTHING))
        if not isinstance(body, dict) or not body:
            break
    return body


def is_error(path, result):
    if path.startswith("/v1/messages"):
        return result["type"] == "error" and set(result["error"]) == {"type", "message"}
    if path.startswith("/api/"):
        return list(result) == ["error"] and isinstance(result["error"], str)
    return set(result["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", REQUESTS)
def test_anything_anywhere_is_answered_or_refused_in_the_right_form(path):
    client, chance = client_for(FakeService(), rate_limit=0), random.Random(path)
    assert client.post(path, json=REQUESTS[path], buffered=True).status_code == 200
    seen = set()
    for _ in range(EXAMPLES):
        body = changed(REQUESTS[path], chance)
        result = client.post(
            path, data=json.dumps(body), content_type="application/json", buffered=True
        )
        seen.add(result.status_code)
        assert result.status_code in (200, 400, 404, 413), (body, result.text)
        if result.status_code >= 400:
            assert is_error(path, result.get_json()), result.text
            assert len(result.data) < 2000 and not INSIDE.search(result.text), result.text
    assert seen >= {200, 400}


@pytest.mark.parametrize("path", REQUESTS)
def test_what_is_no_json_is_refused_in_the_right_form(path):
    client = client_for(FakeService())
    for data, kind, status in (
        (b"{", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b"{}", "text/plain", 415),
        # what `curl -d` says of JSON too, in Ollama's own examples
        (b"x=1", "application/x-www-form-urlencoded", 400 if path.startswith("/api/") else 415),
    ):
        result = client.post(path, data=data, content_type=kind)
        assert result.status_code == status and is_error(path, result.get_json())
