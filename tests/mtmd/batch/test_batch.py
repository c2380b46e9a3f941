"""`mtmd batch`: each picture its own row, in whatever format, whatever goes wrong, and however
often it is broken off.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from scripted import writes
from thinking_templates import TEMPLATES

from mtmd.base.errors import DeviceError, MtmdError, OptionError
from mtmd.batch.answering import Batch
from mtmd.batch.inputs import find_inputs
from mtmd.batch.output import COLUMNS, GROUP, KINDS, LATER, Before, CsvForm, Row, open_output
from mtmd.commands.batch import interrupts_wait
from mtmd.model import Model
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.load_image import read_picture
from mtmd.service.service import Service

COUNT = "How many shapes are there?"
WORDS = ("Zero.", "One.", "Two.", "Three.", "Four.")
COMMAND = [sys.executable, "-m", "mtmd.cli", "batch"]
ENDINGS = tuple(KINDS)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """40 pictures of the demo model's world in order, and how many shapes there are."""
    from world import draw

    folder, rng, result = tmp_path_factory.mktemp("pictures"), random.Random(77), {}
    for n in range(40):
        image, facts = draw(rng)
        path = folder / f"{n:02}.png"
        image.save(path)
        result[path] = WORDS[len(facts.things)]
    return result


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [{k: v or None for k, v in row.items()} for row in csv.DictReader(file)]
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_answers_that_were_cut_are_counted(
    pictures: dict[Path, str], mtmd: Any, tmp_path: Path
) -> None:
    requested = list(pictures)[:2]
    out = tmp_path / "rows.jsonl"
    ran = mtmd("batch", *requested, "-p", COUNT, "--max-tokens", "1", "--out", out)
    assert ran.code == 0 and [row["finish"] for row in rows_of(out)] == ["length"] * 2
    assert ran.err.endswith(
        "  2 answers were cut (finish is length); --max-tokens -1 is all that fits\n"
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_picture_has_its_answer_in_order(
    ending: str, pictures: dict[Path, str], mtmd: Any, tmp_path: Path
) -> None:
    out, requested = tmp_path / f"rows{ending}", list(pictures)[:12]
    ran = mtmd("batch", *requested, "-p", COUNT, "--out", out)
    assert (ran.code, ran.out) == (0, "") and ran.err.count("\n") == 1 and "\r" not in ran.err, ran
    assert ran.err.startswith(f"{out}: 12 rows in ") and " images/s; 0 failed" in ran.err
    rows = rows_of(out)
    assert [(r["image"], r["text"]) for r in rows] == [(str(p), pictures[p]) for p in requested]
    for path, row in zip(requested, rows, strict=True):
        assert (
            tuple(row) == COLUMNS and row["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        )
        assert (row["error"], row["finish"]) == (None, "stop")
        assert (
            int(row["image_tokens"]) == 9 < int(row["prompt_tokens"])
            and 1 < int(row["output_tokens"]) < 6
        )
        assert all(float(row[name]) >= 0 for name in COLUMNS if name.endswith("_ms"))
    requested = tmp_path / f"rows{ending}.run.json"
    assert set(tmp_path.iterdir()) == {out, requested}, "nothing else is left behind"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_row_has_the_thought_and_the_warnings_of_its_answer(
    ending: str, one: Path, demo: Model, mtmd: Any, tmp_path: Path
) -> None:
    template, cut, whole = (tmp_path / name for name in ("chat.jinja", "cut", "whole"))
    template.write_text(TEMPLATES["opened"])
    command = "batch", one, "--chat-template", template, "--out"
    with writes(demo, "I wonder and wonder"):
        ran = mtmd(*command, cut.with_suffix(ending), "--max-tokens", 4)
    assert ran.code == 0 and "1 row has a thought and no answer; give --max-tokens" in ran.err
    (row,) = rows_of(cut.with_suffix(ending))
    assert not row["text"] and row["thinking"] and "I wonder and".startswith(row["thinking"])
    assert (row["finish"], int(row["thinking_tokens"])) == ("length", 4)
    assert row["warnings"].startswith("the answer was cut within its thought")
    with writes(demo, "Hm.\n</think>\n\nHello."):
        ran = mtmd(*command, whole.with_suffix(ending))
    assert ran.code == 0 and "no answer" not in ran.err
    (row,) = rows_of(whole.with_suffix(ending))
    assert (row["text"], row["thinking"], row["finish"]) == ("Hello.", "Hm.", "stop")
    assert 0 < int(row["thinking_tokens"]) < int(row["output_tokens"]) and row["warnings"] is None


def test_rows_of_the_version_before_are_gone_on_from(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.jsonl", [Row(f"{n}.png", text=str(n)) for n in range(2)]
    before = {k: v for k, v in rows[0].asdict().items() if k not in LATER}
    path.write_text(json.dumps(before) + "\n")
    output = open_output(path, True)
    output.append(rows[1])
    output.close()
    assert output.known == {"0.png": Before(None, None), "1.png": Before(None, None)}
    assert [row["text"] for row in rows_of(path)] == ["0", "1"]
    table = tmp_path / "a.parquet"
    (tmp_path / "a.parquet.rows.jsonl").write_bytes(path.read_bytes())
    open_output(table, True).close()
    assert [(r["text"], r["thinking"]) for r in rows_of(table)] == [("0", None), ("1", None)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_bad_picture_is_a_row_with_its_error(
    ending: str, one: Path, mtmd: Any, tmp_path: Path
) -> None:
    out, broken = tmp_path / f"rows{ending}", tmp_path / 'bro"ken,\n.png'
    broken.write_bytes(one.read_bytes()[:200])
    ran = mtmd("batch", tmp_path / "none.png", one, broken, "-p", COUNT, "--out", out)
    assert ran.code == 1 and "; 2 failed" in ran.err
    none, good, bad = rows_of(out)
    assert (good["text"], good["error"]) == ("One.", None)
    assert (
        "no such file" in none["error"]
        and none["sha256"] is None
        and none["text"] is None
        and none["finish"] is None
    )
    assert (
        bad["image"] == str(broken)
        and bad["sha256"] == hashlib.sha256(broken.read_bytes()).hexdigest()
        and "truncated" in bad["error"]
    )
    again = mtmd("batch", tmp_path / "none.png", one, broken, "-p", COUNT, "--out", out, "--resume")
    assert (
        again.code == 1
        and ": 0 rows" in again.err
        and "3 from before; 2 failed" in again.err
        and len(rows_of(out)) == 3
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_later_run_goes_on(
    ending: str, pictures: dict[Path, str], mtmd: Any, tmp_path: Path
) -> None:
    out, requested = tmp_path / f"rows{ending}", list(pictures)[:6]
    assert mtmd("batch", *requested[:2], "-p", COUNT, "--out", out, "--resume").code == 0
    first = rows_of(out)
    refused = mtmd("batch", *requested, "--out", out).refused()
    assert (
        "found a file that is there already; continue it with --resume" in refused
        and rows_of(out) == first
    )
    ran = mtmd("batch", *requested, "-p", COUNT, "--out", out, "--resume")
    assert ran.code == 0 and ": 4 rows in " in ran.err and " and 2 from before; 0 failed" in ran.err
    rows = rows_of(out)
    assert rows[:2] == first and [(r["image"], r["text"]) for r in rows] == [
        (str(p), pictures[p]) for p in requested
    ]
    assert len(list(tmp_path.iterdir())) == 2


def test_all_rows_right_whatever_their_order(
    pictures: dict[Path, str], mtmd: Any, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    assert (
        mtmd("batch", *pictures, "-p", COUNT, "--out", out, "--unordered", "--parallel", 16).code
        == 0
    )
    rows = rows_of(out)
    assert {r["image"]: r["text"] for r in rows} == {
        str(p): text for p, text in pictures.items()
    } and len(rows) == 40


def test_pictures_are_answered_together(pictures: dict[Path, str]) -> None:
    from mtmd import load

    model = load(parallel=8, threads=1)
    rows = list(
        Batch(model.service, COUNT, AnswerOptions(), 8).rows(find_inputs(map(str, pictures)).inputs)
    )
    stats = model.service.stats()
    model.close()
    assert [r.text for r in rows] == list(pictures.values())
    assert stats.finished == 40 and stats.rejected == 0 and stats.batch_rows > stats.batches * 8


def test_answer_options(one: Path, mtmd: Any, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    assert mtmd("batch", one, "--out", tmp_path / "a.jsonl", "--json-schema", schema).code == 0
    assert json.loads(rows_of(tmp_path / "a.jsonl")[0]["text"]) in ("yes", "no")
    assert mtmd("batch", one, "-o", tmp_path / "b.jsonl", "--max-tokens", 3).code == 0
    assert (
        rows_of(tmp_path / "b.jsonl")[0]["finish"] == "length"
        and rows_of(tmp_path / "b.jsonl")[0]["output_tokens"] == 3
    )


def test_a_list_folders_and_patterns(
    pictures: dict[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = list(pictures)[:3]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for name in (
        "deep/er/b.PNG",
        "deep/a.jpg",
        "deep/notes.txt",
        ".hidden/c.png",
        "deep/._a.jpg",
        "[1].png",
        "z.webp",
    ):
        (tmp_path / name).write_bytes(b"")
    listed = tmp_path / "list.txt"
    listed.write_text(f"{first}\r\n\n{second}\nnot there.png\n")
    monkeypatch.chdir(tmp_path)

    def names(*words: str, lists: tuple[str, ...] = ()) -> list[str]:
        return [one.name for one in find_inputs(words, lists).inputs]

    assert names("deep") == ["deep/a.jpg", "deep/er/b.PNG"]
    assert names("**/*.jpg", str(third)) == ["deep/a.jpg", str(third)]
    assert names("[1].png", "z.webp", "[1].png") == ["[1].png", "z.webp"]
    assert names("z.webp", lists=("list.txt",)) == [
        "z.webp",
        str(first),
        str(second),
        "not there.png",
    ]
    assert names("none.png") == ["none.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x.png\n\xff.png\n")))
    assert names(lists=("-",)) == ["x.png", "\\xff.png"]
    listed.write_text("\ufeffa.png\r\nb.png\r\n", "utf-8")
    assert names(lists=("list.txt",)) == ["a.png", "b.png"], "as editors of Windows write it"
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n \n")
    for words, lists, reported in (
        (("empty",), (), "a folder without pictures"),
        (("*.gif",), (), "no file that fits"),
        ((), (), "no picture was named"),
        ((), ("blank.txt",), "no path in it"),
        ((), ("missing.txt",), "cannot be read"),
    ):
        with pytest.raises(OptionError, match=reported):
            find_inputs(words, lists)


def test_mistakes(one: Path, mtmd: Any, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"image": 3}\n')
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "other.parquet").write_text("x")
    (tmp_path / "torn.jsonl").write_text("something without a line break")
    table = tmp_path / "a.csv"
    for arguments, reported in (
        (["--out", tmp_path / "a.txt"], "found the ending '.txt'"),
        (["--out", tmp_path / "no" / "a.csv"], "found no folder"),
        (["--out", table, "--top-p", "2"], "--top-p: found 2"),
        (["--out", table, "--parallel", "0"], "parallel"),
        (["--out", table, "--json-schema", tmp_path / "none"], "cannot be read"),
        ([], "--out"),
        (["--out", table, "-m", tmp_path / "none"], "none"),
        *(
            (["--out", tmp_path / name, "--resume"], "name another file")
            for name in ("other.jsonl", "other.csv", "other.parquet", "torn.jsonl")
        ),
    ):
        assert reported in mtmd("batch", one, *arguments).refused()
    assert "no picture was named" in mtmd("batch", "--out", tmp_path / "a.csv").refused()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "other.csv",
        "other.jsonl",
        "other.parquet",
        "torn.jsonl",
    ]
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


def test_a_mistake_that_fails_every_picture_is_told_once(
    one: Path, mtmd: Any, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("true")
    assert (
        "ignore_eos"
        in mtmd(
            "batch", one, one, "--out", tmp_path / "a.csv", "--json-schema", schema, "--ignore-eos"
        ).err
    )
    assert not (tmp_path / "a.csv").exists()


def test_without_pyarrow(
    one: Path, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in mtmd("batch", one, "--out", tmp_path / "a.parquet").refused()


ODD = [
    Row(
        "a.png",
        "0" * 64,
        'He said: "so"\nand\r\nleft,\rquickly \u2028🎉',
        None,
        "stop",
        1,
        2,
        3,
        0.25,
        1.0,
        2.0,
        3.0,
        4.0,
    ),
    Row('b",\n.png', None, None, 'an "error"'),
    Row("c.png", "1" * 64, "", None, "length", 1, 2, 3, 0.5, 0.0, 0.0, 0.0, 0.0, "=a\n", 2, "cut"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
def test_torn_anywhere_it_goes_on_to_the_same_file(ending: str, tmp_path: Path) -> None:
    whole = tmp_path / f"whole{ending}"
    output, ends = open_output(whole, False), []
    for row in ODD:
        output.append(row)
        ends.append(whole.stat().st_size)
    output.close()
    data, torn = whole.read_bytes(), tmp_path / f"torn{ending}"
    for cut in sorted({*range(0, len(data), 3), *(end + n for end in ends for n in (-1, 0))}):
        torn.write_bytes(data[:cut])
        saved = sum(end <= cut for end in ends)
        output = open_output(torn, True)
        assert output.known == {
            row.image: Before(row.sha256 and bytes.fromhex(row.sha256), row.error)
            for row in ODD[:saved]
        }
        for row in ODD[saved:]:
            output.append(row)
        output.close()
        assert torn.read_bytes() == data, cut


def test_values_survive_each_format(tmp_path: Path) -> None:
    for ending in ENDINGS:
        path = tmp_path / f"a{ending}"
        output = open_output(path, False)
        for row in ODD:
            output.append(row)
        output.close()
        rows = rows_of(path)
        assert [r["image"] for r in rows] == [r.image for r in ODD] and [
            r["error"] for r in rows
        ] == [r.error for r in ODD]
        assert (rows[2]["thinking"] or "").lstrip("'") == ODD[2].thinking
        assert (int(rows[2]["thinking_tokens"]), rows[2]["warnings"]) == (2, "cut")
        assert (
            rows[0]["text"] == ODD[0].text
            and float(rows[0]["queued_ms"]) == 0.25
            and int(rows[0]["output_tokens"]) == 3
        )


def killed(output: Any) -> None:
    """As the system leaves it when a process ends: files are closed, nothing else is done."""
    output._rows._file.close()


def test_parquet_goes_on_from_its_rows_and_from_itself(tmp_path: Path) -> None:
    path, saved = tmp_path / "a.parquet", tmp_path / "a.parquet.rows.jsonl"
    many = [Row(f"{n}.png", text=str(n)) for n in range(GROUP + 3)]
    first = open_output(path, False)
    first.append(many[0])
    killed(first)
    assert saved.exists() and not path.exists()
    with pytest.raises(OptionError, match="--resume"):
        open_output(path, False)
    second = open_output(path, True)
    assert second.known == {"0.png": Before(None, None)}
    for row in many[1:-1]:
        second.append(row)
    second.close()
    assert not saved.exists() and len(rows_of(path)) == GROUP + 2
    third = open_output(path, True)
    third.append(many[-1])
    killed(third)
    assert len(rows_of(path)) == GROUP + 2
    open_output(path, True).close()
    assert [r["text"] for r in rows_of(path)] == [r.text for r in many] and list(
        tmp_path.iterdir()
    ) == [path]


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None and time.monotonic() < end, (
            "it ended before it was to be broken off"
        )
        time.sleep(0.005)


def slow_batch(pictures: dict[Path, str], out: Path) -> subprocess.Popen[bytes]:
    """Long answers, two at a time."""
    few = ("--parallel", "2", "--ignore-eos", "--max-tokens", "40")
    return subprocess.Popen(
        [*COMMAND, *map(str, pictures), "-p", COUNT, "--out", str(out), *few],
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_killed_it_leaves_whole_rows_and_goes_on(
    ending: str, pictures: dict[Path, str], mtmd: Any, tmp_path: Path
) -> None:
    out = tmp_path / f"rows{ending}"
    rows = out if ending == ".jsonl" else tmp_path / "rows.parquet.rows.jsonl"
    process = slow_batch(pictures, out)
    until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, process)
    process.kill()
    process.communicate()
    data = rows.read_bytes()
    whole = [json.loads(line) for line in data.splitlines()]
    assert (
        data.endswith(b"\n")
        and 3 <= len(whole) < 40
        and [r["image"] for r in whole] == [str(p) for p in list(pictures)[: len(whole)]]
    )
    out.with_name(f"{out.name}.run.json").unlink()  # the other answers are asked to be short
    ran = mtmd("batch", *pictures, "-p", COUNT, "--out", out, "--resume")
    assert ran.code == 0 and "run.json is not there" in ran.err
    result = rows_of(out)
    assert [r["image"] for r in result] == [str(p) for p in pictures]
    assert [r["text"] for r in result[: len(whole)]] == [r["text"] for r in whole]
    assert [r["text"] for r in result[len(whole) :]] == list(pictures.values())[len(whole) :]


def test_interrupted_it_stops_with_what_is_done(pictures: dict[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    process = slow_batch(pictures, out)
    saved = tmp_path / "rows.parquet.rows.jsonl"
    until(lambda: saved.exists() and saved.read_bytes().count(b"\n") >= 2, process)
    process.send_signal(signal.SIGINT)
    _, reported = process.communicate(timeout=60)
    rows = rows_of(out)
    assert (
        process.returncode == 130
        and 2 <= len(rows) < 40
        and all(r["finish"] == "length" for r in rows)
    )
    lines = reported.decode().splitlines()
    assert lines[0].startswith(f"{out}: {len(rows)} rows in ") and lines[1:] == [
        f"  {len(rows)} answers were cut (finish is length); --max-tokens -1 is all that fits",
        "  the same command with --resume goes on",
        "mtmd batch: interrupted",
    ]


def test_a_row_that_is_written_is_counted() -> None:
    """Whenever Ctrl-C comes."""
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        done.append("counted")
    assert done == ["counted"]
    with interrupts_wait():
        done.append("another")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_bar_on_a_terminal(one: Path, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    fcntl.ioctl(
        its, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0)
    )  # one without a size shows no bar
    process = subprocess.Popen(
        [*COMMAND, str(one), str(tmp_path / "none.png"), "--out", str(tmp_path / "a.csv")],
        stderr=its,
        stdout=subprocess.PIPE,
    )
    os.close(its)
    shown = b""
    while True:
        try:
            more = os.read(ours, 1000)
        except OSError:  # how Linux tells that the other side is closed
            break
        if not more:
            break
        shown += more
    os.close(ours)
    assert process.communicate()[0] == b"" and process.returncode == 1
    assert b"0/2 [" in shown and b"\r" in shown and b"2 rows in" in shown.splitlines()[-3]


def test_leaving_early_gives_up_what_is_under_way(pictures: dict[Path, str]) -> None:
    from mtmd import load

    model = load(parallel=2, threads=1)
    rows = Batch(model.service, COUNT, AnswerOptions(), 2).rows(
        find_inputs(map(str, pictures)).inputs
    )
    assert next(rows).text == next(iter(pictures.values()))
    rows.close()
    stats = model.service.stats()
    model.close()
    assert (
        stats.running == stats.waiting == stats.encoding == 0
        and stats.finished + stats.cancelled == stats.requests < 40
    )


def test_errors_of_the_service_are_rows(
    pictures: dict[Path, str], demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = demo.service.submit_bulk, []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MtmdError("no more of that")
        return submit(*arguments)

    monkeypatch.setattr(demo.service, "submit_bulk", failing)
    rows = list(
        Batch(demo.service, COUNT, AnswerOptions(), 1).rows(
            find_inputs(map(str, list(pictures)[:4])).inputs
        )
    )
    assert sorted(str(r.error) for r in rows) == ["None"] * 3 + ["no more of that"] and all(
        r.sha256 for r in rows
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_device_that_fails_ends_it_with_the_cause_and_it_goes_on_later(
    ending: str,
    pictures: dict[Path, str],
    mtmd: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of those left could be answered: they are no rows, which a later run would skip."""
    out, submit = tmp_path / f"out{ending}", Service.submit_bulk
    first, load = threading.local(), read_picture

    def reading(path: str) -> Any:
        first.come = path in map(str, list(pictures)[:2])
        return load(path)

    def failing(service: Service, messages: Any, settings: AnswerOptions) -> Any:
        if not first.come:
            raise DeviceError("the device cpu has failed; start the process again")
        return submit(service, messages, settings)

    requested = ("batch", *list(pictures)[:5], "-p", COUNT, "--out", out, "--parallel", 1)
    with monkeypatch.context() as during:
        during.setattr(Service, "submit_bulk", failing)
        during.setattr("mtmd.batch.answering.read_picture", reading)
        ran = mtmd(*requested)
    assert ran.code == 2 and "the device cpu has failed" in ran.err and "--resume" in ran.err
    assert "Traceback" not in ran.err
    rows = rows_of(out)
    assert len(rows) == 2 and not any(row["error"] for row in rows)
    assert mtmd(*requested, "--resume").code == 0
    assert [row["text"] for row in rows_of(out)] == list(pictures.values())[:5]


TEXTS = [
    "=1+1",
    "+1",
    "-1 or so",
    "@x",
    "\t=1",
    "\n=1",
    "'=1",
    "''@",
    "'quoted'",
    "plain",
    "",
    "a=1",
]


def test_no_text_of_a_table_is_a_formula_to_a_spreadsheet() -> None:
    form = CsvForm()
    lines = [
        form.write(Row(f"{text}.png", text=text, error="e" * n)) for n, text in enumerate(TEXTS)
    ]
    cells = [
        c for row in csv.reader(io.StringIO(b"".join(lines).decode(), newline="")) for c in row
    ]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))]
    read = [row for _, row in form.read([form.header, *b"".join(lines).splitlines(keepends=True)])]
    assert [row["text"] for row in read] == TEXTS
    assert [row["image"] for row in read] == [f"{text}.png" for text in TEXTS]


def test_a_row_of_many_lines_is_put_together_once() -> None:
    """Line by line to what there is, its bytes were copied as often as it has lines."""

    class Line(bytes):
        def __radd__(self, other: bytes) -> bytes:
            raise AssertionError("copied for a line")

    form = CsvForm()
    data = form.write(Row("a.png", text='a "line"\n' * 1000)) + form.write(Row("b.png"))
    lines = [Line(line) for line in (form.header + data).splitlines(keepends=True)]
    ends, rows = zip(*form.read(lines), strict=True)
    assert [row["image"] for row in rows] == ["a.png", "b.png"]
    assert rows[0]["text"] == 'a "line"\n' * 1000 and ends[-1] == len(form.header + data)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    output = open_output(tmp_path / "rows.jsonl", False)

    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    output._file = Full()  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"No space left on device: '.*rows\.jsonl'"):
        output.append(Row("a.png", None, "text"))
