"""Answers written in the form of each interface, without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from fake_service import FakeService

from mtmd import Finished
from mtmd.web.answering.response_streams import Collected
from mtmd.web.errors import ApiError
from mtmd.web.interfaces.anthropic import MessageForm
from mtmd.web.interfaces.llama_cpp import Completion
from mtmd.web.interfaces.llama_cpp import CompletionForm as LlamaForm
from mtmd.web.interfaces.ollama import LineForm, message
from mtmd.web.interfaces.openai_replies import ChatReply, CompletionForm, PlainReply
from mtmd.web.interfaces.openai_requests import ChatRequest, CompletionRequest
from mtmd.web.interfaces.responses import ResponseForm
from mtmd.web.interfaces.responses_requests import ResponsesRequest

STATED = "fake says hi"
MODEL = SimpleNamespace(name="fake", context=99, called=lambda name: name or "fake")
CHAT = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
PLAIN = CompletionRequest.model_validate({"prompt": "hi"})
RESPONSE = ResponsesRequest.model_validate({"input": "hi", "store": False})
LLAMAS = Completion.model_validate({"prompt": "hi"})
FORMS = {  # the form, and where the text of a whole answer and of a piece stand in it
    "chat completions": (
        CompletionForm(CHAT, ChatReply("chatcmpl-1", "")),
        lambda body: body["choices"][0]["message"]["content"],
        lambda piece: piece["choices"][0]["delta"].get("content") or "",
    ),
    "completions": (
        CompletionForm(PLAIN, PlainReply("cmpl-1", "")),
        lambda body: body["choices"][0]["text"],
        lambda piece: piece["choices"][0]["text"],
    ),
    "messages": (
        MessageForm("fake", "1"),
        lambda body: body["content"][0]["text"],
        lambda piece: piece.get("delta", {}).get("text", ""),
    ),
    "responses": (
        ResponseForm(RESPONSE, (), "1", lambda *_: True),
        lambda body: body["output"][0]["content"][0]["text"],
        lambda piece: piece["delta"] if piece["type"].endswith("text.delta") else "",
    ),
    "Ollama": (
        LineForm("fake", message),
        lambda body: body["message"]["content"],
        lambda piece: piece["message"]["content"],
    ),
    "llama.cpp": (LlamaForm(LLAMAS), lambda body: body["content"], lambda piece: piece["content"]),
}


@pytest.fixture
def events():
    service = FakeService()
    service.answer = lambda *_: STATED
    return list(service.submit([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize("interface", FORMS)
def test_a_stream_says_what_the_whole_answer_says(interface, events):
    form, text_of, piece_of = FORMS[interface]
    answer = next(event.answer for event in events if isinstance(event, Finished))
    assert text_of(form.whole(MODEL, [Collected(answer)])) == STATED
    writer = form.writer(MODEL)
    sent = [
        *writer.begin(),
        *(piece for e in events for piece in writer.write(0, e)),
        *writer.end(),
    ]
    lines = [line.removeprefix("data: ") for line in "".join(sent).splitlines()]
    pieces = [json.loads(line) for line in lines if line.startswith("{")]
    assert "".join(map(piece_of, pieces)) == STATED


@pytest.mark.parametrize("interface", FORMS)
def test_a_stream_that_fails_says_why(interface):
    form, *_ = FORMS[interface]
    assert "no more room" in form.failure(ApiError(503, "no more room"))
