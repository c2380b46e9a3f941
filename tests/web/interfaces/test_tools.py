"""Tools over HTTP, by the official client: calls whole and streamed, history, refusals."""

from __future__ import annotations

import json

import openai
import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, loose, png, post_chat, running, user

from mtmd import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLS = (ToolCall("call_1", "look", '{"at": "left"}'), ToolCall("call_2", "look", "{}"))


@pytest.fixture
def service():
    service = FakeService()
    service.calls = CALLS
    return service


@pytest.fixture
def requested(service):
    with running(service) as server:
        url = f"http://{server.host}:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client.chat.completions.create


def test_the_official_client_gets_calls(requested):
    choice = requested(model="fake", messages=[user("hi")], tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    result = [
        (c.id, c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]
    assert result == [(c.id, "function", c.name, c.arguments) for c in CALLS]


def test_streamed_calls_join_to_the_whole(requested):
    made: dict[int, dict[str, str]] = {}
    finish = None
    for chunk in requested(model="fake", messages=[user("hi")], tools=TOOLS, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or ():
                call = made.setdefault(part.index, {"arguments": ""})
                if part.id:
                    assert not call["arguments"] and part.type == "function"
                    call |= {"id": part.id, "name": part.function.name}
                call["arguments"] += part.function.arguments
    assert finish == "tool_calls"
    assert list(made.values()) == [
        {"id": c.id, "name": c.name, "arguments": c.arguments} for c in CALLS
    ]


def test_the_client_runs_tools_in_a_loop(requested, service):
    """As its own documentation has it: the message goes back as it came, results after it."""
    first = requested(model="fake", messages=[user("hi")], tools=TOOLS).choices[0].message
    picture = image_part(data_url(png()))
    results = [
        {"role": "tool", "tool_call_id": "call_1", "content": "a dog"},
        {"role": "tool", "tool_call_id": "call_2", "content": [picture]},
    ]
    again = requested(
        model="fake", messages=[user("hi"), first, *results], tools=TOOLS, tool_choice="none"
    )
    assert again.choices[0].finish_reason == "stop"
    sent = service.tickets[-1].messages
    assert sent[1]["content"] is None
    assert [c["function"]["arguments"] for c in sent[1]["tool_calls"]] == [
        c.arguments for c in CALLS
    ]
    assert [m["tool_call_id"] for m in sent[2:]] == ["call_1", "call_2"]
    assert len(service.tickets[-1].pictures) == 1


def test_options_of_tools_are_handed_on(service):
    client = client_for(service)
    choice = {"type": "function", "function": {"name": "look"}}
    result = post_chat(client, "hi", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert result.status_code == 200
    box = service.tickets[-1].settings.toolbox
    assert (box.choice.mode, box.choice.names, box.several) == ("required", ("look",), False)
    assert post_chat(client, "hi", tools=[], tool_choice="auto").status_code == 200


def test_a_field_nobody_knows_is_said_or_refused(service):
    result = post_chat(client_for(service), "hi", colour="red", user="somebody").get_json()
    (warning,) = result["usage"]["mtmd_receipt"]["warnings"]
    assert "colour" in warning and "user" not in warning
    strict = client_for(service, unknown_fields="refuse")
    assert post_chat(strict, "hi", user="somebody").status_code == 200
    refused = post_chat(strict, "hi", colour="red")
    assert (refused.status_code, refused.get_json()["error"]["param"]) == (400, "colour")


@pytest.mark.parametrize(
    "body",
    [
        {"seed": -1},
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"top_p": 0},
        {"top_k": -1},
        {"stop": [""]},
        {"stop": ""},
        {"messages": [user(image_part(data_url(png()), detail=None))]},
        {"messages": [user("a", image_part(data_url(png()), detail=""))]},
        {"messages": [user("a", image_part(data_url(png()), detail="original"))]},
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "system", "content": "b"},
                user("c"),
            ]
        },
        {"messages": [user("a"), {"role": "assistant"}, user("b")]},
        {"messages": [user("a"), {"role": "assistant", "content": None}, user("b")]},
        {
            "messages": [
                user("a"),
                {"role": "assistant", "content": "", "function_call": {"name": "f"}},
                {"role": "function", "name": "f", "content": "x"},
            ]
        },
    ],
    ids=lambda b: json.dumps(b)[:50],
)
def test_what_sloppy_clients_send(service, body):
    result = client_for(service).post(
        "/v1/chat/completions", json={"messages": [user("hi")]} | body
    )
    assert result.status_code == 200, result.get_json()


@pytest.mark.parametrize(
    "body, chosen",
    [
        (
            {"frequency_penalty": 0.5, "presence_penalty": -1},
            {"frequency_penalty": 0.5, "presence_penalty": -1},
        ),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100}}),
        ({"logit_bias": [[5, -1.5], [6, False]]}, {"logit_bias": {"5": -1.5, "6": -100}}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"min_tokens": 3, "stop_token_ids": [1]}, {"min_tokens": 3, "stop_token_ids": (1,)}),
        ({"guided_choice": ["a", "b"]}, {"grammar": {"choice": ["a", "b"]}}),
        ({"guided_regex": "[ab]"}, {"grammar": {"regex": "[ab]"}}),
        ({"structured_outputs": {"regex": "a"}}, {"grammar": {"regex": "a"}}),
        (
            {"structured_outputs": {"json": {"type": "object"}}},
            {"json_schema": loose({"type": "object"})},
        ),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": {"type": "object"}}, {"json_schema": loose({"type": "object"})}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "array"}}},
            {"json_schema": loose({"type": "array"})},
        ),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": loose({"type": "object"})}),
        (
            {"messages": [user("a"), {"role": "assistant", "content": "I"}]},
            {"continue_final_message": True},
        ),
    ],
    ids=lambda b: json.dumps(b)[:50],
)
def test_what_clients_send_becomes_options(service, body, chosen):
    client = client_for(service)
    result = client.post("/v1/chat/completions", json={"messages": [user("hi")]} | body)
    assert result.status_code == 200, result.get_json()
    given = service.tickets[-1].chosen
    assert {k: given[k] for k in chosen} == chosen


def test_several_answers(requested, service):
    service.calls = ()
    result = requested(model="fake", messages=[user("hi")], n=3)
    assert [c.index for c in result.choices] == [0, 1, 2] and result.usage.prompt_tokens == 7
    assert result.usage.completion_tokens == 3 * service.tickets[-1].stated
    texts = {}
    for chunk in requested(model="fake", messages=[user("hi")], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == dict.fromkeys((0, 1), result.choices[0].message.content)


def test_plain_prompts_go_in_as_they_are(service):
    client = client_for(service)

    def post(**body):
        return client.post("/v1/completions", json=body).get_json()

    result = post(prompt=["one", "two"], n=2)
    assert [c["index"] for c in result["choices"]] == [0, 1, 2, 3]
    assert [c["text"].split(": ")[-1] for c in result["choices"]] == ["one", "one", "two", "two"]
    assert post(prompt=[5, 6])["choices"][0]["text"].endswith(": 5 6")
    assert post(prompt="one", echo=True)["choices"][0]["text"].startswith("one1 messages")
    for body, param in (({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({}, "prompt")):
        assert post(**body)["error"]["param"].startswith(param)


def test_what_is_left_of_a_history_is_refused_by_its_place(service):
    broken = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}
    result = client_for(service).post(
        "/v1/chat/completions", json={"messages": [user("a"), broken]}
    )
    assert result.get_json()["error"]["param"] == "messages[1].tool_calls[0].function.name"
