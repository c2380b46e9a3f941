"""OpenAI's routes for speech, over a service that says what it was given."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from fake_service import FakeService
from serving import client_for, png, running
from sounds import tones, wav

from mtmd.clip.audio.instructions import Instructions

TOLD = Instructions(
    "Write it down.", "Write it down in {language}.", "Put it into {language}.", 1.0
)
LONG = wav(tones(2.5))


@pytest.fixture
def service():
    service = FakeService()
    service.instructions, service.words = TOLD, "so it was"
    return service


@pytest.fixture
def client(service):
    return client_for(service)


def post(client, data=LONG, route="transcriptions", **fields):
    form = {"file": (io.BytesIO(data), "talk.wav"), **fields}
    return client.post(f"/v1/audio/{route}", data=form, content_type="multipart/form-data")


def asked(service):
    """(seconds, prompt) of each piece, in order."""
    result = []
    for ticket in service.tickets:
        ((message),) = ticket.messages
        audio, text = message["content"]
        samples = audio["audio"].audio(16_000).samples
        result.append((len(samples) / 16_000, text["text"]))
    return result


def test_long_audio_is_asked_about_in_pieces_that_make_one_text(service, client):
    body = post(client).get_json()
    assert body["text"] == " ".join(["so it was"] * 3)
    assert body["usage"]["type"] == "tokens" and body["usage"]["total_tokens"] > 0
    pieces = asked(service)
    assert [prompt for _, prompt in pieces] == ["Write it down."] * 3
    assert all(seconds <= 1 for seconds, _ in pieces)
    assert abs(sum(seconds for seconds, _ in pieces) - 2.5) < 1e-3


def test_forms_of_the_answer(client):
    assert post(client, response_format="text").get_data(as_text=True) == (
        "so it was so it was so it was\n"
    )
    srt = post(client, response_format="srt")
    assert srt.mimetype == "application/x-subrip"
    assert srt.get_data(as_text=True).startswith("1\n00:00:00,000 --> 00:00:0")
    vtt = post(client, response_format="vtt").get_data(as_text=True)
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> ") and vtt.count("so it was") == 3
    verbose = post(client, response_format="verbose_json").get_json()
    assert verbose["task"] == "transcribe" and verbose["duration"] == 2.5
    starts, ends = zip(*((s["start"], s["end"]) for s in verbose["segments"]), strict=True)
    assert starts == (0.0, *ends[:-1]) and ends[-1] == 2.5


def test_a_stream_is_in_the_order_of_the_pieces(client):
    text = post(client, stream="true").get_data(as_text=True)
    events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: ")]
    deltas = [e["delta"] for e in events if e["type"] == "transcript.text.delta"]
    *_, last = events
    assert last["type"] == "transcript.text.done" and last["text"] == "".join(deltas)
    assert last["text"] == "so it was so it was so it was"


def test_a_sentence_that_quotes_the_text_is_left_out_of_a_stream(service, client):
    service.instructions = replace(TOLD, sentences=("It says",))
    service.words = "It says 'so it was'."
    text = post(client, stream="true").get_data(as_text=True)
    events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: ")]
    deltas = [e["delta"] for e in events if e["type"] == "transcript.text.delta"]
    assert deltas == ["so it was", " so it was", " so it was"]
    assert events[-1]["text"] == "".join(deltas)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_what_is_said_before_the_text_is_left_out(service, client, stream):
    service.instructions = replace(TOLD, heading="::", begun="German::")
    service.words = "German :: so it was"
    text = post(client, stream=stream).get_data(as_text=True)
    assert "German" not in text
    events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e.strip()]
    assert events[-1]["text"] == "so it was so it was so it was"
    deltas = [e["delta"] for e in events if e.get("type") == "transcript.text.delta"]
    assert "".join(deltas) == (events[-1]["text"] if stream == "true" else "")


def test_an_answer_that_goes_on_from_the_language(service, client):
    service.instructions = replace(TOLD, heading="::", begun="{language}::")
    post(client, wav(tones(0.5)), language="de")
    (ticket,) = service.tickets
    assert ticket.messages[-1] == {"role": "assistant", "content": "German::"}


def test_languages_hints_and_translations(service, client):
    post(client, wav(tones(0.5)), language="de", prompt="Anna, Zug")
    post(client, wav(tones(0.5)), route="translations")
    post(client, wav(tones(0.5)), route="translations", to_language="French")
    assert [prompt for _, prompt in asked(service)] == [
        "Write it down in German.\n\nContext: Anna, Zug",
        "Put it into English.",
        "Put it into French.",
    ]


REFUSED = {
    "no file": ({}, None, 400, "file: missing"),
    "a picture": ({}, png(4, 4), 400, r"file: found a picture (PNG), expected a WAV"),
    "damaged": ({}, b"RIFF\x24\0\0\0WAVEfmt ", 400, "file: found a WAV file that is damaged"),
    "a form": ({"response_format": "rtf"}, LONG, 400, "response_format: found another text"),
    "words": (
        {"timestamp_granularities[]": "word"},
        LONG,
        400,
        "timestamp_granularities: found 'word', expected 'segment': no model that is supported",
    ),
    "a language": ({"language": "klingonish"}, LONG, 400, "language: found 'klingonish'"),
    "a temperature": ({"temperature": "-1"}, LONG, 400, "temperature"),
    "logprobs": ({"include[]": "logprobs"}, LONG, 400, "include: not supported here"),
    "a model": ({"model": "other"}, LONG, 404, "not available"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(client, case):
    fields, data, status, message = REFUSED[case]
    if data is None:
        response = client.post(
            "/v1/audio/transcriptions", data={"x": "y"}, content_type="multipart/form-data"
        )
    else:
        response = post(client, data, **fields)
    assert response.status_code == status
    assert message in response.get_json()["error"]["message"]


def test_a_model_without_audio_says_what_it_takes(service, client):
    service.instructions = None
    response = post(client)
    assert (response.status_code, response.get_json()["error"]["message"]) == (
        400,
        "fake has no audio encoder and was given audio; it takes pictures and videos",
    )


def test_the_official_client(service):
    with (
        running(service) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=20
        ) as client,
    ):
        file = ("talk.wav", LONG)
        made = client.audio.transcriptions.create(model="fake", file=file)
        assert made.text == "so it was so it was so it was"
        with client.audio.transcriptions.create(model="fake", file=file, stream=True) as stream:
            assert [event.type for event in stream][-1] == "transcript.text.done"
        whole = client.audio.transcriptions.create(
            model="fake",
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["segment"],
        )
        assert [one.text for one in whole.segments or ()] == ["so it was"] * 3
        assert whole.segments and whole.segments[-1].end == whole.duration == 2.5
        texts = {
            form: client.audio.transcriptions.create(
                model="fake", file=file, response_format=form, language="de"
            )
            for form in ("text", "srt", "vtt")
        }
        assert texts["text"] == "so it was so it was so it was\n"
        assert texts["srt"].startswith("1\n00:00:00,000 --> ")
        assert texts["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> ")
        with pytest.deprecated_call():  # by its authors
            translated = client.audio.translations.create(model="fake", file=file)
        assert translated.text == made.text
        assert asked(service)[-1][1] == "Put it into English."
        with pytest.raises(openai.BadRequestError, match="gives times of words"):
            client.audio.transcriptions.create(
                model="fake",
                file=file,
                response_format="verbose_json",
                timestamp_granularities=["word"],
            )
        data = base64.b64encode(wav(tones(0.2))).decode()
        content: list[Any] = [
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
            {"type": "text", "text": "what?"},
        ]
        heard = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": content}]
        )
        assert heard.choices[0].message.content == "so it was"
        shown = service.tickets[-1].messages[0]["content"][0]
        assert shown["type"] == "audio" and shown["audio"].check().seconds == 0.2


def test_audio_in_a_chat(service, client):
    data = base64.b64encode(wav(tones(0.2))).decode()
    for part in (
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "file", "file": {"file_data": f"data:;base64,{data}"}},
    ):
        content = [part, {"type": "text", "text": "what?"}]
        response = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
        )
        assert response.status_code == 200, response.get_json()
        shown = service.tickets[-1].messages[0]["content"][0]
        assert shown["type"] == "audio" and shown["audio"].check().seconds == 0.2
    wrong = {"type": "input_audio", "input_audio": {"data": base64.b64encode(png(4, 4)).decode()}}
    response = client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": [wrong]}]}
    )
    assert response.status_code in (200, 400)  # a picture is told once it is decoded


def test_uploads(client):
    form = {"file": (io.BytesIO(LONG * 4), "talk.wav"), "purpose": "user_data"}
    response = client.post("/v1/files", data=form, content_type="multipart/form-data")
    assert response.status_code == 200 and response.get_json()["bytes"] == 4 * len(LONG)
