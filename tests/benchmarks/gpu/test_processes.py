"""The process of a part: whatever becomes of it, its rows are kept, and its end is told."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress

import pytest

# A part of three rows in a process of its own; `rows` are what each does, by its number.
PART = """
import json, os, sys, time
def say(**line): print(json.dumps({"part": "p", **line}), flush=True)
after = int(sys.argv[sys.argv.index("--after") + 1]) if "--after" in sys.argv else -1
failed = False
for number in range(after + 1, 3):
    say(begins=str(number))
    ROWS
    say(row=str(number), cells={})
END
say(ends=True)
raise SystemExit(int(failed))
"""


@pytest.fixture
def processes(module, monkeypatch):
    result = module("gpu_kernels.processes")
    monkeypatch.setattr(result, "GRACE_S", 0.3)
    return result


@pytest.fixture
def run(processes):
    """The lines of a part, with code in each row, and after the last."""

    def lines(rows="", end="", seconds=60.0):
        code = PART.replace("ROWS", rows.replace("\n", "\n    ")).replace("END", end)
        result = list(processes.part_lines("p", [sys.executable, "-c", code], os.environ, seconds))
        assert all(line["part"] == "p" for line in result)
        return result

    return lines


def rows_of(lines):
    return [line["row"] for line in lines if "cells" in line]


def failures(lines):
    return [(line.get("row"), line["failure"]) for line in lines if "failure" in line]


def test_as_it_should_be(run):
    lines = run()
    assert rows_of(lines) == ["0", "1", "2"] and not failures(lines)


def test_an_exception_that_nobody_caught_is_a_failure(run):
    """It ends with exit code 1, as a part with a failure does."""
    lines = run(rows="if number == 1: raise OSError('no disk')")
    assert rows_of(lines) == ["0", "2"]
    text = "its process did not end as it should (exit code 1): OSError: no disk"
    assert failures(lines) == [("1", text)]
    assert "OSError: no disk" in next(line for line in lines if "failure" in line)["stderr"]


def test_so_it_is_after_a_row_that_failed(run):
    rows = "if number == 0: failed = True; say(row='0', failure='wrong'); continue"
    lines = run(rows=f"{rows}\nif number == 1: raise OSError('no disk')")
    assert failures(lines) == [
        ("0", "wrong"),
        ("1", "its process ended before its last row (exit code 1): OSError: no disk"),
    ]
    assert rows_of(lines) == ["2"]
    assert failures(run(rows=rows)) == [("0", "wrong")]


@pytest.mark.parametrize(("end", "code"), [("os._exit(0)", 0), ("os._exit(7)", 7)])
def test_an_end_before_the_last_row_is_a_failure(run, end, code):
    """Nor does another start help: there is nothing after the last row."""
    result = failures(run(end=end))
    assert len(result) == 2 and not any(row for row, _ in result)
    assert all(f"(exit code {code})" in text for _, text in result)


def test_a_crash_costs_one_row(run):
    lines = run(rows="if number == 1: os.abort()")
    assert rows_of(lines) == ["0", "2"]
    assert failures(lines) == [("1", "its process did not end as it should (exit code -6)")]


def test_a_device_that_is_gone_costs_one_row(run):
    lines = run(rows="if number == 1: say(row='1', failure='illegal access'); raise SystemExit(3)")
    assert rows_of(lines) == ["0", "2"] and failures(lines) == [("1", "illegal access")]
    assert any("started again" in line.get("note", "") for line in lines)


def test_one_that_never_gets_on_is_not_started_again_for_ever(run, processes):
    lines = run(rows="os.abort()")
    assert len(failures(lines)) == 3 and not rows_of(lines)
    lines = list(processes.part_lines("p", [sys.executable, "-c", "1 / 0"], os.environ, 60))
    assert len(lines) == 1 and "ZeroDivisionError" in lines[0]["stderr"]


def test_a_row_that_never_ends_costs_one_row(processes):
    code = PART.replace("ROWS", "if number == 1: time.sleep(60)").replace("END", "")
    start = time.monotonic()
    lines = list(processes.part_lines("p", [sys.executable, "-c", code], os.environ, 60, 1.0))
    assert time.monotonic() - start < 30
    assert rows_of(lines) == ["0", "2"]
    assert failures(lines) == [("1", "it was not made in 1 s")]


def test_parts_at_once(processes, monkeypatch):
    """Lines come as they are there; who stops listening ends all processes."""
    quick, slow = (
        [sys.executable, "-c", PART.replace("ROWS", rows).replace("END", "")]
        for rows in ("pass", "if number == 1: time.sleep(60)")
    )
    sources = [processes.part_lines("p", command, os.environ, 60) for command in (slow, quick)]
    lines, seen = processes.merged(sources), []
    while len(rows_of(seen)) < 4:
        seen.append(next(lines))
    monkeypatch.setattr(processes._Run, "over", False)
    start = time.monotonic()
    lines.close()
    while processes._Run.running and time.monotonic() - start < 30:
        time.sleep(0.05)
    assert not processes._Run.running


def test_what_was_there_when_time_was_up_is_kept(run):
    start = time.monotonic()
    lines = run(rows="if number == 1: time.sleep(60)", seconds=1.5)
    assert time.monotonic() - start < 30
    assert rows_of(lines) == ["0"] and failures(lines) == [("1", "it was ended after 2 s")]


def test_lines_come_as_they_are_written(processes):
    code = PART.replace("ROWS", "if number == 1: time.sleep(60)").replace("END", "")
    lines = processes.part_lines("p", [sys.executable, "-c", code], os.environ, 60)
    assert next(lines)["begins"] == "0" and next(lines)["row"] == "0"
    start = time.monotonic()
    lines.close()  # as an interrupted script does
    assert time.monotonic() - start < 30


def test_what_is_no_line_of_the_part_is_passed_on(run, capfd):
    rows = "print('libfoo: warning'); print(json.dumps([1])); print(json.dumps({'part': 'q'}))"
    lines = run(rows=f"if number == 0: {rows}")
    stated = [line["said"] for line in lines if "said" in line]
    assert stated == ["libfoo: warning", "[1]", '{"part": "q"}']
    assert rows_of(lines) == ["0", "1", "2"] and not failures(lines)
    assert "libfoo: warning" in capfd.readouterr().err


def test_what_a_part_leaves_running_is_ended(run, tmp_path):
    file = tmp_path / "pid"
    start = "import subprocess; child = subprocess.Popen(['sleep', '600']); "
    lines = run(end=f"{start}open({str(file)!r}, 'w').write(str(child.pid))")
    assert not failures(lines)
    ended = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < ended:
            os.kill(int(file.read_text()), 0)
            time.sleep(0.05)
        pytest.fail("it still runs")


def test_seconds_that_are_left_are_told(processes):
    code = "import sys, json; print(json.dumps({'part': 'p', 'args': sys.argv[1:], 'ends': 1}))"
    [line] = processes.part_lines("p", [sys.executable, "-c", code], os.environ, 20)
    option, seconds = line["args"]
    assert option == "--seconds" and 15 < float(seconds) <= 20
    assert json.dumps(line)
