"""Requests of all interfaces read into one form, without a server."""

from __future__ import annotations

import pytest

from mtmd import ToolCall
from mtmd.web.answering.request import Turn, closest, continues, conversation
from mtmd.web.interfaces.anthropic_requests import MessagesRequest
from mtmd.web.interfaces.ollama_requests import ChatRequest as OllamaRequest
from mtmd.web.interfaces.openai_requests import ChatRequest
from mtmd.web.interfaces.responses_requests import ResponsesRequest

CALL = ToolCall("c1", "look", '{"at":"x"}')
FUNCTION = {"name": "look", "arguments": '{"at":"x"}'}
STATED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "where?"},
    {"role": "assistant", "content": "hm", "tool_calls": [{"id": "c1", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "there"},
]
OLLAMAS = {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": {"at": "x"}}}]}
BODIES = {
    "chat completions": (ChatRequest, {"messages": STATED}),
    "messages": (
        MessagesRequest,
        {
            "system": "be brief",
            "messages": [
                {"role": "user", "content": "where?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "hm"},
                        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "there"}],
                },
            ],
        },
    ),
    "Ollama": (OllamaRequest, {"messages": [*STATED[:2], STATED[2] | OLLAMAS, STATED[3]]}),
    "responses": (
        ResponsesRequest,
        {
            "instructions": "be brief",
            "input": [
                STATED[1],
                {"role": "assistant", "content": "hm"},
                {"type": "function_call", "call_id": "c1", **FUNCTION},
                {"type": "function_call_output", "call_id": "c1", "output": "there"},
            ],
        },
    ),
}


@pytest.mark.parametrize("interface", BODIES)
def test_one_conversation_is_the_same_in_every_interface(interface):
    kind, fields = BODIES[interface]
    limit = {"max_tokens": 9} if kind is MessagesRequest else {}
    body = kind.model_validate({"model": "m", **fields, **limit})
    if kind is ResponsesRequest:
        requested = body.request(body.turns())
    else:
        requested = body.request("m") if kind is OllamaRequest else body.request()
    assert requested.model == "m"
    assert requested.turns == (
        Turn("system", "be brief"),
        Turn("user", "where?"),
        Turn("assistant", "hm", (CALL,)),
        Turn("tool", "there", answers="c1", name="look"),
    )
    assert requested.turns[3].message(iter(())) == {
        "role": "tool",
        "content": "there",
        "tool_call_id": "c1",
        "name": "look",
    }


def test_system_messages_at_the_beginning_are_one():
    turns = [Turn("system", ("a",)), Turn("system", ("b", "c")), Turn("user", ("d",))]
    assert conversation(turns) == (Turn("system", ("a\n\nb", "c")), Turn("user", "d"))


def test_what_the_assistant_says_last_is_continued():
    stated = Turn("assistant", "so")
    assert continues([stated]) == {"continue_final_message": True}
    assert continues([Turn("assistant", "", (CALL,))]) == continues([]) == {}


def test_the_closest_look_at_a_picture_is_that_at_all():
    assert closest(["low", "high", "auto"]) == "high" and closest([]) == "auto"
