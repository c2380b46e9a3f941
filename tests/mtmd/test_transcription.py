"""Transcriptions as text, subtitles and JSON; languages; where long audio is cut."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import OptionError
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.pieces import pieces
from mtmd.clip.families import audio_flamingo3
from mtmd.transcription import (
    Segment,
    Transcription,
    TranscriptionRequest,
    audio_pieces,
    language_name,
)

TOLD = Instructions("down", "down in {language}", "into {language}", 30.0)
RECEIPT: Any = SimpleNamespace(asdict=lambda: {"model": "m"})


def test_forms() -> None:
    result = Transcription(
        (
            Segment(0.0, 1.5, "One --> two", RECEIPT),
            Segment(1.5, 2.0, "", RECEIPT),
            Segment(2.0, 3661.25, "three\nfour", RECEIPT),
        ),
        3661.25,
    )
    assert result.written("text") == "One --> two three\nfour\n"
    assert result.written("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne → two\n\n"
        "2\n00:00:02,000 --> 01:01:01,250\nthree four\n\n"
    )
    assert result.written("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne → two\n")
    assert json.loads(result.written("json")) == {"text": result.text}
    assert json.loads(json.dumps(result.asdict()))["segments"][2]["end"] == 3661.25


def test_prompts() -> None:
    assert TranscriptionRequest().prompt(TOLD) == "down"
    assert TranscriptionRequest("pt-BR").prompt(TOLD) == "down in Portuguese"
    assert TranscriptionRequest("german", translate=True).prompt(TOLD) == "into German"
    assert TranscriptionRequest(translate=True, hint="Ada").prompt(TOLD) == (
        "into English\n\nContext: Ada"
    )
    assert language_name("fil") == language_name("filipino") == "Filipino"
    with pytest.raises(OptionError, match=r"found 'Germann', expected .*did you mean 'german'"):
        language_name("Germann")


@pytest.mark.parametrize(
    ("request_", "text", "expected"),
    [
        (TranscriptionRequest(), "language English: Good  day", "Good day"),
        (TranscriptionRequest(), "Good day", "Good day"),
        (TranscriptionRequest("de"), "Guten Tag: ja", "Guten Tag: ja"),
    ],
)
def test_what_is_said_before_the_text(
    request_: TranscriptionRequest, text: str, expected: str
) -> None:
    told = Instructions("", "", "", 30.0, heading=": ", begun="language {language}: ")
    audio: Any = SimpleNamespace(samples=np.zeros(1600, np.float32), rate=16_000)
    (piece,) = audio_pieces(audio, told, request_)
    assert piece.segment(text, RECEIPT).text == expected
    begun = [m["content"] for m in piece.messages[1:]]
    assert begun == (["language German: "] if request_.language else [])
    assert piece.options == ({"continue_final_message": True} if begun else {})
    assert [part["type"] for part in piece.messages[0]["content"]] == ["audio"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The spoken content of the audio is 'Good  day. Bye.'.", "Good day. Bye."),
        ('The transcription of the audio is "Good day"', "Good day"),
        ("The content of the input audio is Good day.", "Good day"),
        ("'Good day.'", "Good day."),
        ("Good day.", "Good day."),
        ("'Tis good.", "'Tis good."),
        ("'", "'"),
    ],
)
def test_a_sentence_that_quotes_the_text(text: str, expected: str) -> None:
    audio: Any = SimpleNamespace(samples=np.zeros(1600, np.float32), rate=16_000)
    (piece,) = audio_pieces(audio, audio_flamingo3.INSTRUCTIONS, TranscriptionRequest())
    assert piece.segment(text, RECEIPT).text == expected


def test_words_that_may_occur_are_the_system_message_where_models_take_them_so() -> None:
    told = Instructions("", "", "into {language}", 30.0, hint_is_system=True)
    audio: Any = SimpleNamespace(samples=np.zeros(1600, np.float32), rate=16_000)
    (piece,) = audio_pieces(audio, told, TranscriptionRequest(hint="Ada"))
    assert [m["role"] for m in piece.messages] == ["system", "user"]
    assert piece.messages[0]["content"] == "Ada" and piece.options == {}


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    rate = 1000
    samples = np.random.default_rng(0).normal(0, 1, 70 * rate).astype(np.float32)
    quiet = (25.0, 49.0)
    for second in quiet:
        samples[int((second - 0.2) * rate) : int((second + 0.2) * rate)] = 0
    cuts = list(pieces(samples, rate, 30.0))
    ends = [stop / rate for _, stop in cuts]
    assert all(abs(end - second) < 0.2 for end, second in zip(ends, quiet, strict=False))
    assert ends[-1] == 70 and all(stop - start <= 30 * rate for start, stop in cuts)
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]


@pytest.mark.parametrize("count", [0, 1, 30, 31, 61])
def test_the_shortest(count: int) -> None:
    cuts = list(pieces(np.ones(count, np.float32), 1, 30.0))
    assert sum(stop - start for start, stop in cuts) == count
    assert len(cuts) == (0 if not count else 1 if count <= 30 else max(2, -(-count // 30)))
