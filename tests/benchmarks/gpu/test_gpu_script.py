"""benchmarks/gpu.py as a whole, without a GPU: what it refuses, how it shares out its time, and what
it keeps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lacking import without

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def here(script, monkeypatch):
    """The script on a card, where parts are given lines; its calls, as (part, seconds, options)."""
    calls, clock = [], [0.0]
    monkeypatch.setattr(script, "heading", lambda *_: "A card 2026-01-01")
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr("gpu_kernels.ahead.cores", lambda: 3)  # one process for each part

    def give(lines, took=10.0):
        def part_lines(part, command, environment, seconds, row_seconds):
            assert row_seconds > 0
            calls.append((part, seconds, command, environment))
            if part not in ("demo", "golden"):  # which run beside the cases
                clock[0] += min(took, seconds)
            yield from ({"part": part, **line} for line in lines(part))

        monkeypatch.setattr("gpu_kernels.processes.part_lines", part_lines)
        return calls

    return give


def test_help_needs_no_gpu():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--budget" in done.stdout and done.stderr == ""
    assert "--part" not in done.stdout


def test_without_a_gpu_one_clear_line(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no CUDA device" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--only", "softmax"], "--only softmax: expected one of ceilings, cases, demo"),
        (["--budget", "0"], "--budget 0.0: expected seconds, more than 0"),
        (["--budget", "nan"], "--budget nan: expected seconds, more than 0"),
    ],
)
def test_an_option_that_is_wrong(script, capsys, options, reported):
    assert script.main(options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(reported) and printed.err.count("\n") == 1


def test_names_are_those_of_parts_and_of_ops(module):
    parts = module("gpu_kernels.parts")
    assert [(p.name, op) for p, op in parts.chosen(["compile", "encode"])] == [
        ("compile", None),
        ("encode", None),
    ]
    for op, *timed in (
        ("moe", "others"),
        ("matmul", "matmul"),
        ("pictures", "pictures"),
        ("attention", "attention-72", "attention"),
    ):
        assert [(p.name, o) for p, o in parts.chosen([op])] == [(n, op) for n in ("cases", *timed)]
    assert {"moe", "add_norm", "decode-qwen3-8b-Q4_K", "sanitizer"} <= set(parts.known())
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names)
    # What the others need, then what has to be right, then what has to be fast
    assert names[:4] == ["ceilings", "cases", "demo", "golden"]
    assert [part.name for part in parts.PARTS if part.alongside] == names[1:4]
    first = [part.name for part in parts.PARTS if part.first]
    assert first == names[: len(first)] and first[-1] == "encode" and "attention-72" in first
    assert {"BF16", "Q8_0", "Q4_K"} <= {name.rpartition("-")[2] for name in first}


def test_every_part_has_its_time_and_the_budget_holds_for_all(here, script, module):
    parts = module("gpu_kernels.parts").PARTS
    calls = here(lambda _: [{"ends": True}])
    assert script.main([]) == 0
    assert {(name, seconds) for name, seconds, *_ in calls} == {(p.name, p.seconds) for p in parts}
    del calls[:]
    assert script.main(["--budget", "100"]) == 0
    given = [(name, round(seconds)) for name, seconds, *_ in calls]
    # Ten seconds each; those that would have less than half of their time are left out
    assert given[0] == ("ceilings", 11)
    assert sorted(given[1:4]) == [("cases", 60), ("demo", 38), ("golden", 38)]  # at once
    assert given[4:] == [
        ("decode-gemma-3-4b-BF16", 32),
        ("attention-72", 15),
        ("decode-gemma-3-4b-Q4_K", 28),
        ("decode-gemma-3-4b-Q8_0", 45),  # as the next would have had too little
        ("encode", 37),
        ("paged_attention", 27),
        ("pictures", 17),
    ]


def test_in_four_minutes_each_part_of_the_first_round_is_made(here, script, module):
    """Though every part takes as long as it may; what one leaves goes to the next."""
    parts = module("gpu_kernels.parts").PARTS
    first = [p.name for p in parts if p.first]
    calls = here(lambda _: [{"ends": True}], took=1e9)
    assert script.main(["--budget", "240"]) == 0
    names, seconds = zip(*((name, seconds) for name, seconds, *_ in calls), strict=True)
    assert sorted(names) == sorted(first)
    at_once = dict(zip(names, seconds, strict=True))
    assert sum(seconds) - at_once["demo"] - at_once["golden"] == pytest.approx(237)
    given = script.planned([(p, None) for p in parts], 240)
    assert [p.name for p, s in given if s] == first
    del calls[:]
    here(lambda _: [{"ends": True}], took=15)
    assert script.main(["--budget", "240"]) == 0
    assert {"encode", "compile"} <= {name for name, *_ in calls}
    assert dict(c[:2] for c in calls)["encode"] == 60


def test_cases_are_shared_out_between_processes(here, script, monkeypatch):
    monkeypatch.setattr("gpu_kernels.ahead.cores", lambda: 6)
    calls = here(lambda _: [{"ends": True}])
    assert script.main(["--only", "cases"]) == 0
    shares = [command[command.index("--share") + 1 :][:2] for _, _, command, _ in calls]
    assert sorted(shares) == [[str(n), "4"] for n in range(4)]


def test_parts_for_which_nothing_is_left_are_told(here, script, tmp_path, capsys):
    here(lambda _: [{"ends": True}], took=1000)
    assert script.main(["--budget", "60", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    left = [line["part"] for line in lines if "no_time_for" in line]
    assert left[:2] == ["decode-gemma-3-4b-BF16", "attention-72"] and "sanitizer" in left
    assert "- sanitizer: all of it: too little of the budget is left" in capsys.readouterr().out


def test_what_the_first_has_measured_is_told_the_others(here, script):
    def lines(part):
        row = {"row": "copy", "cells": {"GB/s": 1.0}, "table": "Ceilings", "aims": [], "s": 1}
        return [{**row, "rates": {"copied bytes/s": 4e12}}] if part == "ceilings" else []

    calls = here(lines)
    script.main(["--only", "ceilings", "attention", "--tune", "--device", "cuda:1"])
    assert [name for name, *_ in calls] == ["ceilings", "cases", "attention-72", "attention"]
    for _, _, command, environment in calls[1:]:
        assert json.loads(command[command.index("--rates") + 1]) == {"copied bytes/s": 4e12}
        assert command[command.index("--op") + 1] == "attention" and "--tune" in command
        assert command[command.index("--device") + 1] == "cuda:1"
        assert "TRITON_INTERPRET" not in environment


def test_results_are_kept_and_summed_up(here, script, tmp_path, capsys):
    aims = [
        {"aim": "of copying", "found": 0.8, "at_least": 0.75, "met": True},
        {"aim": "no cliff", "found": 1.3, "at_most": 1.1, "met": False},
        {"aim": "estimate", "found": None, "at_least": 0.75, "at_most": 1.25, "met": None},
    ]
    given = {
        "demo": [
            {"begins": "a"},
            {"row": "a", "cells": {}, "table": "", "aims": [], "s": 1},
            {"row": "b", "failure": "error 1 | 2", "traceback": "Traceback"},
            {"row": "c", "skipped": "no tool"},
        ],
        "encode": [
            {"row": "x", "cells": {"what": "a|b", "ms": 1.23456}, "table": "T", "aims": aims},
            {"row": "y", "cells": {"what": "c", "ratio": 2.0}, "table": "T", "aims": []},
        ],
    }
    here(given.__getitem__)
    assert script.main(["--only", "demo", "encode", "--out", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == [{"part": p, **line} for p in given for line in given[p]]
    text = (tmp_path / "report.md").read_text()
    for requested in (
        "1 of 3 aims met, 1 missed, 1 unknown.",
        "| no cliff | 1.3 | at most 1.1 | **missed** |",
        "| estimate | - | at least 0.75, at most 1.25 | not measured |",
        "- demo, b: error 1 | 2",
        "- demo, c: no tool",
        "demo: 1 right.",
        "## T\n\n| what | ms | ratio |\n| --- | --- | --- |\n| a/b | 1.235 | - |\n| c | - | 2 |",
        "`python benchmarks/gpu.py --only demo encode`",
    ):
        assert requested in text, text
    page = json.loads((tmp_path / "report.json").read_text())
    assert page["aims"] == aims and [row["what"] for row in page["tables"]["T"]] == ["a|b", "c"]
    assert [line["row"] for line in (*page["failure"], *page["skipped"])] == ["b", "c"]
    printed = capsys.readouterr().out
    assert "FAILED demo, b: error 1 | 2" in printed and "MISSED: no cliff: 1.3" in printed
    given["demo"].pop(2)
    assert script.main(["--only", "demo", "encode"]) == 0  # an aim that is missed is no failure


def test_what_there_is_is_kept_when_it_is_ended(tmp_path):
    """As by `timeout`, in the midst of a part. Seconds: three processes import torch."""
    command = [
        sys.executable,
        SCRIPT,
        "--dry-run",
        "--only",
        "ceilings",
        "cases",
        "--out",
        tmp_path,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    saved = tmp_path / "lines.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (saved.exists() and '"cases"' in saved.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "| ceilings | 20 | 3 | 3 |" in (tmp_path / "report.md").read_text() and "cases" in output


def test_a_dry_run_on_a_machine_that_lacks_most(tmp_path):
    """Not even the package is installed there. Seconds: three processes import torch."""
    environment = without(tmp_path, installed=False)
    command = [sys.executable, SCRIPT, "--dry-run", "--only", "ceilings", "encode"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The package is not installed, and found by links." in done.stdout
    assert "| ceilings | 20 | 3 | 3 |" in done.stdout
    assert "| encode | 60 | 6 | 6 |" in done.stdout and "**encode**, aims:" in done.stdout
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "lines.jsonl").read_text().splitlines()
    ]
    assert {line["part"] for line in lines} == {"ceilings", "encode"}
    page = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [part["part"] for part in page["parts"]] == ["ceilings", "encode"]
    assert page["failure"] == [] and "estimated / measured" in page["parts"][1]["aims"][3]
    encoding = next(heads for title, heads in page["tables"].items() if "tiles on" in title)
    assert {"encode ms", "estimated ms", "estimated / measured"} <= set(encoding)


def test_from_the_repository_the_package_is_whole(tmp_path):
    """Its folder of that name has a part of it."""
    environment = without(tmp_path, installed=False) | {
        "PYTHONPATH": os.pathsep.join((without(tmp_path, installed=False)["PYTHONPATH"], str(ROOT)))
    }
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_kernels.package as p; "
        "import mtmd; print(p.find_package()); import mtmd.kernels, mtmd.llm; "
        "print(p.find_package())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["not installed, and found by links", "installed"], done
