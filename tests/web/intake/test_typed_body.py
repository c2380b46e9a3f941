"""Whole numbers that came as floats, in every interface."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_service import FakeService
from pydantic import ValidationError
from serving import client_for

from mtmd.web.errors import invalid
from mtmd.web.interfaces.anthropic_requests import MessagesRequest
from mtmd.web.interfaces.llama_cpp import Completion
from mtmd.web.interfaces.ollama_requests import Options
from mtmd.web.interfaces.openai_requests import ChatRequest, CompletionRequest
from mtmd.web.interfaces.responses_requests import ResponsesRequest

USER = [{"role": "user", "content": "x"}]
CHAT = {"model": "fake", "messages": USER}
FORMS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (ChatRequest, CHAT, ["max_tokens", "max_completion_tokens", "top_k", "seed", "n"]),
    (ChatRequest, CHAT | {"logprobs": True}, ["top_logprobs", "min_tokens"]),
    (CompletionRequest, {"prompt": "x"}, ["max_tokens", "logprobs"]),
    (MessagesRequest, CHAT | {"max_tokens": 2}, ["max_tokens", "top_k"]),
    (ResponsesRequest, {"input": "x"}, ["max_output_tokens"]),
    (Options, {}, ["num_predict", "top_k", "seed"]),
    (Completion, {"prompt": "x"}, ["n_predict", "max_tokens", "top_k", "seed", "n_probs"]),
]


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [(kind, body, field) for kind, body, fields in FORMS for field in fields],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_a_whole_number_may_be_written_as_a_float(
    kind: Any, body: dict[str, Any], field: str
) -> None:
    result = getattr(kind.model_validate_json(_json(body, field, "6.0")), field)
    assert result == 6 and type(result) is int
    for wrong in ("6.5", "true", '"6"', "1e400"):
        with pytest.raises(ValidationError):
            kind.model_validate_json(_json(body, field, wrong))


def _json(body: dict[str, Any], field: str, text: str) -> str:
    return json.dumps(body | {field: "here"}).replace('"here"', text)


@pytest.mark.parametrize("value", [10**9, 1e9])
def test_one_that_is_too_large_is_told_as_such(value: float) -> None:
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate(CHAT | {"max_tokens": value})
    reported = "max_tokens: found 1000000000, expected at most 1048576"
    assert invalid(error.value).message == reported


def test_minus_one_is_what_was_not_given() -> None:
    assert ChatRequest.model_validate(CHAT | {"max_tokens": -1.0, "seed": -1.0}).options() == {}


def test_the_server_takes_them() -> None:
    answer = client_for(FakeService()).post(
        "/v1/chat/completions",
        data=_json(CHAT, "max_tokens", "6e1"),
        content_type="application/json",
    )
    assert answer.status_code == 200, answer.get_json()
