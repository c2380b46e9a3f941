from __future__ import annotations

import base64
import io
import json
import logging
import re

import pytest
from fake_service import FakeService
from serving import client_for, data_url, image_part, png, post_chat, raw_request, running

from mtmd import (
    BusyError,
    ContextError,
    DeviceMemoryError,
    ImageError,
    ModelError,
    MtmdError,
    OptionError,
    PlacementError,
    PromptError,
)
from mtmd.prompt.load_image import load_image
from mtmd.web.settings import MediaBudget

PATH = "/home/someone/models/secret.gguf"


@pytest.mark.parametrize(
    "error, status, kind, reported",
    [
        (PromptError("the prompt takes 9 tokens"), 400, "invalid_request_error", True),
        (ImageError("image: found 0 bytes"), 400, "invalid_request_error", True),
        (OptionError("temperature: found 7"), 400, "invalid_request_error", True),
        (BusyError("4 wait"), 429, "rate_limit_error", True),
        (DeviceMemoryError("needs 9 GiB"), 413, "invalid_request_error", True),
        (ModelError(f"{PATH} is broken"), 500, "server_error", False),
        (PlacementError(f"0x7f3a12 of {PATH}"), 500, "server_error", False),
        (MtmdError(f"internal error at {PATH}"), 500, "server_error", False),
        (ValueError(PATH), 500, "server_error", False),
        (OSError(2, "No such file", PATH), 500, "server_error", False),
        (RecursionError(PATH), 500, "server_error", False),
        (MemoryError(), 500, "server_error", False),
    ],
)
def test_errors_become_answers_in_openais_form(error, status, kind, reported, caplog):
    service = FakeService()
    client = client_for(service)
    service.refuses = error
    result = post_chat(client, "hi")
    body = result.get_json()["error"]
    assert (result.status_code, body["type"], sorted(body)) == (
        status,
        kind,
        ["code", "message", "param", "type"],
    )
    assert (str(error) in body["message"]) == reported or not str(error)
    service.refuses, service.fails = None, error
    assert post_chat(client, "hi").status_code == status
    streamed = post_chat(client, "hi", stream=True).get_data(as_text=True)
    assert json.loads(streamed.split("data: ")[-2])["error"]["type"] == kind
    for text in (result.get_data(as_text=True), streamed):
        assert reported or not any(
            word in text for word in ("secret", "someone", "0x7f", "Traceback", "File \\")
        )
    if not reported:  # the log says what the body does not, under the id the body names
        assert (
            body["message"].split()[-1] == result.headers["X-Request-Id"]
            and result.headers["X-Request-Id"] in caplog.text
        )


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/files/x", 404),
        ("GET", "/v1/files/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404),
        ("TRACE", "/health", 405),
        ("POST", "/v1/chat/completions", 415),
        ("GET", "/static/../app.py", 404),
        ("GET", "/static/%2e%2e/app.py", 404),
        ("GET", "/static/..%2fapp.py", 404),
    ],
)
def test_what_flask_refuses_is_told_in_the_same_form(method, path, status):
    result = client_for(FakeService()).open(path, method=method)
    assert result.status_code == status
    assert result.get_json()["error"]["message"]
    if status == 405:
        assert result.headers["Allow"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe{\x00}\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"[" * 50_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": NaN}',
        b'{"x": 1e999999}',
        b"\0" * 1000,
        b'{"x": ' + b"9" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}]} trailing',
    ],
)
def test_a_body_that_is_no_request_is_a_mistake_of_the_client(body):
    service = FakeService()
    result = client_for(service).post(
        "/v1/chat/completions", data=body, content_type="application/json"
    )
    assert (result.status_code, service.tickets) == (400, [])
    assert len(result.get_data()) < 1000


def test_a_body_over_the_limit_is_refused():
    client = client_for(FakeService(), media=MediaBudget(bytes=3))
    result = client.post(
        "/v1/chat/completions", data=b"x" * ((8 << 20) + 5), content_type="application/json"
    )
    assert (result.status_code, result.get_json()["error"]["type"]) == (
        413,
        "invalid_request_error",
    )


def test_values_of_a_request_are_not_repeated_at_length():
    client = client_for(FakeService())
    long = "A" * 50_000
    for body in (
        {"model": long},
        {"temperature": long},
        {"messages": [{"role": long, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"response_format": {"type": long}},
        {"stop": [long] * 99},
        {long: 1, "n": 0},
    ):
        result = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]} | body
        )
        assert result.status_code in (400, 404) and len(result.get_data()) < 1000, str(body)[:40]


def test_what_a_decoder_says_stays_inside(monkeypatch):
    def broken(*_):
        raise OSError("libpng error: bad chunk at 0x7f3a12345678 in /usr/lib/libpng.so")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", broken)
    monkeypatch.setattr("mtmd.web.intake.picture_budget.load_isolated", load_image)
    result = post_chat(client_for(FakeService()), "hi", image_part(data_url(png())))
    assert result.status_code == 400 and not any(
        word in result.get_data(as_text=True) for word in ("libpng", "0x7f", "/usr")
    )


def test_pictures_and_keys_do_not_stand_in_the_log(caplog):
    service, key = FakeService(), "a-long-enough-key"
    client, picture = client_for(service, api_keys=(key,)), png(40, 40)
    encoded = base64.b64encode(picture).decode()
    with caplog.at_level(logging.DEBUG):
        for fails in (None, MtmdError("no"), ValueError("no"), ImageError("no")):
            service.fails = fails
            body = {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "hi"}, image_part(data_url(picture))],
                    }
                ]
            }
            client.post(
                "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            client.post(f"/v1/{encoded}", json=body, headers={"Authorization": f"Bearer {key}"})
            client.post(
                "/v1/chat/completions",
                json=body | {"n": encoded},
                headers={"Authorization": f"Bearer {key}x"},
            )
            client.post(
                "/v1/files",
                data={"purpose": encoded, "file": (io.BytesIO(picture), encoded)},
                headers={"Authorization": f"Bearer {key}"},
            )
    assert "/v1/chat/completions 200" in caplog.text and "no route" in caplog.text
    assert encoded[:60] not in caplog.text and key not in caplog.text


def test_a_defect_in_a_route_is_not_told_by_the_real_server_either():
    service = FakeService()
    service.stats_ok = service.stats
    with running(service) as server:
        import urllib.error
        import urllib.request

        service.stats = lambda: 1 / 0
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"{server.url}/metrics", timeout=10)
        text = error.value.read().decode()
        error.value.close()
        service.stats = service.stats_ok
    assert (
        error.value.code == 500
        and "Zero" not in text
        and json.loads(text)["error"]["type"] == "server_error"
    )


class PanicException(BaseException):  # as pyo3 names it
    """What a library in Rust raises where it gives up: no Exception."""


def test_a_panic_is_answered(caplog):
    service = FakeService()
    service.submit = service.count = panic
    client = client_for(service)
    with caplog.at_level(logging.ERROR):
        result = post_chat(client, "hi")
    assert result.status_code == 500 and result.get_json()["error"]["code"] == "internal_error"
    assert "PanicException" in caplog.text and "at byte 7" not in result.get_data(as_text=True)
    with running(service) as server:
        for _ in range(3):  # and its connection is good for more
            sock = raw_request(server, {"messages": [{"role": "user", "content": "hi"}]})
            assert b" 500 " in sock.recv(4096).split(b"\r\n")[0]
            sock.close()


def panic(*_, **__):
    raise PanicException("at byte 7")


def test_a_panic_in_a_stream_ends_the_connection():
    service = FakeService()

    class Ticket:
        def redirect(self, put):
            put(PanicException("at byte 7"))

        def cancel(self):
            pass

    service.submit = lambda *_, **__: Ticket()
    with running(service) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        sock, reported = raw_request(server, body), b""
        while piece := sock.recv(4096):  # to the end, which comes
            reported += piece
        sock.close()
        assert b"[DONE]" not in reported


def test_a_prompt_that_is_too_long_is_told_with_its_numbers():
    service = FakeService()
    service.refuses = ContextError("the prompt takes 900 tokens", 900, 512)
    client = client_for(service)
    result = post_chat(client, "hi").get_json()["error"]
    assert (result["code"], result["n_prompt_tokens"], result["n_ctx"]) == (
        "context_length_exceeded",
        900,
        512,
    )
    result = client.post("/v1/completions", json={"prompt": "x" * 100_000}).get_json()["error"]
    assert (result["code"], result["n_prompt_tokens"], result["n_ctx"]) == (
        "context_length_exceeded",
        None,
        512,
    )
    assert (
        "512 tokens. However, your prompt takes at least 512 tokens; prompt: found 100,000"
        in (result["message"])
    )


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_look_for():
    """Claude Code, LiteLLM, llama.cpp's and Ollama's clients shorten a conversation by them."""
    service = FakeService()
    service.refuses = ContextError("shorten the prompt", 900, 512)
    client, stated = client_for(service), {"messages": [{"role": "user", "content": "hi"}]}

    def refused(path, **body):
        result = client.post(path, json={"model": "fake", **body})
        assert result.status_code == 400
        return result.get_json()["error"]

    openai = "This model's maximum context length is 512 tokens. However, your prompt takes 900 "
    for path, body in (
        ("/v1/chat/completions", stated),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ):
        match = refused(path, **body)
        assert match["message"] == f"{openai}tokens; shorten the prompt"
        assert match["code"] == "context_length_exceeded"
    match = refused("/v1/messages", max_tokens=5, **stated)
    claude_code = r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)"
    assert re.match(claude_code, match["message"]).groups() == ("900", "511")
    assert match["type"] == "invalid_request_error"
    match = refused("/completion", prompt="hi")
    assert (match["type"], match["code"]) == ("exceed_context_size_error", 400)
    assert (match["n_prompt_tokens"], match["n_ctx"]) == (900, 512)
    assert match["message"].startswith(
        "request (900 tokens) exceeds the available context size (512 tokens), try increasing it"
    )
    for path, body in (("/api/chat", stated), ("/api/generate", {"prompt": "hi"})):
        match = refused(path, stream=False, **body)
        assert match.startswith("prompt too long; exceeded max context length by 389 tokens; ")


def test_a_prompt_of_no_tokens_is_not_called_too_long():
    service = FakeService()
    service.refuses = ContextError("the prompt takes no tokens", 0, 512)
    result = post_chat(client_for(service), "hi").get_json()["error"]
    assert (result["message"], result["code"]) == ("the prompt takes no tokens", None)
