"""The parts of benchmarks/gpu.py that check and time kernels, in the interpreter: their problems,
and that a wrong kernel is noticed and not timed.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtmd.clip.image.device_normalize import normalized
from mtmd.clip.image.device_pillow import resize_rows
from mtmd.kernels.gpu.flash_attention.cases import problem
from mtmd.kernels.gpu.table import KERNELS, Entry
from mtmd.kernels.ops.attention import attention

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TIMED = ("attention-72", "attention", "paged_attention", "matmul", "others", "pictures")
RATES = {"copied bytes/s": 4e12, "bf16 flop/s": 8e14}
pytestmark = pytest.mark.usefixtures("exact_bf16")


@pytest.fixture
def module(monkeypatch):
    """Imports a file of gpu_kernels, as the script does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"gpu_kernels.{name}")


@pytest.fixture
def small(module, monkeypatch):
    """Few problems of each part; the rows of one that a dry run makes, as a device makes them."""
    shapes, batches = module("attention").SHAPES, module("paged").BATCHES
    monkeypatch.setattr(module("attention"), "SHAPES", (shapes[0], shapes[6], shapes[12]))
    monkeypatch.setattr(module("attention"), "TILES", ((16, 16, 4, 2),))
    monkeypatch.setattr(module("paged"), "BATCHES", (*batches[:2], batches[7], batches[8]))
    monkeypatch.setattr(module("matmul"), "WEIGHTS", ((33, 256),))
    monkeypatch.setattr(module("matmul"), "ROWS", (1, 3, 65))
    monkeypatch.setattr(module("pictures"), "PHOTOS", module("pictures").PHOTOS[:1])
    load = Entry.load

    def small_load(entry):
        kernel = load(entry)
        return replace(kernel, uses={"a use": kernel.cases[-1]})

    monkeypatch.setattr(Entry, "load", small_load)
    rows, parts = module("rows"), {p.name: p for p in module("parts").PARTS}

    def make(name, **settings):
        setting = rows.Setting("cpu", dry=True, rates=RATES, **settings)
        tasks, lines = parts[name].tasks(setting), []
        for task in tasks:
            try:
                row = task.make()
            except (rows.WrongError, rows.SkipError) as why:
                lines.append((task.label, why))
            else:
                lines.append((task.label, row))
        return lines

    return make


def test_reports_are_whole_tables(small, module):
    """Seconds: every timed kernel in the interpreter, attention with seven tiles."""
    lines = []
    for name in TIMED:
        for label, row in small(name, tune=True):
            if isinstance(row, module("rows").SkipError):
                assert label.endswith("of lower priority")
                continue
            assert all(math.isfinite(x) for x in row.cells.values() if isinstance(x, float))
            aims = [aim.line for aim in row.aims]
            line = {"part": name, "row": label, "cells": dict(row.cells), "table": row.table}
            lines.append({**line, "aims": aims})
    text = module("report").report("a card", "what", lines)
    tables = [
        [line for line in section.splitlines() if line.startswith("|")]
        for section in text.split("\n## ")
    ]
    others = [op for op in KERNELS if op not in ("attention", "matmul")]
    counts = [3, 3, 4, 4 * 3, *(len(KERNELS[op]) for op in others), 1, 2]
    assert [len(table) - 2 for table in tables[1:]] == counts
    assert all(len({row.count("|") for row in table}) == 1 for table in tables)
    titles = [section.partition("\n")[0] for section in text.split("\n## ")]
    unpredicted = [
        title.partition(",")[0]
        for title, table in zip(titles[1:], tables[1:], strict=True)
        if "estimated / measured" not in table[0]
    ]
    assert unpredicted == [
        "Attention with other tiles",
        "Pictures resized",
        "Steps of a decoder beside an encode",
    ]
    for words in ("keys shared by", "head padded", "TFLOP/s", "GB/s", "triton 64 x 64, carried"):
        assert words in text
    aims = [aim["aim"] for line in lines for aim in line["aims"]]
    assert aims == [
        "8 x 4096 patches, 16 heads, head 72: against torch's best",
        "8 x 4096 patches, 16 heads, head 72: TFLOP/s",
        "17 x 2048 keys, GQA 32 over 8, head 128: a sequence, against 16",
    ]


def test_a_wrong_kernel_is_noticed_and_not_timed(small, module, monkeypatch):
    wrong = module("rows").WrongError
    monkeypatch.setattr(
        module("rows").Setting, "milliseconds", lambda *_, **__: pytest.fail("timed")
    )
    load = Entry.load

    def wrong_load(entry):
        kernel = load(entry)
        return replace(kernel, run=lambda *a, **k: kernel.run(*a, **k) * 1.05)

    monkeypatch.setattr(Entry, "load", wrong_load)
    for name in TIMED[:-1]:
        rows = small(name)
        assert rows and all(isinstance(row, wrong) for _, row in rows)
        assert all("expected at most" in str(row) for _, row in rows)


def test_checks_are_all_cases_and_notice_a_wrong_kernel(module, monkeypatch):
    cases, rows = module("cases"), module("rows")
    setting = rows.Setting("cpu", dry=True)
    tasks = list(cases.tasks(setting))
    assert len({task.label for task in tasks}) == len(tasks)
    counts = {op: sum(len(e.load().cases) for e in KERNELS[op]) for op in KERNELS}
    for op, count in counts.items():
        assert sum(task.label.startswith(f"{op}: ") for task in tasks) == count
        assert 0 < sum(task.here for task in tasks if task.label.startswith(f"{op}: ")) <= cases.DRY
    own = list(cases.tasks(replace(setting, op="add_norm")))
    assert len(own) == counts["add_norm"]
    own[0].make()
    load = Entry.load

    def wrong_load(entry):
        kernel = load(entry)
        return replace(kernel, run=lambda *a, **k: kernel.run(*a, **k) * 1.05)

    monkeypatch.setattr(Entry, "load", wrong_load)
    [first, *_] = cases.tasks(replace(setting, op="add_norm"))
    with pytest.raises(rows.WrongError, match="expected at most"):
        first.make()


def test_pictures_that_are_wrong_are_noticed(module, monkeypatch):
    tasks = list(module("cases").tasks(module("rows").Setting("cpu", op="pictures")))
    chosen = [tasks[0], *tasks[-2:]]
    assert [task.make().cells for task in chosen] == [{}, {}, {}]
    for name, right in (
        ("device_resize.resize_rows", resize_rows),
        ("device_normalize.normalized", normalized),
    ):
        monkeypatch.setattr(f"mtmd.clip.image.{name}", lambda *a, right=right: right(*a).add_(1))
    for task in chosen:
        with pytest.raises(module("rows").WrongError):
            task.make()


@pytest.mark.parametrize(
    "case",
    [problem(72, batch=2, mask="BHTS", causal=True), problem(40, batch=2, mask="TS", bounds="BT")],
    ids=str,
)
def test_compare(module, case):
    compare = module("attention").compare
    given = case.inputs()
    right = attention.reference(*given, **case.options)
    assert compare("x", given, right, case.options) is None
    for wrong in (right + 1e-3, right.clone().index_fill_(0, torch.tensor([1]), torch.nan)):
        assert "expected at most" in compare("x", given, wrong, case.options)


def test_shapes_are_problems(module):
    """With and without a buffer shared by q, k and v."""
    attention = module("attention")
    for keys in (33, 40):
        shape = attention.Shape("x", 33, keys, 4, 2, 72, batch=2, causal=True)
        (q, k, v, _, _), options = attention.problem(shape, "cpu")
        assert q.shape == (2, 33, 4, 72) and k.shape == v.shape == (2, keys, 2, 72)
        assert options["causal"] and q.stride(3) == 1 and q.dtype == torch.bfloat16


def test_what_attention_is_judged_by(module):
    """The issue's shapes: 8 pictures of 4096 patches, 16 heads of 64, 72, 80 and 128."""
    shapes = [shape for shape in module("attention").SHAPES if shape.is_judged]
    assert sorted(shape.width for shape in shapes) == [64, 72, 80, 128]
    assert {shape[1:5] for shape in shapes} == {(4096, 4096, 16, 16)}
    assert module("attention").flops(shapes[0]) == 4 * 8 * 16 * 4096 * 4096 * 72


def test_a_batch_of_decoding_and_reading(module):
    """Each new token sees its own sequence up to itself."""
    paged = module("paged")
    batch = paged.Batch(2, 64, 4, 2, 16, prompts=1, new=5)
    q, cache, pages, bounds, starts = paged.problem(batch, "cpu", exact=True)
    assert starts.tolist() == [0, 1, 2, 7] and q.shape == (1, 7, 4, 16)
    assert bounds.tolist() == [[0, 63], [64, 127], *([128, 187 + i] for i in range(5))]
    assert len(set(pages.tolist())) == len(pages) == 6 and cache.shape[1] > 6 * paged.PAGE
    assert str(batch) == "2 x 64 keys and 1 x 5 tokens of a prompt over 64, GQA 4 over 2, head 16"
    mixed = [b for b in paged.BATCHES if b.prompts]
    assert {(b.new, b.keys) for b in mixed} == {(512, 8192)} and {b.width for b in mixed} > {128}


def test_programs_are_those_that_are_launched(compiler):
    """As far as they can be told without a GPU: each is there once, and can be specialised.
    Seconds: a process imports Triton.
    """
    code = """
import sys
sys.path.insert(0, folder)
from gpu_kernels import ahead, attention
from gpu_kernels.rows import Setting
assert ahead.ops(Setting(op="moe")) == ["moe"] and len(ahead.ops(Setting())) == ops
found = {target: len(ahead.different("attention", target)) for target in ("cuda:80", "cuda:90")}
titles = [p.function.__name__ for p in ahead.different("attention", "cuda:90")]
out = found, titles.count("carried_kernel"), len(ahead.different("paged_attention", "cuda:90"))
"""
    result, carried, paged = compiler(code, folder=str(BENCHMARKS), ops=len(KERNELS))
    cases = KERNELS["attention"][0].load().cases
    assert result["cuda:90"] - result["cuda:80"] >= carried >= 4
    assert result["cuda:80"] > 20 and paged > 20 and cases


def test_a_program_that_cannot_be_compiled_is_told(module):
    ahead, rows = module("ahead"), module("rows")
    ended = ahead._ended
    from concurrent.futures import Future

    def job(result):
        future = Future()
        future.set_result(result)
        return future

    setting = rows.Setting("cpu")
    row = ended("moe", lambda: None, {"moe": [job(None), job(None)]}, setting)
    assert row.cells["programs"] == 2
    slow = rows.Setting("cpu", until=0)
    with pytest.raises(rows.WrongError, match="1 of 2 programs are not compiled in time"):
        ended("moe", lambda: None, {"moe": [job(None), Future()]}, slow)
    with pytest.raises(rows.WrongError, match="1 of 2 programs: PlacementError: no"):
        ended("moe", lambda: None, {"moe": [job(None), job("PlacementError: no")]}, setting)
