from __future__ import annotations

import openai
import pydantic
import pytest
from fake_service import FakeService
from serving import client_for, data_url, noise, png, running

from mtmd import DeviceMemoryError, ToolCall
from mtmd.web.answering.request import Turn
from mtmd.web.errors import ApiError
from mtmd.web.interfaces.stored_responses import LIFETIME_S, RECORD_BYTES, StoredResponses

TOOLS = [
    {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        "strict": False,
    }
]
CALLS = (ToolCall("call_1", "look", '{"at": "left"}'), ToolCall("call_2", "look", "{}"))
RED = {"type": "input_image", "image_url": data_url(png(20, 10)), "detail": "high"}


def stated(text, *pictures):
    return [{"role": "user", "content": [*pictures, {"type": "input_text", "text": text}]}]


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def sdk(service):
    """The official client, on a real server."""
    with (
        running(service) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20
        ) as client,
    ):
        yield client


def test_the_official_client_asks_about_pictures(sdk, service):
    result = sdk.responses.create(
        model="fake",
        instructions="be brief",
        input=stated("what?", RED),
        temperature=0.5,
        max_output_tokens=40,
        metadata={"for": "us"},
    )
    assert result.output_text == "2 messages, pictures [(20, 10)]: what?"
    assert (result.status, result.model, result.metadata) == ("completed", "fake", {"for": "us"})
    usage = result.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 6, 13)
    assert usage.input_tokens_details.cached_tokens == 3
    chosen = service.tickets[0].settings
    assert (chosen.temperature, chosen.max_tokens, chosen.detail) == (0.5, 40, "high")


def test_the_official_client_streams(sdk):
    with sdk.responses.stream(model="fake", input="hello there") as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert whole.output_text == "1 messages, pictures []: hello there"
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == whole.output_text
    )
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(e.type.removeprefix("response.") for e in events))
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip


def test_answers_in_a_schema(sdk, service):
    class Count(pydantic.BaseModel):
        n: int

    service.words = '{"n":3}'
    result = sdk.responses.parse(model="fake", input="how many?", text_format=Count)
    assert result.output_parsed == Count(n=3)
    assert service.tickets[0].chosen["json_schema"]["strict"] is True
    properties = service.tickets[0].chosen["json_schema"]["schema"]["properties"]
    assert properties["n"]["type"] == "integer"


def test_an_answer_that_is_cut_is_incomplete(sdk):
    result = sdk.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert (result.status, result.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_conversation_goes_on_by_the_id_of_a_response(sdk):
    first = sdk.responses.create(model="fake", instructions="a", input=stated("what?", RED))
    assert first.store
    second = sdk.responses.create(model="fake", input="and?", previous_response_id=first.id)
    assert second.output_text == "3 messages, pictures [(20, 10)]: and?"
    third = sdk.responses.create(
        model="fake", instructions="b", input="so?", previous_response_id=second.id, store=False
    )
    assert third.output_text.startswith("6 messages,") and not third.store
    assert sdk.responses.retrieve(second.id).output_text == second.output_text
    for id_ in (third.id, "resp_other"):
        with pytest.raises(openai.BadRequestError, match="no response of this id") as gone:
            sdk.responses.create(model="fake", input="?", previous_response_id=id_)
        assert gone.value.code == "previous_response_not_found"
    sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(second.id)


def test_another_key_does_not_see_them():
    keys = ("a-long-enough-key", "another-such-key")
    client = client_for(FakeService(), api_keys=keys)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in keys)
    id_ = client.post("/v1/responses", json={"input": "hi"}, headers=mine).get_json()["id"]
    assert client.get(f"/v1/responses/{id_}", headers=mine).status_code == 200
    assert client.get(f"/v1/responses/{id_}", headers=other).status_code == 404
    body = {"input": "hi", "previous_response_id": id_}
    assert client.post("/v1/responses", json=body, headers=other).status_code == 400


def test_the_oldest_make_room():
    now = [0.0]
    saved = StoredResponses(lambda: 2, 2 * (2 * RECORD_BYTES + 1050), lambda: now[0])

    def add(id_, size, owner="anna"):
        return saved.add(owner, (Turn("user", ("x" * size,)),), {"id": id_})

    def there(*ids):
        result = []
        for id_ in ids:
            for owner in ("anna", "ben"):
                try:
                    result.append(saved.get(owner, id_).body["id"])
                except ApiError:
                    continue
        return result

    add("a", 500)
    add("b", 400)
    add("of ben", 400, "ben")
    assert there("a", "b", "of ben") == ["a", "b", "of ben"]
    add("c", 500)
    assert there("a", "b", "c", "of ben") == ["b", "c", "of ben"]
    assert not add("d", 20_000) and there("b", "c", "d") == ["b", "c"]
    now[0] = LIFETIME_S
    assert there("b", "c", "of ben") == []


pdf = {"type": "input_file", "file_data": data_url(b"%PDF-1.7", "application/pdf")}
by_address = {"type": "input_file", "file_url": "https://example.com/a.png"}


@pytest.mark.parametrize(
    "more, named",
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": stated("x", {"type": "input_file", "file_id": "x"})},
            "input[0].content[0].file_id",
        ),
        ({"input": stated("x", {"type": "input_image"})}, "input[0].content[0]"),
        ({"input": stated("x", {"type": "input_file"})}, "input[0].content[0]"),
        ({"input": stated("x", pdf)}, "input[0].content[0].file_data"),
        ({"input": stated("x", by_address)}, "input[0].content[0].file_url"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
        ({"model": "other"}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(more, named):
    result = client_for(FakeService()).post("/v1/responses", json={"input": "hi"} | more)
    assert result.status_code == (404 if named == "model" else 400)
    assert result.get_json()["error"]["param"] == named


def test_pictures_come_as_files(sdk):
    files = [
        {"type": "input_file", "filename": "a.png", "file_data": data_url(png(20, 10))},
        {"type": "input_file", "filename": "b.png", "file_data": data_url(noise(1)).split(",")[1]},
        {"type": "input_file", "file_url": data_url(png(8, 6))},
    ]
    result = sdk.responses.create(model="fake", input=stated("sizes?", *files))
    assert "[(20, 10), (200, 150), (8, 6)]" in result.output_text


def test_what_fails_in_a_stream_is_its_last_event(sdk, service):
    service.fails = DeviceMemoryError("found 3 bytes, expected 4")
    events = list(sdk.responses.create(model="fake", input="hi", stream=True))
    assert events[-1].type == "response.failed"
    assert "found 3 bytes" in events[-1].response.error.message


def called(output):
    return [(i.call_id, i.name, i.arguments) for i in output if i.type == "function_call"]


MADE = [(c.id, c.name, c.arguments) for c in CALLS]


def test_the_official_client_gets_calls_and_goes_on_with_results(sdk, service):
    service.calls = CALLS
    first = sdk.responses.create(
        model="fake", input="hi", tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert called(first.output) == MADE and first.status == "completed"
    assert (first.tool_choice, first.parallel_tool_calls) == ("required", False)
    assert first.tools[0].name == "look"
    box = service.tickets[0].settings.toolbox
    assert (box.choice.mode, box.several) == ("required", False)
    service.calls = ()
    results = [
        {"type": "function_call_output", "call_id": "call_1", "output": "a tree"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [RED, {"type": "input_text", "text": "this"}],
        },
    ]
    second = sdk.responses.create(
        model="fake", input=results, previous_response_id=first.id, tools=TOOLS
    )
    assert second.output_text == "4 messages, pictures [(20, 10)]: this"
    saved = service.tickets[-1].messages
    assert saved[1]["tool_calls"] == [call.asdict() for call in CALLS]
    assert saved[2] == {
        "role": "tool", "content": "a tree", "tool_call_id": "call_1", "name": "look"
    }  # fmt: skip
    calls = [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in MADE]
    stated = {"role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]}
    history = [{"role": "user", "content": "hi"}, stated, calls[0], calls[1], *results]
    sdk.responses.create(model="fake", input=history, tools=TOOLS)
    requested = service.tickets[-1]
    assert requested.messages[1:] == [
        {**saved[1], "content": "let me see"},
        *requested.messages[2:],
    ]
    assert [m["role"] for m in requested.messages] == ["user", "assistant", "tool", "tool"]
    assert requested.settings.detail == "high"


def test_streamed_calls_join_to_the_whole(sdk, service):
    service.calls = CALLS
    with sdk.responses.stream(model="fake", input="hi", tools=TOOLS) as stream:
        events = list(stream)
        whole = stream.get_final_response()
    assert called(whole.output) == MADE
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == "".join(call.arguments for call in CALLS)
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert done == [call.arguments for call in CALLS]
    assert called([e.item for e in events if e.type == "response.output_item.done"]) == MADE
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_a_call_that_is_cut_is_incomplete(sdk, service):
    service.calls, service.calls_finish = (CALLS[0], ToolCall("call_2", "look", '{"at"')), "length"
    result = sdk.responses.create(model="fake", input="hi", tools=TOOLS)
    assert [i.status for i in result.output] == ["completed", "incomplete"]
    assert result.status == "incomplete"
