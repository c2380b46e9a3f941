from __future__ import annotations

import base64
import json

import ollama
import pytest
from fake_service import CONTEXT, FakeService
from serving import client_for, loose, png, running

from mtmd import BusyError, DeviceMemoryError, ToolCall
from mtmd.web.settings import JsonLimits

RED = base64.b64encode(png(20, 10)).decode()


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def client(service):
    return client_for(service)


@pytest.fixture
def sdk(service):
    """The official client, on a real server."""
    with running(service) as server:
        made = ollama.Client(server.url, timeout=20, trust_env=False)
        yield made
        made._client.close()


def test_the_official_client_chats_about_pictures(sdk, service):
    result = sdk.chat(
        "fake:latest",
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what?", "images": [png(20, 10), png(64, 4, kind="JPEG")]},
        ],
        options={"temperature": 0.5, "num_predict": 40, "seed": 3, "stop": ["END"], "num_ctx": 99},
        keep_alive="5m",
    )
    assert result.message.content == "2 messages, pictures [(20, 10), (64, 4)]: what?"
    assert (result.model, result.done, result.done_reason) == ("fake:latest", True, "stop")
    assert (result.prompt_eval_count, result.eval_count) == (7, 8)
    assert result.total_duration > 0 and result.load_duration == 0
    chosen = service.tickets[0].settings
    assert (chosen.temperature, chosen.max_tokens, chosen.seed, chosen.stop) == (
        0.5,
        40,
        3,
        ("END",),
    )


def test_the_official_client_streams(sdk):
    parts = list(sdk.chat("fake", [{"role": "user", "content": "hello there"}], stream=True))
    assert "".join(p.message.content for p in parts) == "1 messages, pictures []: hello there"
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count, parts[-1].message.content) == (
        "stop",
        6,
        "",
    )


def test_the_official_client_generates(sdk, service):
    result = sdk.generate("fake", "what?", system="be brief", images=[RED], format="json")
    assert result.response == "2 messages, pictures [(20, 10)]: what?" and result.done
    assert service.tickets[0].chosen["json_schema"] == {"type": "object"}
    parts = list(sdk.generate("fake", "hi", stream=True, options={"num_predict": 2}))
    assert "".join(p.response for p in parts) == "1 messages,"
    assert parts[-1].done_reason == "length"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    sdk.generate("fake", "hi", format=schema, options={"num_predict": -1})
    assert service.tickets[-1].chosen["json_schema"] == loose(schema)
    assert service.tickets[-1].settings.max_tokens == CONTEXT


def test_the_official_client_lists_and_shows_the_model(service):
    with running(service, aliases=("camera:small",)) as server:
        sdk = ollama.Client(server.url, timeout=20, trust_env=False)
        assert [m.model for m in sdk.list().models] == ["fake:latest", "camera:small"]
        shown = sdk.show("fake:latest")
        assert shown.modelinfo == {
            "general.architecture": "gemma3",
            "general.basename": "fake",
            "general.parameter_count": 4_300_079_472,
            "gemma3.context_length": CONTEXT,
            "gemma3.embedding_length": 2560,
        }
        assert shown.template == FakeService.chat_template
        assert shown.details == sdk.list().models[0].details
        assert shown.details.model_dump() == {
            "parent_model": "",
            "format": "gguf",
            "family": "gemma3",
            "families": ["gemma3", "clip"],
            "parameter_size": "4.3B",
            "quantization_level": "Q4_K_M",
        }
        assert shown.capabilities == ["completion", "tools", "vision"]
        (loaded,) = sdk.ps().models
        assert (loaded.model, loaded.context_length, int(loaded.size)) == (
            "fake:latest",
            CONTEXT,
            1000,
        )
        assert sdk.chat("camera:small", [{"role": "user", "content": "hi"}]).model == "camera:small"
        sdk._client.close()


def test_the_official_client_hears_that_there_are_no_vectors(sdk, client):
    reported = "'fake' gives no vectors; serve a dual encoder"
    with pytest.raises(ollama.ResponseError, match=reported) as new:
        sdk.embed("fake:latest", ["a", "b"], dimensions=8)
    with pytest.raises(ollama.ResponseError, match=reported) as old:
        sdk.embeddings("fake", "a")
    assert (new.value.status_code, old.value.status_code) == (400, 400)
    with pytest.raises(ollama.ResponseError, match=r"has .fake") as missing:
        sdk.embed("other", "a")
    assert missing.value.status_code == 404
    assert list(client.post("/api/embed", json={"input": "a"}).get_json()) == ["error"]


def test_the_official_client_raises_its_own_errors(sdk, service):
    with pytest.raises(ollama.ResponseError, match=r"has .fake") as missing:
        sdk.chat("other", [{"role": "user", "content": "hi"}])
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"images\[0\]") as bad:
        sdk.chat(
            "fake",
            [{"role": "user", "content": "hi", "images": [base64.b64encode(b"no").decode()]}],
        )
    assert bad.value.status_code == 400
    service.refuses = BusyError("64 requests wait, the maximum; try again later")
    with pytest.raises(ollama.ResponseError) as busy:
        sdk.generate("fake", "hi")
    assert busy.value.status_code == 429
    service.refuses, service.fails = None, DeviceMemoryError("found 3 bytes, expected 4")
    with pytest.raises(ollama.ResponseError, match="found 3 bytes"):
        list(sdk.generate("fake", "hi", stream=True))


def look(at: str) -> str:
    """Looks closer.

    Args:
        at: where to look
    """
    return at


def seen(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


CALLS = (ToolCall("call_1", "look", '{"at": "left"}'), ToolCall("call_2", "look", '{"at": "up"}'))
MADE = [("look", {"at": "left"}), ("look", {"at": "up"})]


def test_the_official_client_gets_calls(sdk, service):
    service.calls = CALLS
    requested = [{"role": "user", "content": "hi"}]
    result = sdk.chat("fake", requested, tools=[look])
    assert (seen(result.message), result.done_reason) == (MADE, "stop")
    parts = list(sdk.chat("fake", requested, tools=[look], stream=True))
    assert [call for part in parts for call in seen(part.message)] == MADE
    assert [p.done for p in parts] == [False, False, True]
    (tool,) = service.tickets[0].settings.toolbox.tools
    assert tool.name == "look" and tool.schema["required"] == ["at"]
    service.calls, service.calls_finish = (ToolCall("call_1", "look", '{"at"'),), "length"
    result = sdk.chat("fake", requested, tools=[look])
    assert (seen(result.message), result.done_reason) == ([], "length")


def test_results_find_their_calls(sdk, service):
    service.calls = CALLS
    requested = [{"role": "user", "content": "hi"}]
    stated = sdk.chat("fake", requested, tools=[look]).message
    other = {"role": "assistant", "tool_calls": [{"function": {"name": "see", "arguments": {}}}]}
    service.calls = ()
    result = sdk.chat(
        "fake",
        [
            *requested,
            stated,
            other,
            {"role": "tool", "content": "of see", "tool_name": "see", "images": [png(64, 4)]},
            {"role": "tool", "content": "left", "tool_name": "look"},
            {"role": "tool", "content": "up"},
            {"role": "tool", "content": "of none", "tool_name": "none"},
        ],
        tools=[look],
    )
    assert result.message.content == "7 messages, pictures [(64, 4)]: of none"
    messages = service.tickets[-1].messages
    results = [(m.get("tool_call_id"), m.get("name")) for m in messages[3:]]
    ids = [call["id"] for message in messages[1:3] for call in message["tool_calls"]]
    assert len(set(ids)) == 3
    assert results == [(ids[2], "see"), (ids[0], "look"), (ids[1], "look"), ("", None)]


def test_what_says_nothing_loads_a_model_that_is_loaded(client, service):
    for path in ("/api/chat", "/api/generate"):
        result = client.post(path, json={"model": "fake"}).get_json()
        assert (result["done"], result["done_reason"]) == (True, "load")
    assert service.tickets == []


@pytest.mark.parametrize(
    "more, named",
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        ({"think": "endless"}, "think"),
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"num_predict": 0}}, "num_predict"),
        ({"format": "yaml"}, "format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_refused_by_name(client, more, named):
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": None}
    result = client.post("/api/chat", json=body | more)
    assert result.status_code == 400 and list(result.get_json()) == ["error"]
    assert named in result.get_json()["error"]


def test_an_answer_goes_on_from_what_the_assistant_says_last(client, service):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    for path, body in (
        ("/api/chat", {"messages": messages, "options": {"presence_penalty": 1}}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9}),
        ("/v1/responses", {"input": messages}),
    ):
        assert client.post(path, json={"model": "fake", "stream": False} | body).status_code == 200
        assert service.tickets[-1].settings.continue_final_message
    assert service.tickets[0].settings.presence_penalty == 1


def test_keys_hold_for_it(service):
    client = client_for(service, api_keys=("a-long-enough-key",))
    result = client.get("/api/tags")
    assert result.status_code == 401 and isinstance(result.get_json()["error"], str)
    key = {"Authorization": "Bearer a-long-enough-key"}
    assert client.get("/api/tags", headers=key).status_code == 200


def test_pictures_in_base64_count_as_pictures(service):
    client = client_for(service, json=JsonLimits(bytes=20_000))
    noise = base64.b64encode(png(20, 10) + bytes(60_000)).decode()

    def ask(text):
        body = {"model": "fake", "stream": False, "prompt": "hi", "images": [text]}
        return client.post("/api/generate", json=body).status_code

    assert ask(noise) == 200
    assert ask("A" * len(noise)) == 413
    assert (
        client.post(
            "/api/generate", data=json.dumps({"x": "z" * 30_000}), content_type="application/json"
        ).status_code
        == 413
    )


def test_a_program_may_leave_the_content_type_out_and_a_web_page_may_not(client):
    """LiteLLM leaves it out."""
    body = json.dumps({"model": "fake", "stream": False, "prompt": "hi"})
    assert client.post("/api/generate", data=body).status_code == 200
    for header in ({"Origin": "http://localhost"}, {"Sec-Fetch-Site": "same-origin"}):
        assert client.post("/api/generate", data=body, headers=header).status_code == 415


def test_the_lines_of_ollamas_own_documentation(client):
    """`curl http://localhost:11434/api/generate -d '{...}'`, whose type is that of a form."""
    body = json.dumps({"model": "fake", "stream": False, "prompt": "hi"})
    curl = "application/x-www-form-urlencoded"
    for path in ("/api/generate", "/api/show"):
        assert client.post(path, data=body, content_type=curl).status_code == 200
    for name, value in (
        ("Origin", "http://localhost"),
        ("Referer", "http://elsewhere/form.html"),
        ("Sec-Fetch-Site", "none"),
    ):
        answer = client.post("/api/generate", data=body, content_type=curl, headers={name: value})
        assert answer.status_code == 415, name
    for path, kind in (("/api/generate", "text/plain"), ("/v1/chat/completions", curl)):
        assert client.post(path, data=body, content_type=kind).status_code == 415


def test_null_is_as_good_as_nothing(client):
    nothing = dict.fromkeys(("system", "images", "template", "context", "suffix", "raw", "format"))
    body = {"model": "fake", "stream": False, "options": None, "keep_alive": None}
    result = client.post("/api/generate", json=body | nothing | {"prompt": "hi"})
    assert result.status_code == 200 and result.get_json()["response"].endswith("hi")
    loaded = client.post("/api/generate", json=body | nothing | {"prompt": None})
    assert (loaded.status_code, loaded.get_json()["done_reason"]) == (200, "load")
