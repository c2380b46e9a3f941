"""Rows of a part: each by itself, a line as soon as it is there."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def rows(module):
    return module("gpu_kernels.rows")


@pytest.fixture
def made(rows):
    """The lines of tasks, and the exit code, on the CPU."""

    def make(tasks, after=None, **settings):
        lines = []
        setting = rows.Setting(device="cpu", **settings)
        code = rows.make_rows("part", tasks, setting, lines.append, after)
        assert all(line["part"] == "part" for line in lines)
        return [{k: v for k, v in line.items() if k not in ("part", "s")} for line in lines], code

    return make


def reported(lines):
    """Without what announces rows."""
    return [line for line in lines if not line.keys() & {"begins", "ends"}]


def good(rows, label):
    return rows.Task(label, lambda: rows.Row({"ms": 2.0}, "times"))


def test_a_row_that_fails_leaves_the_others(rows, made):
    def broken():
        raise ZeroDivisionError("by zero\nand more")

    def wrong():
        raise rows.WrongError("error 1, expected at most 0.1")

    def absent():
        raise rows.SkipError("no such tool")

    tasks = [
        good(rows, "a"),
        rows.Task("b", broken),
        rows.Task("c", wrong),
        rows.Task("d", absent),
        good(rows, "e"),
    ]
    lines, code = made(tasks)
    assert code == rows.FAILED
    a, b, c, d, e = reported(lines)
    assert a == {"row": "a", "cells": {"ms": 2.0}, "table": "times", "aims": []}
    assert b["failure"] == "ZeroDivisionError: by zero" and "in broken" in b["traceback"]
    assert c == {"row": "c", "failure": "error 1, expected at most 0.1"}
    assert d == {"row": "d", "skipped": "no such tool"}
    assert e["cells"] == {"ms": 2.0} and lines[-1] == {"ends": True}
    assert made([good(rows, "a"), rows.Task("d", absent)])[1] == rows.ALL_RIGHT


def test_a_row_is_announced_and_told_before_the_next_is_made(rows):
    lines = []

    def look():
        assert lines[-1] == {"part": "part", "begins": "b"}
        assert lines[-2]["row"] == "a"
        return rows.Row()

    tasks = [good(rows, "a"), rows.Task("b", look)]
    assert rows.make_rows("part", tasks, rows.Setting("cpu"), lines.append) == rows.ALL_RIGHT


def test_a_list_of_rows_that_breaks_off_is_a_failure(rows, made):
    def tasks():
        yield good(rows, "a")
        raise ImportError("no module")

    lines, code = made(tasks())
    assert code == rows.FAILED and lines[-1]["failure"] == "ImportError: no module"
    assert [line["row"] for line in reported(lines)[:1]] == ["a"]


def test_rows_after_one_and_those_without_time(rows, made):
    tasks = [good(rows, label) for label in "abcd"]
    assert [line["row"] for line in reported(made(tasks, after="b")[0])] == ["c", "d"]

    def slow():
        time.sleep(0.05)
        return rows.Row()

    tasks[1] = rows.Task("b", slow)
    lines, code = made(tasks, until=time.monotonic() + 0.04)
    assert [line.get("row") for line in reported(lines)] == ["a", "b", None]
    assert lines[-1] == {"ends": True} and lines[-2] == {"no_time_for": ["c", "d"]} and code == 0


def test_rows_are_shared_out(rows, made):
    tasks = [good(rows, label) for label in "abcde"]
    shares = [made(tasks, share=(number, 2))[0] for number in range(2)]
    assert [[line["row"] for line in reported(lines)] for lines in shares] == [
        ["a", "c", "e"],
        ["b", "d"],
    ]
    assert [line["row"] for line in reported(made(tasks, after="a", share=(0, 2))[0])] == ["c", "e"]


def test_a_dry_run_makes_what_can_be_made_here(rows, made):
    aim = rows.Aim("of copying", None, minimum=0.75)
    tasks = [
        rows.Task("a", lambda: rows.Row({"ms": 1.0}, aims=(aim,))),
        rows.Task("b", lambda: pytest.fail("made"), here=False),
    ]
    lines, _ = made(tasks, dry=True)
    assert reported(lines) == [
        {"row": "a", "ran": True, "aims": ["of copying"], "table": "", "columns": ["ms"]},
        {"row": "b", "planned": True},
    ]


def test_a_device_that_has_failed_ends_the_process_of_a_part(rows, monkeypatch):
    def gone(_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(rows, "synchronize", gone)
    lines, setting = [], rows.Setting("cuda:0")
    tasks = [good(rows, "a"), rows.Task("b", lambda: pytest.fail("made"))]
    assert rows.make_rows("part", tasks, setting, lines.append) == rows.DEVICE_GONE
    assert "illegal memory access" in lines[-1]["failure"] and lines[-1]["row"] == "a"


def test_what_rows_share_is_made_once_and_fails_once(rows):
    made = []
    shared = rows.Once(lambda: made.append(1) or "model")
    assert (shared(), shared(), made, shared.made) == ("model", "model", [1], "model")

    def broken():
        made.append(2)
        raise MemoryError("too large")

    shared = rows.Once(broken)
    with pytest.raises(MemoryError):
        shared()
    with pytest.raises(rows.SkipError, match="as before: MemoryError: too large"):
        shared()
    assert made == [1, 2] and shared.made is None


def test_aims(rows):
    assert rows.Aim("x", 0.8, minimum=0.75).met and not rows.Aim("x", 0.7, minimum=0.75).met
    assert rows.Aim("x", 1.0, 0.75, 1.25).met and not rows.Aim("x", 1.3, 0.75, 1.25).met
    assert rows.Aim("x", None, maximum=1).met is None
    assert not rows.Aim("x", float("nan"), minimum=0).met
    assert rows.Aim("x", 1.3, maximum=1.25).line == {
        "aim": "x",
        "found": 1.3,
        "at_most": 1.25,
        "met": False,
    }


def test_nan_is_wrong(rows):
    assert rows.judged("x", float("nan"), 1.0) == "x: error nan, expected at most 1"
    assert rows.judged("x", 1.0, 1.0) is None
    rows.must(None)
    with pytest.raises(rows.WrongError, match="error 2"):
        rows.must(rows.judged("x", 2.0, 1.0))
