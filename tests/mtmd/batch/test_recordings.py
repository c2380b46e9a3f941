"""Recordings in a batch: a row for each, with a model that takes audio."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audio_cases import gemma4_unified
from PIL import Image
from sounds import encoded, tones, wav

from mtmd.base.errors import OptionError
from mtmd.batch.answering import Batch
from mtmd.batch.inputs import Input, find_inputs
from mtmd.batch.output import Row
from mtmd.prompt.audio_input import AudioInput


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "a.mp3").write_bytes(encoded(tones(0.4, 44_100), 44_100, "mp3", "libmp3lame"))
    (folder / "b.wav").write_bytes(wav(tones(0.4)))
    (folder / "c.wav").write_bytes(wav(tones(0.4))[:44])
    (folder / "notes.txt").write_text("Dear Ada,\n")
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_for_each(
    mtmd: Any, calls: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("hearing")
    gemma4_unified(model)
    out = tmp_path / "rows.jsonl"
    command = ("batch", calls, "-p", "Who calls?", "-m", model, "--device", "cpu")
    command += ("--max-tokens", 2, "--out", out)
    ran = mtmd(*command)
    result = rows(out)
    assert [Path(row["image"]).name for row in result] == ["a.mp3", "b.wav", "c.wav"]
    assert [row["error"] is None for row in result] == [True, True, False] and ran.code == 1
    assert "no sound can be decoded" in result[2]["error"] and "1 .txt" in ran.err
    digests = [
        hashlib.sha256((calls / name).read_bytes()).hexdigest() for name in ("a.mp3", "b.wav")
    ]
    assert [row["sha256"] for row in result[:2]] == digests
    assert "0 rows" in mtmd(*command, "--resume").err and len(rows(out)) == 3


def test_a_model_without_ears_says_so(mtmd: Any, calls: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert mtmd("batch", calls / "b.wav", "-p", "x", "--max-tokens", 1, "--out", out).code == 1
    (row,) = rows(out)
    assert "has no audio encoder" in row["error"]


def test_folders_with_pictures_are_about_pictures(calls: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "slide.png")
    (tmp_path / "talk.mp3").write_bytes((calls / "a.mp3").read_bytes())
    found = find_inputs([str(tmp_path)], audio=True)
    assert [Path(one.path).name for one in found.inputs] == ["slide.png"]
    assert found.reported.endswith("1 .mp3")


def test_folders_of_recordings_are_for_who_hears(mtmd: Any, calls: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes((calls / "a.mp3").read_bytes())
    assert len(find_inputs([str(calls)], audio=True).inputs) == 3
    with pytest.raises(OptionError, match="found a folder without pictures") as error:
        find_inputs([str(calls)])
    assert ".png" in str(error.value) and ".wav" not in str(error.value)
    for command in (("embed", tmp_path, "--query", "a bell"), ("rerank", "Who?", tmp_path)):
        assert "a folder without pictures" in mtmd(*command, "-m", "no/such-model").refused()


@pytest.mark.parametrize("brand", ["mp42", "isom", "dash"])
def test_recordings_in_containers_of_videos(
    brand: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their name, as `mtmd transcribe` takes them."""
    data = bytearray(encoded(tones(0.4, 44_100), 44_100, "mp4", "aac"))
    assert data[4:8] == b"ftyp"
    data[8:12] = brand.encode()
    path = tmp_path / "call.m4a"
    path.write_bytes(data)
    shown: list[object] = []

    def row(_: str, source: Callable[[], tuple[str, object]]) -> Row:
        name, one = source()
        shown.append(one)
        return Row(name)

    batch = Batch.__new__(Batch)
    monkeypatch.setattr(batch, "_row", row, raising=False)
    assert batch.row(Input(str(path))).image == str(path)
    assert batch.row_of_data("x", lambda: ("call.m4a", bytes(data))).image == "call.m4a"
    assert [type(one) for one in shown] == [AudioInput, AudioInput]
