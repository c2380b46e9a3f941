"""`mtmd transcribe`: files that are no audio are refused before a model is loaded for them; several
files, and what comes from a pipe.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from audio_cases import gemma4_unified
from PIL import Image
from sounds import tones, wav

from mtmd.clip.audio.limits import AudioLimits
from mtmd.clip.video.limits import VideoLimits
from mtmd.commands import shared
from mtmd.prompt import fetch_url
from mtmd.prompt.fetch_url import Denied, Fetched


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("PNG", "found a picture (PNG), expected a WAV, MP3, FLAC, Ogg, Opus, M4A, AAC or WebM"),
        ("", "found plain text, expected a WAV, MP3, FLAC, Ogg, Opus, M4A, AAC or WebM"),
    ],
)
def test_what_is_no_audio(mtmd: Any, tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "slide.png"
    path.write_text("Dear Ada,\n")
    if kind:
        Image.new("RGB", (8, 8)).save(path, kind)
    line = mtmd("transcribe", path, "-m", "no/such-model").refused()
    advice = "ask about it as a picture, as with `mtmd describe`" if kind else "convert it"
    assert message in line and advice in line and "slide.png" in line


def test_an_address(mtmd: Any) -> None:
    line = mtmd("transcribe", "https://example.com/talk.mp3", "-m", "no/such-model").refused()
    assert "--allow-remote-media" in line and "download the audio" in line


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Options that choose a small model with ears."""
    folder = tmp_path_factory.mktemp("hearing")
    gemma4_unified(folder)
    return ("-m", folder, "--device", "cpu", "--max-tokens", 3)


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.wav" for name in ("one", "two", "three")]
    for seed, path in enumerate(paths):
        path.write_bytes(wav(tones(0.3, seed=seed)))
    # a head, and nothing that can be decoded
    paths[1].write_bytes(paths[1].read_bytes()[:44])
    return paths


def test_a_damaged_file_keeps_no_other_from_being_written(
    mtmd: Any, hearing: tuple[Any, ...], recordings: list[Path], tmp_path: Path
) -> None:
    ran = mtmd("transcribe", *recordings, *hearing, "--format", "srt", "--out", tmp_path / "out")
    assert ran.code == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["one.srt", "three.srt"]
    failed = [line for line in ran.err.splitlines() if line.startswith("mtmd transcribe:")]
    assert "two.wav" in failed[0] and "no sound can be decoded" in failed[0]
    assert failed[1:] == ["mtmd transcribe: 1 file of 3 failed"]


def test_an_address_without_an_answer_keeps_no_other_from_being_written(
    mtmd: Any,
    hearing: tuple[Any, ...],
    recordings: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(*_: Any) -> Fetched:
        raise Denied("an address that is not public")

    monkeypatch.setattr(fetch_url, "_get", get)
    files = (recordings[0], "https://dead.test/x.mp3", "https://[x/talk.mp3", recordings[2])
    ran = mtmd("transcribe", *files, *hearing, "--out", tmp_path / "out", "--allow-remote-media")
    assert ran.code == 1
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["one.txt", "three.txt"]
    failed = [line for line in ran.err.splitlines() if line.startswith("mtmd transcribe:")]
    assert "dead.test/x.mp3: the audio could not be fetched" in failed[0]
    assert "could not be fetched" in failed[1] and failed[2].endswith("2 files of 4 failed")


def test_an_address_that_is_none(mtmd: Any, tmp_path: Path) -> None:
    line = mtmd("transcribe", "https://[x/talk.mp3", "--out", tmp_path, "-m", "a/b").refused()
    assert "found a web address, expected a file" in line


def test_texts_of_several_files_have_their_names(
    mtmd: Any, hearing: tuple[Any, ...], recordings: list[Path]
) -> None:
    one, _, three = recordings
    three.write_bytes(three.read_bytes()[:6000])
    ran = mtmd("transcribe", one, three, *hearing)
    out = ran.out
    assert "; ends at 0.2 s, not at 0.3 s as it says" in " ".join(ran.err.split())
    assert [line for line in out.splitlines() if line.startswith("==>")] == [
        f"==> {one} <==",
        f"==> {three} <==",
    ]
    assert "the text of 1 piece is cut at --max-tokens" in " ".join(ran.err.split())
    assert "==>" not in mtmd("transcribe", one, *hearing).out
    line = mtmd("transcribe", one, three, *hearing, "--format", "vtt").refused()
    assert "found vtt and 2 files" in line and "--out DIR" in line


def test_standard_input(
    mtmd: Any, hearing: tuple[Any, ...], recordings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    expected = json.loads(mtmd("transcribe", recordings[0], *hearing, "--format", "json").out)
    piped(recordings[0].read_bytes())
    found = json.loads(mtmd("transcribe", "-", *hearing, "--format", "json").out)
    assert found["file"] == "-" and found["text"] == expected["text"]
    assert found["seconds"] == expected["seconds"]
    piped(b"")
    assert (
        "standard input: found nothing, expected audio"
        in mtmd("transcribe", "-", *hearing).refused()
    )
    assert "read once" in mtmd("transcribe", "-", "-", *hearing).refused()


def test_long_audio_from_a_pipe_is_whole(
    mtmd: Any, hearing: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pictures may have is no limit for it."""
    monkeypatch.setattr("mtmd.commands.shared.STDIN_BYTES_MAX", 5000)
    data = wav(tones(0.5))
    assert len(data) > 10_000
    for command in (("transcribe", "-", "--format", "json"), ("describe", "-", "--json")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        found = json.loads(mtmd(*command, *hearing).out)
        seconds = (
            found["seconds"] if "seconds" in found else found["receipt"]["audio"][0]["seconds"]
        )
        assert seconds == pytest.approx(0.5)


def test_what_comes_from_a_pipe_is_read_up_to_the_limit_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a byte more, by which whoever opens it refuses it."""
    monkeypatch.setattr(shared, "STDIN_BYTES_MAX", 100)
    monkeypatch.setattr("mtmd.clip.audio.limits.DEFAULT_LIMITS", AudioLimits(max_bytes=200))
    monkeypatch.setattr("mtmd.clip.video.limits.DEFAULT_LIMITS", VideoLimits(max_bytes=800))
    heads = {b"fLaC": 201, b"\0\0\0\x18ftypmp42": 801, b"\x89PNG\r\n\x1a\n": 101}
    for head, expected in heads.items():
        assert len(shared._whole(io.BytesIO(head + bytes(2000)))) == expected
