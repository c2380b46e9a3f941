"""Whatever a user calls audio, and what a model without audio says to it."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import video
from PIL import Image
from sounds import encoded, tones, wav

from mtmd import AudioInput, PromptError
from mtmd.base.errors import AudioError
from mtmd.model import Model
from mtmd.prompt.audio_input import kind_of, load_audio
from mtmd.prompt.conversation import messages_of, read_conversation
from mtmd.prompt.message_forms import in_own_form

DATA = wav(tones(0.2))
URL = "data:audio/wav;base64," + base64.b64encode(DATA).decode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    result = tmp_path / "talk"  # it goes by the content
    result.write_bytes(DATA)
    return result


def test_what_is_audio(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.wav"
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    assert kind_of(path) == kind_of(str(path)) == kind_of(DATA) == kind_of(URL) == "audio"
    with path.open("rb") as file:
        assert kind_of(file) == kind_of(AudioInput(picture)) == "audio"
    assert kind_of("https://example.com/talk.MP3?x=1") == "audio"
    assert kind_of(picture) == kind_of("nope.wav") == kind_of(np.zeros((4, 4))) == "image"
    assert kind_of(video(2)) == "video"
    assert kind_of(encoded(tones(0.1, 48_000), 48_000, "webm", "libopus")) == "video"


def test_every_form_is_the_same_recording(path: Path) -> None:
    samples = load_audio(path).audio(16_000).samples
    forms: list[Any] = [str(path), DATA, URL, io.BytesIO(DATA), AudioInput(path)]
    forms += [(samples, 16_000), AudioInput(torch.from_numpy(samples), 16_000)]
    for form in forms:
        np.testing.assert_array_equal(load_audio(form).audio(16_000).samples, samples)


REFUSED: dict[str, tuple[Any, str]] = {
    "no file": ("nope.wav", "nope.wav: found no such file, expected an audio file"),
    "no path": ("", "audio: found an empty path"),
    "a text": (io.StringIO("x"), "found a file open for text, expected bytes"),
    "base64": ("data:audio/wav;base64,%%%", "expected data:audio/wav"),
    "an array": (np.zeros(9, np.float32), "found samples without a rate"),
    "a number": (3, "found an object of type int, expected a path"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    source, message = REFUSED[case]
    with pytest.raises(AudioError, match=message):
        load_audio(source)


def test_a_rate_goes_with_samples_alone(path: Path) -> None:
    with pytest.raises(AudioError, match="found a rate beside a file"):
        AudioInput(path, 16_000)
    with pytest.raises(AudioError, match="found samples without a rate"):
        AudioInput(np.zeros(4))


def test_messages_of_other_libraries(path: Path) -> None:
    encoded = base64.b64encode(DATA).decode()
    for part in (
        {"type": "audio", "audio": path},
        {"type": "audio", "path": str(path)},
        {"type": "audio", "base64": encoded},
        {"type": "audio_url", "audio_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    ):
        (message,) = in_own_form([{"role": "user", "content": [part]}])
        read = read_conversation([message], lambda text: text)
        assert [one.check().seconds for one in read.audio] == [0.2]
        assert read.messages[0]["content"] == [{"type": "audio"}]


def test_a_question_about_audio_alone_asks_for_the_audio(path: Path) -> None:
    (message,) = messages_of(path, None)
    assert [part["type"] for part in message["content"]] == ["audio", "text"]
    assert message["content"][1]["text"] == "Describe the audio."
    (message,) = messages_of(None, "x", audio=[path, (np.zeros(9, np.float32), 8000)])
    assert [part["type"] for part in message["content"]] == ["audio", "audio", "text"]


def test_a_model_without_audio_says_what_it_takes(demo: Model, path: Path) -> None:
    refusal = "has no audio encoder and was given {}; it takes pictures and videos$"
    with pytest.raises(PromptError, match=refusal.format("audio")):
        demo.answer(path, "what?")
    with pytest.raises(PromptError, match=refusal.format("2 audio files")):
        demo.answer(None, "what?", audio=[path, path])
    with pytest.raises(PromptError, match=refusal.format("audio")):
        demo.transcribe(path)
