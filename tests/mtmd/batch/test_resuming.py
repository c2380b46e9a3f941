"""A later run goes on with the same question alone, and asks again about what has changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import OptionError
from mtmd.batch import resuming
from mtmd.batch.earlier_question import EarlierRun, own_sampling, requested
from mtmd.batch.inputs import Input
from mtmd.batch.output import KINDS, Before, Row, open_output
from mtmd.batch.resuming import what_is_left
from mtmd.llm.sampling.options import AppliedSampling, ModelSampling
from mtmd.options.answer import AnswerOptions

NOW = requested("demo", "How many?", "", {"dtype": "fp32", "threads": 3}, {"max_tokens": 5}, {})


def row(path: Path, error: str | None = None) -> Before:
    return Before(hashlib.sha256(path.read_bytes()).digest(), error)


def began(out: Path, now: dict[str, Any] = NOW) -> EarlierRun:
    """As after a first run that has written a row."""
    EarlierRun(out, now, False).keep()
    return EarlierRun(out, now, True)


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.png").write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"prompt": "Which colour?"}, "rows with prompt 'How many?', now it is 'Which colour?'"),
        ({"model": "org/name"}, "rows with model 'demo', now it is 'org/name'"),
        ({"answer options": {"max_tokens": 5, "temperature": 1.0}}, "answer options"),
        ({"model options": {}}, "model options"),
        ({"system": "You count."}, "system"),
        ({"frames": {"fps": 2.0}}, "frames"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_question_is_refused(
    changes: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    before = began(out)
    assert before.note == "" and EarlierRun(out, NOW, True).began == before.began > 0
    with pytest.raises(OptionError, match="expected the same: name another file") as error:
        EarlierRun(out, NOW | changes, True)
    assert reported in str(error.value)
    EarlierRun(out, NOW | changes, False)  # the rows are gone


def test_other_settings_of_the_model_are_refused(tmp_path: Path) -> None:
    """What holds where nothing is chosen may change, with the model's files or with a version."""
    out = tmp_path / "rows.jsonl"
    first = EarlierRun(out, NOW, False)
    first.check_sampling({"repetition_penalty": 1.1})
    first.keep()
    EarlierRun(out, NOW, True).check_sampling({"repetition_penalty": 1.1})
    for other in ({}, {"repetition_penalty": 1.2}):
        with pytest.raises(OptionError, match=r"rows with sampling .*1\.1.*, now it is"):
            EarlierRun(out, NOW, True).check_sampling(other)
    saved = json.loads(first.path.read_text())
    first.path.write_text(
        json.dumps({n: v for n, v in saved.items() if n != "sampling"} | {"version": 1})
    )
    EarlierRun(out, NOW, True).check_sampling({})
    with pytest.raises(OptionError, match=r"\(repetition_penalty 1.1\).* by --sampling off"):
        EarlierRun(out, NOW, True).check_sampling({"repetition_penalty": 1.1})


def test_settings_that_choose_no_token_are_not_compared() -> None:
    own = {"top_k": 20, "repetition_penalty": 1.1}
    applied = AppliedSampling("greedy", ModelSampling("x", own), tuple(own))
    greedy = AnswerOptions(**own, sampling=applied)
    assert own_sampling(greedy) == {"repetition_penalty": 1.1}
    assert own_sampling(AnswerOptions(**own, temperature=1, sampling=applied)) == own


def test_threads_make_no_other_question() -> None:
    assert NOW["model options"] == {"dtype": "fp32"}


def test_a_file_of_before_is_gone_on_with_and_told(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    before = EarlierRun(out, NOW, True)
    assert "rows.jsonl.run.json is not there" in before.note and before.began == 0
    before.keep()
    assert EarlierRun(out, NOW, True).note == ""
    before.path.write_text("{}")
    with pytest.raises(OptionError, match="did not write"):
        EarlierRun(out, NOW, True)


def test_a_picture_is_known_however_its_path_is_written(pictures: Path, tmp_path: Path) -> None:
    rows = {
        "pictures/a.png": row(pictures / "a.png"),
        str(pictures / "b.png"): row(pictures / "b.png"),
    }
    before = began(tmp_path / "rows.jsonl")
    (tmp_path / "link").symlink_to(pictures)
    spelt = [f"{pictures}/a.png", "./pictures/b.png", "link/c.png", "pictures/c.png", "link/a.png"]
    left = what_is_left([Input(path) for path in spelt], rows, before, False)
    assert [one.path for one in left.inputs] == ["link/c.png"] and left.known == 2
    part = Input("link/a.png", 0, 2.5)
    assert what_is_left([part], rows, before, False).inputs == (part,), "a part of it is not it"
    assert (
        what_is_left(
            [part], {"pictures/a.png#t=0,2.5": row(pictures / "a.png")}, before, False
        ).known
        == 1
    )


def test_a_link_to_a_picture_has_a_row_of_its_own(pictures: Path, tmp_path: Path) -> None:
    (pictures / "d.png").symlink_to(pictures / "a.png")
    both = [Input("pictures/a.png"), Input("pictures/d.png")]
    assert len(what_is_left(both, {}, began(tmp_path / "rows.jsonl"), False).inputs) == 2


def test_from_another_folder(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names stand for what they stood for; new ones are written in full there."""
    before = began(tmp_path / "rows.jsonl")
    monkeypatch.chdir(pictures)
    rows = {"pictures/a.png": row(pictures / "a.png"), "b.png": row(pictures / "b.png")}
    left = what_is_left([Input("a.png"), Input("b.png")], rows, before, False)
    assert [one.path for one in left.inputs] == [str(pictures / "b.png")] and left.known == 1


def test_names_that_are_no_text(pictures: Path, tmp_path: Path) -> None:
    odd = Input(os.fsdecode(bytes(pictures) + b"/\xff.png"))
    assert (
        what_is_left([odd], {odd.name: Before(None, None)}, began(tmp_path / "o.csv"), False).known
        == 1
    )


def test_what_has_changed_is_asked_again(pictures: Path, tmp_path: Path) -> None:
    rows = {str(path): row(path) for path in sorted(pictures.iterdir())}
    rows[str(pictures / "none.png")] = Before(None, "no such file")
    inputs, before = [Input(name) for name in rows], began(tmp_path / "rows.jsonl")
    same = what_is_left(inputs, rows, before, False)
    assert (same.inputs, same.known, same.failed) == ((), 4, ((inputs[3].path, "no such file"),))
    (pictures / "b.png").write_bytes(b"new")
    (pictures / "none.png").write_bytes(b"here by now")
    left = what_is_left(inputs, rows, before, False)
    assert left.inputs == (inputs[1], inputs[3]) and left.old == {i.path for i in left.inputs}
    assert left.reported == "asked again: 2 of before have changed" and left.known == 2


def test_files_older_than_the_rows_are_not_read(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = began(tmp_path / "rows.jsonl")
    before.began += 1e6
    monkeypatch.setattr(resuming, "_digest", lambda _: pytest.fail("read"))
    rows = {"pictures/a.png": row(pictures / "a.png")}
    assert what_is_left([Input("pictures/a.png")], rows, before, False).known == 1


def test_what_has_failed_is_asked_again_on_request(pictures: Path, tmp_path: Path) -> None:
    rows = {
        "pictures/a.png": row(pictures / "a.png", "no memory"),
        "pictures/b.png": row(pictures / "b.png"),
    }
    inputs, before = [Input(name) for name in rows], began(tmp_path / "rows.jsonl")
    assert what_is_left(inputs, rows, before, False).failed == (("pictures/a.png", "no memory"),)
    left = what_is_left(inputs, rows, before, True)
    assert left.inputs == (inputs[0],) and left.reported == "asked again: 1 of before failed"


@pytest.mark.parametrize("ending", tuple(KINDS))
def test_rows_that_are_answered_again_stand_once(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{ending}"
    first = open_output(path, False)
    for n in range(4):
        first.append(
            Row(f'"{n}",\n.png', "0" * 64, *((None, "bad\r\n") if n % 2 else ("fine", None)))
        )
    first.close()
    data = path.read_bytes()

    second = open_output(path, True)
    second.forget(frozenset({'"1",\n.png', '"2",\n.png'}))
    second.close()
    third = open_output(path, True)
    assert len(third.known) == 4, "nothing goes before a new row is there"
    assert path.read_bytes() == data or ending == ".parquet"
    third.forget(frozenset({'"1",\n.png', '"2",\n.png'}))
    third.append(Row('"1",\n.png', "1" * 64, "mended"))
    third.close()
    assert {name: r.error for name, r in open_output(path, True).known.items()} == {
        '"0",\n.png': None,
        '"3",\n.png': "bad\r\n",
        '"1",\n.png': None,
    }


def test_the_command(world: dict[int, Path], mtmd: Any, tmp_path: Path) -> None:
    """As a user meets it: another prompt, a picture that was broken, one that was replaced."""
    good, broken, out = tmp_path / "good.png", tmp_path / "broken.png", tmp_path / "o.jsonl"
    good.write_bytes(world[1].read_bytes())
    broken.write_bytes(b"junk")
    same = ("batch", good, broken, "--out", out, "-p", "How many shapes are there?")
    ran = mtmd(*same)
    assert ran.code == 1 and "; 1 failed\n" in ran.err
    assert f"  {broken}: " in ran.err and "--retry-failed asks about them again" in ran.err
    refused = mtmd(*same[:-1], "What is this?", "--resume").refused()
    assert "found rows with prompt 'How many" in refused
    assert "found rows with answer options" in mtmd(*same, "--resume", "--temperature", 1).refused()
    assert "o.jsonl: 0 rows" in mtmd(*same, "--resume", "--threads", 1, "--temperature", 0).err
    broken.write_bytes(world[2].read_bytes())
    good.write_bytes(world[4].read_bytes())
    again = mtmd(*same, "--resume")
    assert again.code == 0 and "asked again: 2 of before have changed\n" in again.err
    assert [
        line.count('"text": "Four."') + line.count('"text": "Two."')
        for line in out.read_text().splitlines()
    ] == [1, 1]
    assert "--retry-failed: found with --ray" in mtmd(*same, "--retry-failed", "--ray", "local").err
