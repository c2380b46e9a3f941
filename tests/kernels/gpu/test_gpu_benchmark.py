"""benchmarks/gpu.py without a GPU: its help, its refusal, its checks (in the interpreter) and its
tables.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from mtmd.kernels.gpu import gated_delta, short_conv
from mtmd.kernels.gpu.cases import Case
from mtmd.kernels.gpu.quant_cases import Case as Product
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.attention import attention

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
KERNELS = ("attention", "paged", "matmul", "recurrent")
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
names = runpy.run_path({str(SCRIPT)!r})["KERNELS"]
import mtmd.kernels.gpu.quant_cases, mtmd.kernels.gpu.cases, mtmd.kernels.gpu.quant_matmul, mtmd.kernels.ops
import mtmd.kernels.gpu.flash_attention, mtmd.kernels.gpu.gated_delta, mtmd.kernels.gpu.short_conv
print(*names)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(KERNELS)


def test_without_a_gpu_one_clear_line(gpu_benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_benchmark.main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "no CUDA device" in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_timed_when_a_check_fails(gpu_benchmark, capsys, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    for other, module in gpu_benchmark.KERNELS.items():
        monkeypatch.setattr(
            module,
            "checks",
            lambda _, own=other: iter([None, "a case: error 1"] if own == name else [None]),
        )
        monkeypatch.setattr(module, "report", lambda *_: pytest.fail("timed over a failed check"))
    assert gpu_benchmark.main([]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "a case: error 1" in told.err


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
    modules = {name: part(f"gpu_kernels.{name}") for name in KERNELS}
    ran = []
    for module in modules.values():
        monkeypatch.setattr(module, "milliseconds", lambda run, **_: ran.append(run()) or 0.5)
    shape = modules["attention"].Shape
    monkeypatch.setattr(
        modules["attention"],
        "SHAPES",
        (shape("a", 20, 20, 4, 2, 72), shape("b", 1, 600, 4, 2, 16), shape("c", 9, 9, 2, 2, 16)),
    )
    monkeypatch.setattr(modules["attention"], "TILES", ((16, 16, 4, 2),))
    monkeypatch.setattr("mtmd.kernels.gpu.cases.CASES", [Case(16, rows=3)])
    batch = modules["paged"].Batch
    monkeypatch.setattr(
        modules["paged"], "BATCHES", (batch(1, 64, 4, 2, 16), batch(3, 544, 4, 2, 16))
    )
    monkeypatch.setattr(modules["matmul"], "WEIGHTS", ((33, 256),))
    monkeypatch.setattr(modules["matmul"], "ROWS", (1, 3, 65))
    monkeypatch.setattr("mtmd.kernels.gpu.quant_cases.CASES", [Product("Q8_0", 3, 5, 2, bias=True)])
    bf16 = torch.bfloat16
    monkeypatch.setattr(
        modules["recurrent"],
        "uses",
        lambda: {
            "delta": ("gated_delta", gated_delta.Case((18,), 16, 16, 2, 1, bf16)),
            "conv": ("short_conv", short_conv.Case((1, 1), 24, 4, bf16)),
        },
    )
    for kernel in (gated_delta, short_conv):
        monkeypatch.setattr(kernel, "CASES", kernel.CASES[:1])
    return modules, ran


def test_every_check_passes_and_notices_a_wrong_kernel(small, monkeypatch):
    modules, _ = small
    counts = {
        name: len(told)
        for name, module in modules.items()
        if (told := list(module.checks("cpu"))) and not any(told)
    }
    assert counts == {"attention": 4, "paged": 2, "matmul": 1 + 4 * 3, "recurrent": 4}
    for name, kernel in (
        ("flash_attention.flash_attention", attention.reference),
        ("quant_matmul.quant_matmul", OPS["matmul"].reference),
        ("gated_delta.gated_delta", OPS["gated_delta"].reference),
        ("short_conv.short_conv", OPS["short_conv"].reference),
    ):
        monkeypatch.setattr(
            f"mtmd.kernels.gpu.{name}", lambda *a, right=kernel, **k: right(*a, **k) * 1.05
        )
    assert all(all(module.checks("cpu")) for module in modules.values())


def test_reports_are_whole_tables(small):
    modules, ran = small
    lines = list(
        chain(
            modules["attention"].report("cpu", True),
            *(modules[name].report("cpu") for name in KERNELS[1:]),
        )
    )
    sections = "\n".join(lines).split("\n## ")[1:]
    tables = [
        [line for line in section.splitlines() if line.startswith("|")] for section in sections
    ]
    assert [len(table) - 2 for table in tables] == [3, 3, 2, 4 * 3, 2]
    assert all(len({row.count("|") for row in table}) == 1 for table in tables)
    assert ran and all(
        torch.isfinite(x).all()
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
