from __future__ import annotations

import base64
import importlib
import json

import pytest
from fake_service import FakeService
from serving import client_for, loose, png, running

from mtmd import BusyError, DeviceMemoryError, ToolCall

KEY = "a-long-enough-key"


@pytest.fixture(scope="module")
def anthropic():
    """Which takes three seconds to import: the process that has none of these tests does not."""
    return importlib.import_module("anthropic")


TOOLS = [
    {
        "name": "look",
        "description": "Looks closer",
        "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
]
CALLS = (ToolCall("call_1", "look", '{"at": "left"}'), ToolCall("call_2", "look", "{}"))
USED = [
    {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
    for c in CALLS
]


def picture(width, height):
    data = base64.b64encode(png(width, height)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def hi(*more):
    return [{"role": "user", "content": "hi"}, *more]


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def sdk(service, anthropic):
    """The official client, which sends its key as X-Api-Key, on a real server that asks for one."""
    with (
        running(service, api_keys=(KEY,)) as server,
        anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=20) as client,
    ):
        yield client


def test_the_official_client_asks_about_pictures(sdk, service):
    result = sdk.messages.create(
        model="fake",
        max_tokens=40,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5},
        messages=[
            {
                "role": "user",
                "content": [picture(20, 10), {"type": "text", "text": "what?"}, picture(64, 4)],
            }
        ],
    )
    assert result.content[0].text == "2 messages, pictures [(20, 10), (64, 4)]: what?"
    assert (result.type, result.role, result.model) == ("message", "assistant", "fake")
    assert (result.stop_reason, result.stop_sequence) == ("end_turn", None)
    usage = result.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 8)
    assert result._request_id.startswith("req-")
    chosen = service.tickets[0].settings
    assert (chosen.temperature, chosen.max_tokens) == (0.5, 40)


def test_the_official_client_streams(sdk):
    with sdk.messages.stream(model="fake", max_tokens=99, messages=hi()) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert whole.content[0].text == "1 messages, pictures []: hi"
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == 5
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (4, 3)
    kinds = [kind for kind in kinds if kind != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_raw_stream_tells_the_tokens_of_the_prompt_first(sdk):
    events = list(
        sdk.messages.create(
            model="fake",
            max_tokens=99,
            stream=True,
            messages=[{"role": "user", "content": [picture(4, 4), {"type": "text", "text": "x"}]}],
        )
    )
    assert events[0].type == "message_start" and events[0].message.usage.input_tokens == 7


def test_why_it_ended(sdk):
    def ask(**more):
        result = sdk.messages.create(**{"model": "fake", "max_tokens": 99, "messages": hi()} | more)
        return result.stop_reason, result.stop_sequence, result.content[0].text

    assert ask(max_tokens=2) == ("max_tokens", None, "1 messages,")
    stopped = ask(stop_sequences=["no", "pictures"])
    assert stopped == ("stop_sequence", "pictures", "1 messages,")


def test_the_official_client_counts(sdk):
    count = sdk.messages.count_tokens
    assert count(model="fake", messages=hi()).input_tokens == 10
    messages = [{"role": "user", "content": [picture(4, 4), {"type": "text", "text": "x"}]}]
    assert count(model="fake", messages=messages, system="be brief").input_tokens == 14


def test_answers_in_a_schema(sdk, service):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    sdk.messages.create(
        model="fake",
        max_tokens=9,
        messages=hi(),
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert service.tickets[0].chosen["json_schema"] == loose(schema)


def test_the_official_client_raises_its_own_errors(sdk, service, anthropic):
    def ask(**more):
        return sdk.messages.create(**{"model": "fake", "max_tokens": 9, "messages": hi()} | more)

    with pytest.raises(anthropic.NotFoundError, match=r"has .fake") as missing:
        ask(model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    bad = picture(4, 4)
    bad["source"]["data"] = "iVBORw0KGgo="
    location = r"messages\[0\]\.content\[0\]\.source\.base64"
    with pytest.raises(anthropic.BadRequestError, match=location):
        ask(messages=[{"role": "user", "content": [bad, {"type": "text", "text": "x"}]}])
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type: found 'any' without"):
        ask(tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"})
    for tool in ({"name": "a b", "input_schema": {}}, {"input_schema": {}}):
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].name: found"):
            ask(tools=[tool])
    with pytest.raises(
        anthropic.BadRequestError, match=r"tools\[0\].input_schema.type: found 'arr"
    ):
        ask(tools=[{"name": "look", "input_schema": {"type": "array"}}])
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice.name: found 'x', expected"):
        ask(tools=TOOLS, tool_choice={"type": "tool", "name": "x"})
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice.type: found 'any' without"):
        ask(tool_choice={"type": "any"})
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]: found in a"):
        ask(messages=[{"role": "user", "content": [used]}])
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        ask(thinking={"type": "sometimes"})
    with pytest.raises(anthropic.BadRequestError, match="document of plain text"):
        ask(messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}])
    service.refuses = BusyError("64 requests wait, the maximum; try again later")
    with pytest.raises(anthropic.RateLimitError) as busy:
        ask()
    assert busy.value.response.headers["retry-after"] == "1"
    service.refuses, service.fails = None, DeviceMemoryError("found 3 bytes, expected 4")
    with pytest.raises(anthropic.APIError, match="found 3 bytes"):
        list(ask(stream=True))


def test_a_wrong_key_is_refused_in_its_own_form(service):
    client = client_for(service, api_keys=(KEY,))
    result = client.post("/v1/messages", json={}, headers={"X-Api-Key": "another-such-key"})
    assert result.status_code == 401
    assert result.get_json()["error"]["type"] == "authentication_error"
    result = client.post("/v1/messages", json={}, headers={"X-Api-Key": KEY})
    assert result.status_code == 400 and result.get_json()["type"] == "error"


def test_a_long_body_with_the_key_in_x_api_key_is_read(service, anthropic):
    text = "x" * 20_000
    with (
        running(service, api_keys=(KEY,)) as server,
        anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client,
    ):
        system = [{"type": "text", "text": "", "cache_control": {"type": "e", "x": text * 5}}]
        result = client.messages.create(model="fake", max_tokens=9, system=system, messages=hi())
        assert result.content


def test_the_official_client_gets_calls(sdk, service):
    service.calls = CALLS
    result = sdk.messages.create(model="fake", max_tokens=9, messages=hi(), tools=TOOLS)
    assert result.stop_reason == "tool_use"
    assert [block.model_dump(exclude_unset=True) for block in result.content] == USED
    box = service.tickets[0].settings.toolbox
    assert [(t.name, t.description, t.schema) for t in box.tools] == [
        ("look", "Looks closer", TOOLS[0]["input_schema"])
    ]


def test_streamed_calls_join_to_the_whole(sdk, service):
    service.calls = CALLS
    with sdk.messages.stream(
        model="fake", max_tokens=9, messages=hi(), tools=[{"type": "custom", **TOOLS[0]}]
    ) as stream:
        events = list(stream)
        whole = stream.get_final_message()
    assert [block.model_dump(exclude_unset=True) for block in whole.content] == USED
    assert whole.stop_reason == "tool_use"
    parts = [e.partial_json for e in events if e.type == "input_json"]
    assert parts == ['{"at": ', '"left"}', "{", "}"]
    blocks = [(e.type, e.index) for e in events if e.type.startswith("content_block_st")]
    assert blocks == [(f"content_block_{what}", i) for i in (0, 1) for what in ("start", "stop")]


def test_a_call_that_is_cut_is_left_out(sdk, service):
    service.calls, service.calls_finish = (CALLS[0], ToolCall("call_2", "look", '{"at"')), "length"
    result = sdk.messages.create(model="fake", max_tokens=9, messages=hi(), tools=TOOLS)
    assert (result.stop_reason, len(result.content)) == ("max_tokens", 1)


@pytest.mark.parametrize(
    "choice, mode, names, several",
    [
        ({"type": "auto"}, "auto", (), True),
        ({"type": "any"}, "required", (), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", (), False),
        ({"type": "tool", "name": "look"}, "required", ("look",), False),
        ({"type": "none"}, "none", (), True),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_choices(service, choice, mode, names, several):
    body = {"model": "fake", "max_tokens": 9, "messages": hi(), "tools": TOOLS}
    client_for(service).post("/v1/messages", json={**body, "tool_choice": choice})
    box = service.tickets[0].settings.toolbox
    assert (box.choice.mode, box.choice.names, box.several) == (mode, names, several)


def test_calls_and_results_in_the_history(sdk, service):
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "a tree"},
        {
            "type": "tool_result",
            "tool_use_id": "call_2",
            "content": [{"type": "text", "text": "this"}, picture(64, 4)],
        },
        {"type": "tool_result", "tool_use_id": "call_2", "is_error": True},
        {"type": "text", "text": "and?"},
    ]
    history = hi(
        {"role": "assistant", "content": [{"type": "text", "text": "let me see"}, *USED]},
        {"role": "user", "content": results},
    )
    result = sdk.messages.create(model="fake", max_tokens=9, messages=history, tools=TOOLS)
    assert result.content[0].text == "6 messages, pictures [(64, 4)]: and?"
    _, called, first, second, third, last = service.tickets[0].messages
    assert called["content"] == "let me see"
    assert called["tool_calls"] == [c.asdict() | {"function": {"name": "look", "arguments": a}}
        for c, a in zip(CALLS, ('{"at":"left"}', "{}"), strict=True)]  # fmt: skip
    assert first == {"role": "tool", "content": "a tree", "tool_call_id": "call_1", "name": "look"}
    assert [part["type"] for part in second["content"]] == ["text", "image"]
    assert (third["content"], last["role"]) == ("Error: ", "user")
    history.pop()
    sdk.messages.count_tokens(model="fake", messages=history, tools=TOOLS)
    assert not service.tickets[0].settings.continue_final_message


def test_the_first_block_of_claude_code_is_left_out(service):
    """It is another one with every request: the prompts' beginnings would never be the same."""
    client = client_for(service)

    def requested(system):
        body = {"model": "fake", "max_tokens": 5, "messages": hi(), "system": system}
        assert client.post("/v1/messages", json=body).status_code == 200
        return [m["content"] for m in service.tickets[-1].messages if m["role"] == "system"]

    billing = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
    blocks = [{"type": "text", "text": text} for text in (billing, "be brief", "and kind")]
    assert requested(blocks) == [blocks[1:]]  # apart: the form that a template reads joins them
    assert requested(f"{billing}\nbe brief") == ["be brief"]
    assert requested(blocks[:1]) == requested(billing) == []
    saved = "say x-anthropic-billing-header: a"
    assert requested(saved) == [saved]
