"""What is wrong with a request, in words that name what was found and what is taken."""

from __future__ import annotations

import pytest
from fake_service import FakeService
from pydantic import ValidationError
from serving import client_for

from mtmd.web.errors import invalid
from mtmd.web.interfaces.openai_requests import ChatRequest
from mtmd.web.interfaces.responses_requests import ResponsesRequest

USER = [{"role": "user", "content": "x"}]
SECRET = "data:,secret"


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ({"messages": USER, "stop": 5}, "stop: found 5, expected a text or a list of texts"),
        ({"messages": USER, "stop": [5]}, "stop[0]: found 5, expected a text"),
        ({"messages": []}, "messages: found 0 items, expected at least 1"),
        ({}, 'messages: it has to be there; expected a list such as [{"role"'),
        ({"messages": SECRET}, 'messages: found a text, expected a list such as [{"role"'),
        (
            {"messages": [USER[0] | {"content": [{"type": "image_url", "image_url": SECRET}]}]},
            'image_url: found a text, expected an object such as {"url": "data:image/png',
        ),
        (
            {"messages": [USER[0] | {"images": [SECRET]}]},
            'messages[0].images: images are parts of the content here, such as {"type": "image_url"',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "image", "image": SECRET}]}]},
            'found \'image\': a picture is {"type": "image_url", "image_url": {"url": ',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "input_audio", "x": SECRET}]}]},
            'input_audio: it has to be there; expected an object such as {"data": "...", "format',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "audio", "x": SECRET}]}]},
            'found \'audio\': audio is {"type": "input_audio", "input_audio": {"data": "...", ',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "file", "file": {"filename": SECRET}}]}]},
            "messages[0].content[0].file: found neither file_data nor file_id, expected one of them; ",
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "file", "file": SECRET}]}]},
            'file: found a text, expected an object such as {"file_data": "data:image/png;base64',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "file", "file_data": SECRET}]}]},
            'file: it has to be there; expected an object such as {"file_data": "data:',
        ),
        (
            {"messages": [USER[0] | {"content": [{"type": "input_file", "file_data": SECRET}]}]},
            'found \'input_file\': a file is {"type": "file", "file": {"file_data": "data:',
        ),
        ({"messages": [USER[0] | {"content": [SECRET]}]}, "found a text without a type"),
        ({"messages": [{"role": SECRET, "content": "x"}]}, "found another text, expected 'system'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: it has to be there"),
        ({"messages": USER, "temperature": SECRET}, "found a text, expected a number"),
        ({"messages": USER, "temperature": 101}, "temperature: found 101, expected at most 100"),
        ({"messages": USER, "temperature": 10**400}, "found a number of too many digits, expected"),
        ({"messages": USER, "max_tokens": -(10**400)}, "found a number of too many digits"),
        ({"messages": USER, "temperature": "101"}, "temperature: found a text, expected"),
        ({"messages": USER, "top_p": -0.5}, "top_p: found -0.5, expected at least 0"),
        ({"messages": USER, "max_tokens": 10**9}, "found 1000000000, expected at most 1048576"),
        (
            {"messages": USER, "seed": 2**63},
            "found 9223372036854775808, expected at most 9223372036854775807",
        ),
        ({"messages": USER, "max_tokens": 1.5}, "max_tokens: found 1.5, expected a whole number"),
        ({"messages": USER, "stream": "yes"}, "stream: found a text, expected true or false"),
        ({"messages": USER, "model": "x" * 600}, "found 600 characters, expected at most 512"),
        ({"messages": USER, "logit_bias": [1]}, "logit_bias: found a list, expected an object"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong(body, reported):
    with pytest.raises(ValidationError) as error:
        ChatRequest.model_validate(body)
    message = invalid(error.value).message
    assert reported in message and "secret" not in message and "Input" not in message


@pytest.mark.parametrize(
    ("part", "reported"),
    [
        (
            {"type": "input_image", "image_url": {"url": SECRET}},
            'image_url: found an object, expected a text such as "data:image/png;base64,..."',
        ),
        (
            {"type": "file", "file": {"file_data": SECRET}},
            'found \'file\': a file is {"type": "input_file", "file_data": "data:image/png;base64',
        ),
        (
            {"type": "image_url", "image_url": SECRET},
            'a picture is {"type": "input_image", "image_url": "data:image/png;base64,..."}',
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_for_the_responses_api(part, reported):
    with pytest.raises(ValidationError) as error:
        ResponsesRequest.model_validate({"input": [USER[0] | {"content": [part]}]})
    message = invalid(error.value).message
    assert reported in message and "secret" not in message


def test_addresses_of_ollamas_that_are_not_here_answer_in_its_form():
    client = client_for(FakeService())
    for path in ("/api/pull", "/api/copy"):
        answer = client.post(path, json={"model": "x"})
        assert answer.status_code == 404
        assert answer.get_json() == {"error": "there is no such route"}
    assert client.post("/v1/nothing", json={}).get_json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        ("/v1/chat/completion", "; did you mean /v1/chat/completions? /docs lists all"),
        ("/v1/v1/models", "; did you mean /v1/models? /docs lists all"),
        ("/v1", "there is no such route; /docs lists all"),
        ("/v1/moderations", "there is no such route; /docs lists all"),
        (f"/v1/{'x' * 2000}", "there is no such route; /docs lists all"),
    ],
    ids=lambda value: value[:30],
)
def test_a_misspelt_address_is_told_with_what_may_have_been_meant(path, reported):
    message = client_for(FakeService()).get(path).get_json()["error"]["message"]
    assert message.endswith(reported)


def test_another_method_is_told_with_those_that_are_taken():
    answer = client_for(FakeService()).get("/v1/chat/completions")
    reported = "this method is not for this address: found GET, expected POST"
    assert answer.status_code == 405 and answer.get_json()["error"]["message"] == reported
