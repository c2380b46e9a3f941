"""Videos in a batch: a row for each, or for each part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clips import video

from mtmd.base.errors import OptionError
from mtmd.batch.inputs import Input, in_parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    (folder / "a.mp4").write_bytes(video(30, fps=12))
    (folder / "b.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(100))
    return folder


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_for_each_part_and_one_for_what_cannot_be_read(mtmd, folder, tmp_path):
    out = tmp_path / "rows.jsonl"
    ran = mtmd("batch", folder, "-p", "x", "--every", "1s", "--max-tokens", 1, "--out", out)
    result = rows(out)
    assert [Path(r["image"]).name for r in result] == [
        "a.mp4#t=0,1",
        "a.mp4#t=1,2",
        "a.mp4#t=2,2.5",
        "b.mp4",
    ]
    assert [r["error"] is None for r in result] == [True, True, True, False] and ran.code == 1
    same = ("-p", "x", "--every", "1s", "--max-tokens", 1, "--out", out)
    again = mtmd("batch", folder, *same, "--resume")
    assert len(rows(out)) == 4 and "0 rows" in again.err


def test_each_in_a_table(mtmd, folder):
    ran = mtmd("describe", "--each", folder, "--fps", 2, "--max-tokens", 1, "--json")
    first, second = map(json.loads, ran.out.splitlines())
    assert first["error"] is None and first["sha256"] and "MP4" in second["error"]


def test_parts(folder):
    with pytest.raises(OptionError, match="every: found 1e-05 s"):
        in_parts([Input(str(folder / "a.mp4"))], 1e-5)
    assert in_parts([Input("gone.mp4")], 1) == [Input("gone.mp4")]


def test_what_makes_no_sense(mtmd, folder, tmp_path):
    words = ("batch", folder, "--out", tmp_path / "x.csv", "--every")
    assert "--every: found with --from" in mtmd(*words, "5", "--from", "1").refused()
    assert "expected at least 0.1" in mtmd(*words, "0").refused()
