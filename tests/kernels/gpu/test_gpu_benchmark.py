"""benchmarks/gpu.py without a GPU: its help, its refusal, its checks (in the interpreter) and its
tables.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from mtmd.clip.image.device.normalize import normalized
from mtmd.clip.image.device.pillow import resize_rows
from mtmd.kernels.gpu.flash_attention.cases import Case
from mtmd.kernels.gpu.table import KERNELS, Entry
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.attention import attention

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
SPECIAL = ("attention", "paged_attention", "matmul", "pictures")
FILES = ("attention", "paged", "matmul", "pictures")
OTHERS = tuple(op for op in KERNELS if op not in SPECIAL)
SECTIONS = (*SPECIAL, *OTHERS)
pytestmark = pytest.mark.usefixtures("exact_bf16")


@pytest.fixture
def part(monkeypatch):
    """Imports gpu.py, or a file of gpu_kernels, as the script does."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module


@pytest.fixture
def gpu_benchmark(part):
    return part("gpu")


def test_help_needs_no_gpu():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--out" in done.stdout and done.stderr == ""


def test_it_imports_nothing_that_a_machine_with_torch_and_triton_may_lack():
    """All that its checks and reports import."""
    lacking = "flask", "gguf", "pydantic", "PIL", "jinja2", "waitress"
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({lacking!r}))
sys.path.insert(0, {str(SCRIPT.parent)!r})
names = runpy.run_path({str(SCRIPT)!r})["sections"]()
from mtmd.kernels.gpu.table import KERNELS
[entry.load() for entries in KERNELS.values() for entry in entries]
print(*names)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(SECTIONS)


def test_without_a_gpu_one_clear_line(gpu_benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_benchmark.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no CUDA device" in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("name", SECTIONS)
def test_nothing_of_a_part_is_timed_when_a_check_fails(gpu_benchmark, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        gpu_benchmark, "checks", lambda *_: iter([None, "a case: error 1", "b", None])
    )
    monkeypatch.setattr(gpu_benchmark, "report", lambda *_: pytest.fail("timed over a failure"))
    lines = []
    assert gpu_benchmark.part(name, "cuda:0", False, False, lines.append) == 1
    assert [line["failure"] for line in lines] == ["a case: error 1", "b"]


def test_a_part_that_fails_leaves_the_others(gpu_benchmark, capsys, monkeypatch, tmp_path):
    """Lines are written as they come, also where the process of a part dies."""
    processes = {
        "attention": 'print(\'{"part": "attention", "text": "| a table |"}\', flush=True)',
        "matmul": 'print(\'{"part": "matmul", "checks": 3}\'); import os; os.abort()',
        "paged_attention": 'print(\'{"part": "x", "failure": "x: error 1"}\'); raise SystemExit(1)',
    }
    start = subprocess.Popen

    def popen(command, **options):
        name = command[command.index("--only") + 1]
        return start([sys.executable, "-c", processes[name]], stderr=subprocess.DEVNULL, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(gpu_benchmark, "sections", lambda: list(processes))
    monkeypatch.setattr(gpu_benchmark, "heading", lambda *_: "a card")
    assert gpu_benchmark.main(["--out", str(tmp_path)]) == 1
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == ["attention", "matmul", "matmul", "x"]
    assert "exit code -6" in lines[2]["failure"]
    text = (tmp_path / "report.md").read_text()
    assert "| a table |" in text and "x: error 1" in text and text == capsys.readouterr().out


def test_a_dry_run_checks_a_part_on_any_machine():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--only", "add_norm"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "add_norm: 3 checks" in done.stdout and "no times" in done.stdout


def test_an_unknown_part_is_refused(gpu_benchmark, capsys):
    assert gpu_benchmark.main(["--only", "softmax"]) == 2
    assert ", ".join(SECTIONS) in capsys.readouterr().err


@pytest.mark.parametrize(
    "case",
    [Case(72, batch=2, mask="BHTS", causal=True), Case(40, batch=2, mask="TS", bounds="BT")],
    ids=str,
)
def test_compare(part, case):
    compare = part("gpu_kernels.attention").compare
    given = case.inputs()
    right = attention.reference(*given, **case.options)
    assert compare("x", given, right, case.options) is None
    for wrong in (right + 1e-3, right.clone().index_fill_(0, torch.tensor([1]), torch.nan)):
        assert "expected at most" in compare("x", given, wrong, case.options)


def test_shapes_are_problems(part):
    """With and without a buffer shared by q, k and v."""
    module = part("gpu_kernels.attention")
    for keys in (33, 40):
        shape = module.Shape("x", 33, keys, 4, 2, 72, batch=2, causal=True)
        (q, k, v, _, _), options = module.problem(shape, "cpu")
        assert q.shape == (2, 33, 4, 72) and k.shape == v.shape == (2, keys, 2, 72)
        assert options["causal"] and q.stride(3) == 1


@pytest.fixture
def small(part, monkeypatch):
    """Every file of gpu_kernels with problems that the interpreter can run, and a clock that runs
    what it times once.
    """
    modules = {name: part(f"gpu_kernels.{name}") for name in (*FILES, "reference")}
    ran = []
    for module in modules.values():
        clock = "timed" if module is modules["pictures"] else "milliseconds"
        monkeypatch.setattr(module, clock, lambda run, **_: ran.append(run()) or 0.5)
    shape = modules["attention"].Shape
    monkeypatch.setattr(
        modules["attention"],
        "SHAPES",
        (shape("a", 20, 20, 4, 2, 72), shape("b", 1, 600, 4, 2, 16), shape("c", 9, 9, 2, 2, 16)),
    )
    monkeypatch.setattr(modules["attention"], "TILES", ((16, 16, 4, 2),))
    batch = modules["paged"].Batch
    monkeypatch.setattr(
        modules["paged"], "BATCHES", (batch(1, 64, 4, 2, 16), batch(3, 544, 4, 2, 16))
    )
    monkeypatch.setattr(modules["pictures"], "SIZES", modules["pictures"].SIZES[:2])
    monkeypatch.setattr(modules["pictures"], "PHOTOS", (("a", (20, 30), (9, 8)),))
    monkeypatch.setattr(modules["pictures"], "beside", lambda _: [["none", "1", "-"]])
    monkeypatch.setattr(modules["matmul"], "WEIGHTS", ((33, 256),))
    monkeypatch.setattr(modules["matmul"], "ROWS", (1, 3, 65))
    load = Entry.load

    def small_load(entry):
        kernel = load(entry)
        return replace(kernel, cases=kernel.cases[:1], uses={"a use": kernel.cases[-1]})

    monkeypatch.setattr(Entry, "load", small_load)
    return modules, ran


@pytest.mark.usefixtures("small")
def test_every_check_passes_and_notices_a_wrong_kernel(gpu_benchmark, monkeypatch):
    results = {name: list(gpu_benchmark.checks("cpu", [name])) for name in SECTIONS}
    assert not any(any(failures) for failures in results.values()), results
    counts = {name: len(failures) for name, failures in results.items()}
    timed = {
        "attention": 2 + 3,
        "paged_attention": 2 + 2,
        "matmul": 2 + 4 * 3,
        "pictures": 5 * 2 + 2,
    }
    assert counts == {op: 2 * len(KERNELS[op]) for op in OTHERS} | timed
    load = Entry.load

    def wrong_load(entry):
        kernel = load(entry)
        return replace(kernel, run=lambda *a, **k: kernel.run(*a, **k) * 1.05)

    monkeypatch.setattr(Entry, "load", wrong_load)
    for name, reference in (
        ("flash_attention.kernel.flash_attention", attention.reference),
        ("quant_matmul.kernel.quant_matmul", OPS["matmul"].reference),
        ("paged_attention.kernel.paged_attention", OPS["paged_attention"].reference),
    ):
        monkeypatch.setattr(
            f"mtmd.kernels.gpu.{name}", lambda *a, right=reference, **k: right(*a, **k) * 1.05
        )
    for name, right in (("resizer.resize_rows", resize_rows), ("normalize.normalized", normalized)):
        monkeypatch.setattr(
            f"mtmd.clip.image.device.{name}", lambda *a, right=right: right(*a).add_(1)
        )
    assert all(all(gpu_benchmark.checks("cpu", [name])) for name in SECTIONS)


def test_reports_are_whole_tables(small):
    modules, ran = small
    lines = list(
        chain(
            modules["attention"].report("cpu", True),
            *(modules[name].report("cpu") for name in FILES[1:]),
            *(modules["reference"].report("cpu", op) for op in OTHERS),
        )
    )
    sections = "\n".join(lines).split("\n## ")[1:]
    tables = [
        [line for line in section.splitlines() if line.startswith("|")] for section in sections
    ]
    assert [len(table) - 2 for table in tables] == [
        3,
        3,
        2,
        4 * 3,
        1,
        1,
        *(len(KERNELS[op]) for op in OTHERS),
    ]
    assert all(len({row.count("|") for row in table}) == 1 for table in tables)
    assert ran and all(
        torch.isfinite(torch.as_tensor(x)).all()
        for result in ran
        for x in (result if isinstance(result, tuple) else (result,))
    )
    text = "\n".join(lines)
    assert (
        "keys shared by 2" in text
        and "head padded" in text
        and "keys not shared out" in text
        and "GB/s" in text
        and "TFLOP/s" in text
    )
