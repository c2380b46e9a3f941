"""Tools on a published model, end to end: client libraries send the question with a tool, run the
call that comes back, send its result, and get a text that says it. Streamed, and not.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from published_subject import Subject, of
from tool_clients import FOLLOW_UP, QUESTION, WEATHER

ENVIRONMENT = Path(__file__).parents[2] / ".venv-published" / "bin" / "python"
TOKENS = 128
TIMEOUT_S = 300
FUNCTION = {
    "name": "get_weather",
    "description": "Returns the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
Outcome = tuple[list[str], str]  # the cities that were looked up, and the text in the end


def check(outcome: Outcome) -> None:
    cities, text = outcome
    assert cities in (["Lisbon"], ["Lisboa"])
    assert "18" in text and "sunny" in text


def with_openai(subject: Subject, stream: bool) -> Outcome:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    chosen: dict[str, Any] = {
        "model": subject.path.name,
        "temperature": 0,
        "max_tokens": TOKENS,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    with openai.OpenAI(
        base_url=f"{subject.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        def stated() -> Any:
            if not stream:
                answer = client.chat.completions.create(messages=messages, **chosen)
            else:
                with client.chat.completions.stream(messages=messages, **chosen) as events:
                    answer = events.get_final_completion()
            return answer.choices[0]

        called = stated()
        assert called.finish_reason == "tool_calls"
        cities = []
        messages.append(called.message.model_dump(exclude_none=True))
        for call in called.message.tool_calls:
            cities.append(json.loads(call.function.arguments)["city"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
        messages.append({"role": "user", "content": FOLLOW_UP})
        return cities, stated().message.content


def with_responses(subject: Subject, stream: bool) -> Outcome:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    chosen: dict[str, Any] = {
        "model": subject.path.name,
        "temperature": 0,
        "max_output_tokens": TOKENS,
        "tools": [{"type": "function", **FUNCTION}],
    }
    with openai.OpenAI(
        base_url=f"{subject.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        def stated() -> Any:
            if not stream:
                return client.responses.create(input=items, **chosen)
            with client.responses.stream(input=items, **chosen) as events:
                return events.get_final_response()

        cities = []
        for item in stated().output:
            assert item.type == "function_call"
            cities.append(json.loads(item.arguments)["city"])
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            items.append({"type": "function_call", **call})
            result = {"call_id": item.call_id, "output": WEATHER}
            items.append({"type": "function_call_output", **result})
        items.append({"role": "user", "content": FOLLOW_UP})
        return cities, stated().output_text


def with_anthropic(subject: Subject, stream: bool) -> Outcome:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
    chosen: dict[str, Any] = {
        "model": subject.path.name,
        "max_tokens": TOKENS,
        "tools": [tool],
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(
        base_url=subject.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        def stated() -> Any:
            if not stream:
                return client.messages.create(messages=messages, **chosen)
            with client.messages.stream(messages=messages, **chosen) as events:
                return events.get_final_message()

        called = stated()
        assert called.stop_reason == "tool_use"
        calls = [block for block in called.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER} for call in calls
        ]
        content = [block.model_dump(exclude_none=True) for block in called.content]
        messages.append({"role": "assistant", "content": content})
        follow_up = {"type": "text", "text": FOLLOW_UP}
        messages.append({"role": "user", "content": [*results, follow_up]})
        text = "".join(block.text for block in stated().content if block.type == "text")
        return [call.input["city"] for call in calls], text


def with_ollama(subject: Subject, stream: bool) -> Outcome:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    chosen: dict[str, Any] = {
        "model": subject.path.name,
        "options": {"temperature": 0, "num_predict": TOKENS},
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    with ollama.Client(subject.url, timeout=TIMEOUT_S) as client:

        def stated() -> tuple[str, list[Any]]:
            result = client.chat(messages=messages, stream=stream, **chosen)
            parts = [part.message for part in result] if stream else [result.message]
            calls = [call for part in parts for call in part.tool_calls or ()]
            return "".join(part.content or "" for part in parts), calls

        _, calls = stated()
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        for call in calls:
            messages.append({"role": "tool", "tool_name": call.function.name, "content": WEATHER})
        messages.append({"role": "user", "content": FOLLOW_UP})
        return [call.function.arguments["city"] for call in calls], stated()[0]


def of_a_library(name: str) -> Callable[[Subject, bool], Outcome]:
    """One that runs tools itself, in an environment of its own."""

    def converse(subject: Subject, stream: bool) -> Outcome:
        script = Path(__file__).with_name("tool_clients.py")
        command = [str(ENVIRONMENT), "-W", "ignore", str(script), name, subject.url]
        command += [subject.path.name, *(["--stream"] if stream else [])]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        return result["calls"], result["text"]

    return converse


CLIENTS = {
    "openai": with_openai,
    "openai responses": with_responses,
    "anthropic": with_anthropic,
    "ollama": with_ollama,
    "langchain-openai": of_a_library("langchain-openai"),
    "pydantic-ai": of_a_library("pydantic-ai"),
}


@of("qwen2.5-coder")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_tool_is_called_and_its_result_is_said(
    subject: Subject, client: str, stream: bool
) -> None:
    check(CLIENTS[client](subject, stream))
    subject.results["tools"] = sorted({*subject.results.get("tools", ()), client})
