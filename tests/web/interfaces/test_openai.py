from __future__ import annotations

import json

import openai
import pytest
from fake_service import CONTEXT, FakeService, until
from serving import (
    client_for,
    data_url,
    image_part,
    loose,
    noise,
    png,
    post_chat,
    raw_request,
    running,
    user,
)

from mtmd import BusyError, DeviceMemoryError, MtmdError, PromptError

RED, WIDE = data_url(png(20, 10)), data_url(png(64, 4, "blue", "JPEG"), "image/jpeg")


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def client(service):
    return client_for(service)


@pytest.fixture
def served(service):
    """The official client, on a real server."""
    with (
        running(service) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20
        ) as client,
    ):
        yield client


def events(response):
    return [
        json.loads(line[6:])
        for line in response.get_data(as_text=True).split("\n\n")
        if line.startswith("data: {")
    ]


def test_the_official_client_asks_about_pictures_and_gets_answer_and_receipt(served):
    parts = [{"type": "text", "text": "what?"}, image_part(RED), image_part(WIDE)]
    result = served.chat.completions.create(
        model="fake",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}],
    )
    assert result.choices[0].message.content == "2 messages, pictures [(20, 10), (64, 4)]: what?"
    assert (result.choices[0].finish_reason, result.model, result.object) == (
        "stop",
        "fake",
        "chat.completion",
    )
    assert (
        result.usage.prompt_tokens,
        result.usage.completion_tokens,
        result.usage.total_tokens,
    ) == (7, 8, 15)
    assert result.usage.prompt_tokens_details.cached_tokens == 3
    receipt = result.usage.model_extra["mtmd_receipt"]
    assert [i["original_size"] for i in receipt["images"]] == [[20, 10], [64, 4]]
    assert result._request_id.startswith("req-")


def test_the_official_client_streams(served):
    stream = served.chat.completions.create(
        model="fake",
        messages=[user("hello there", image_part(RED))],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_progress": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == "1 messages, pictures [(20, 10)]: hello there"
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 7)
    assert chunks[-1].usage.model_extra["mtmd_receipt"]["finish"] == "stop"
    reported = [c.model_extra["mtmd"]["progress"] for c in chunks if "mtmd" in c.model_extra]
    assert reported == [
        {"stage": "encode", "done": 1, "total": 1},
        {"stage": "prefill", "done": 0, "total": 7},
    ]
    assert len({c.id for c in chunks}) == 1


def test_every_chunk_but_the_usage_has_a_choice_to_look_at(served):
    stream = served.chat.completions.create(
        model="fake", messages=[user("hi", image_part(RED))], stream=True
    )
    chunks = list(stream)
    assert all(isinstance(c.choices[0].delta.content, (str, type(None))) for c in chunks)
    assert not any("mtmd" in c.model_extra for c in chunks)  # nothing that was not asked for


def test_the_official_client_raises_its_own_errors(served, service):
    ask = served.chat.completions.create
    with pytest.raises(openai.NotFoundError, match=r"has .fake") as missing:
        ask(model="gpt-9", messages=[user("hi")])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="fake", messages=[user("hi", image_part("data:image/png;base64,iVBORw0KGgo="))])
    assert (bad.value.param, bad.value.code) == (
        "messages[0].content[1].image_url",
        "invalid_image",
    )
    with pytest.raises(openai.BadRequestError) as several:
        ask(model="fake", messages=[user("hi")], n=999)
    assert several.value.param == "n"
    service.refuses = BusyError("64 requests wait, the maximum; try again later")
    with pytest.raises(openai.RateLimitError) as busy:
        ask(model="fake", messages=[user("hi")])
    assert busy.value.response.headers["retry-after"] == "1"
    service.refuses, service.fails = None, DeviceMemoryError("found 3 bytes, expected 4")
    with pytest.raises(openai.APIError, match="found 3 bytes"):
        list(ask(model="fake", messages=[user("hi")], stream=True))


def test_the_official_client_lists_models_and_keeps_files(served):
    assert [m.id for m in served.models.list()] == ["fake"]
    assert served.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        served.models.retrieve("other")
    saved = served.files.create(file=("../../a b.png", png(8, 6)), purpose="vision")
    assert (saved.filename, saved.bytes) == ("a b.png", len(png(8, 6)))
    assert [f.id for f in served.files.list()] == [saved.id] == [served.files.retrieve(saved.id).id]
    assert served.files.content(saved.id).read() == png(8, 6)
    for part in (image_part(saved.id), {"type": "file", "file": {"file_id": saved.id}}):
        answer = served.chat.completions.create(model="fake", messages=[user("size?", part)])
        assert "[(8, 6)]" in answer.choices[0].message.content
    assert served.files.delete(saved.id).deleted
    with pytest.raises(openai.NotFoundError):
        served.chat.completions.create(model="fake", messages=[user("size?", image_part(saved.id))])


@pytest.mark.parametrize("data", [png(), noise(1), png(kind="JPEG")], ids=["short", "long", "JPEG"])
def test_base64_in_place_of_a_url_is_told(client, data):
    reply = post_chat(client, "what?", image_part(data_url(data).partition(",")[2]))
    reported = "image_url: found base64 alone, expected a data URL, as data:image/png;base64,..., "
    assert reply.status_code == 400 and reported in reply.get_json()["error"]["message"]


def file_part(data, name="a.png"):
    return {"type": "file", "file": {"file_data": data, "filename": name}}


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("is_url", [False, True], ids=["base64", "a data URL"])
def test_the_official_client_sends_pictures_as_files(served, is_long, is_url):
    data = data_url(noise(1) if is_long else png(20, 10))
    part = file_part(data if is_url else data.partition(",")[2])
    answer = served.chat.completions.create(model="fake", messages=[user("size?", part)])
    assert f"[{(200, 150) if is_long else (20, 10)}]" in answer.choices[0].message.content


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (
            file_part(data_url(b"%PDF-1.7", "application/pdf"), "a.pdf"),
            "file: picture: found a truncated PDF",
        ),
        (
            file_part(data_url(b"hello", "text/plain")),
            "found plain text, expected a JPEG, PNG, WebP",
        ),
        (
            file_part("data:image/png,abc"),
            "file: expected a data URL of the form data:image/png;ba",
        ),
        (file_part("https://example.com/a.png"), "file: found data that is not base64"),
        ({"type": "file", "file": {"file_id": "file-x"}}, "there is no file of this id"),
        ({"type": "file", "file": {"file_id": "x"}}, "expected a data URL, as data:image/png;"),
        (
            {"type": "file", "file": {"file_id": "file-x", "file_data": RED}},
            "file: found both file_data and file_id, expe",
        ),
    ],
)
def test_a_file_that_shows_no_picture_is_refused(client, part, words):
    reply = post_chat(client, "what?", part)
    error = reply.get_json()["error"]
    assert reply.status_code in (400, 404) and words in error["message"]
    assert error["param"].startswith(("messages[0].content[1]", "file_id"))


def test_the_official_client_completes_prompts(served):
    result = served.completions.create(model="fake", prompt="say this", logprobs=1)
    assert result.choices[0].text == "1 messages, pictures []: say this"
    assert result.choices[0].logprobs.token_logprobs == [-0.5] * 6
    chunks = list(
        served.completions.create(
            model="fake", prompt=["say this"], stream=True, stream_options={"include_usage": True}
        )
    )
    assert (
        "".join(c.choices[0].text for c in chunks if c.choices)
        == "1 messages, pictures []: say this"
    )
    assert chunks[-1].usage.total_tokens == 13


def test_logprobs_are_told_as_asked(client):
    result = post_chat(client, "a b", logprobs=True, top_logprobs=2).get_json()["choices"][0][
        "logprobs"
    ]["content"]
    assert result[0]["logprob"] == -0.5 and result[0]["bytes"] == list(result[0]["token"].encode())
    assert [t["token"] for t in result[0]["top_logprobs"]] == ["other0", "other1"]
    assert post_chat(client, "a b").get_json()["choices"][0]["logprobs"] is None
    chunks = events(post_chat(client, "a b", logprobs=True, stream=True))
    assert sum(
        len(c["choices"][0]["logprobs"]["content"]) for c in chunks if c["choices"][0]["logprobs"]
    ) == len(result)


@pytest.mark.parametrize(
    "body, chosen",
    [
        ({}, {"max_tokens": CONTEXT, "detail": "auto"}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {}),
        (
            {"seed": 3, "temperature": 1, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
            {"seed": 3, "temperature": 1.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        ),
        ({"sampling": "off", "stop_repeating": True}, {"sampling": "off", "stop_repeating": True}),
        ({"task": "markdown"}, {"task": "markdown"}),
        ({}, {"sampling": "model", "max_tokens": CONTEXT}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": loose({"type": "object"})}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array"}},
                }
            },
            {"json_schema": loose({"type": "array"})},
        ),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"tools": [], "n": 1, "user": "me", "store": True, "unheard_of": [1]}, {}),
    ],
)
def test_fields_become_options(service, client, body, chosen):
    assert post_chat(client, "hi", **body).status_code == 200
    result = service.tickets[-1].chosen
    assert {k: result[k] for k in chosen} == chosen
    assert ("json_schema" in result) == ("json_schema" in chosen)


def test_the_closest_look_that_any_picture_asks_for_holds_for_all(service, client):
    for details, expected in (
        (("low", "high"), "high"),
        (("low", "low"), "low"),
        (("low", "auto"), "auto"),
    ):
        assert (
            post_chat(client, "hi", *(image_part(RED, detail=d) for d in details)).status_code
            == 200
        )
        assert service.tickets[-1].chosen["detail"] == expected


@pytest.mark.parametrize(
    "body, param",
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": ""}]}, "tools[0].function.name"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"grammar": "root ::= 5"}, "grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"mirostat": 2}, "mirostat"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"messages": [user({"type": "input_audio", "input_audio": {}})]},
            "messages[0].content[0].input_audio",
        ),
        (
            {"messages": [user({"type": "input_scent", "input_scent": {}})]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [user("a", {"type": "image_url", "image_url": RED})]},
            "messages[0].content[1].image_url",
        ),
        (
            {
                "messages": [
                    user({"type": "image_url", "image_url": {"url": RED, "detail": "most"}})
                ]
            },
            "messages[0].content[0].image_url.detail",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(service, client, body, param):
    result = client.post("/v1/chat/completions", json={"messages": [user("hi")]} | body)
    assert (result.status_code, result.get_json()["error"]["param"]) == (400, param)
    assert param in result.get_json()["error"]["message"] and not service.tickets


def test_tokens_are_counted_without_an_answer(service, client):
    result = client.post(
        "/v1/chat/completions/input_tokens", json={"messages": [user("hi", image_part(RED))]}
    ).get_json()
    assert result == {
        "object": "response.input_tokens",
        "input_tokens": 14,
        "mtmd": {"image_tokens": [4], "video_tokens": [], "audio_tokens": [], "context": CONTEXT},
    }
    assert not service.tickets


def test_a_text_that_cannot_fit_is_not_tokenized(client):
    assert post_chat(client, "a" * (CONTEXT * 64 + 1)).status_code == 400
    assert post_chat(client, "a" * (CONTEXT * 64)).status_code == 200
    assert (
        client.post("/v1/completions", json={"prompt": "a" * (CONTEXT * 64 + 1)}).status_code == 400
    )


def test_a_schema_that_would_take_long_to_compile_is_refused(client, service):
    for count, status in ((100, 200), (5000, 400)):
        schema = {
            "type": "object",
            "properties": {f"field {i}": {"type": "string"} for i in range(count)},
        }
        result = post_chat(
            client,
            "hi",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        assert result.status_code == status
    assert (
        result.get_json()["error"]["param"] == "response_format.json_schema.schema"
        and len(service.tickets) == 1
    )


def test_a_full_server_does_not_decode_pictures(monkeypatch):
    service = FakeService(pace_s=30)
    client = client_for(service, queue=1)
    stored = [
        client.post(
            "/v1/chat/completions", json={"messages": [user("hi")], "stream": True}, buffered=False
        )
        for _ in range(5)
    ]
    monkeypatch.setattr("mtmd.web.intake.picture_budget.load_isolated", None)
    assert post_chat(client, "hi", image_part(RED)).status_code == 429
    assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 429
    stored.pop().close()
    service.pace_s = 0
    assert post_chat(client, "hi").status_code == 200
    assert (
        post_chat(client, "hi", n=0).status_code == 400 and post_chat(client, "").status_code == 400
    )
    assert post_chat(client, "hi").status_code == 200
    for response in stored:
        response.close()


def test_an_error_of_ours_after_the_start_of_a_stream_is_its_last_event(service, client):
    service.fails = PromptError("no")
    assert events(post_chat(client, "hi", stream=True))[-1]["error"]["message"] == "no"
    service.fails = MtmdError("/secret/path is broken")
    for stream in (True, False):
        result = post_chat(client, "hi", stream=stream)
        assert "secret" not in result.get_data(
            as_text=True
        ) and "internal_error" in result.get_data(as_text=True)


def test_a_stream_that_the_server_ends_says_so(service, client):
    service.pace_s = 5
    response = client.post(
        "/v1/chat/completions", json={"messages": [user("hi")], "stream": True}, buffered=False
    )
    service.close()
    assert events(response)[-1]["error"]["code"] == "shutting_down"
    service.answer = lambda *_: service.close() or "never"
    result = post_chat(client, "hi")
    assert (result.status_code, result.get_json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_gives_its_request_up(stream):
    service = FakeService(pace_s=0.05)
    service.words = "word " * 400
    with running(service) as server:
        sock = raw_request(server, {"messages": [user("hi")], "stream": stream})
        assert until(lambda: service.tickets)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        sock.close()
        assert until(lambda: service.tickets[0].cancelled.is_set(), 5)
        assert until(lambda: service.ended == ["cancelled"] or stream, 5)


def test_a_client_that_goes_away_before_the_first_word_gives_its_request_up():
    service = FakeService(pace_s=30)
    with running(service) as server:
        sock = raw_request(server, {"messages": [user("hi")]})
        assert until(lambda: service.tickets)
        sock.close()
        assert until(lambda: service.tickets[0].cancelled.is_set(), 5)


def test_a_server_that_has_ended_may_be_stopped_again(service):
    with running(service) as server:
        server.stop()
        assert until(lambda: hasattr(server, "wsgi") and server.wsgi.closed)
        server.stop()


def test_requests_are_answered_at_the_same_time():
    service = FakeService(pace_s=0.2)
    with running(service) as server:
        socks = [raw_request(server, {"messages": [user("hi")], "stream": True}) for _ in range(20)]
        assert until(lambda: len(service.tickets) == 20)
        assert not service.ended
        for sock in socks:
            sock.close()


def test_stop_strings_have_limits():
    client = client_for(FakeService())
    for stop, location in (
        ("x" * 257, "stop"),
        (["a", "x" * 257], "stop[1]"),
        (["a"] * 17, "stop"),
    ):
        result = client.post("/v1/completions", json={"prompt": "a", "stop": stop})
        assert result.status_code == 400
        assert result.get_json()["error"]["param"].startswith(location)
    assert (
        client.post("/v1/completions", json={"prompt": "a", "stop": "x" * 256}).status_code == 200
    )
