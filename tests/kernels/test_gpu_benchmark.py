"""benchmarks/gpu.py without a GPU: its help, its refusal, and its checks (in the interpreter)."""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtmd.kernels.gpu.cases import Case
from mtmd.kernels.ops.attention import attention

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu_benchmark():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_needs_no_gpu():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--out" in done.stdout and done.stderr == ""


def test_without_a_gpu_one_clear_line(gpu_benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_benchmark.main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "no CUDA device" in told.err and told.err.count("\n") == 1


def test_nothing_is_timed_when_a_check_fails(gpu_benchmark, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpu_benchmark, "checks", lambda _: iter([None, "K72: error 1"]))
    monkeypatch.setattr(gpu_benchmark, "report", lambda *_: pytest.fail("timed over a failed check"))
    assert gpu_benchmark.main([]) == 1
    told = capsys.readouterr()
    assert told.out == "" and "K72: error 1" in told.err


@pytest.mark.parametrize("case", [Case(72, batch=2, mask="BHTS", causal=True), Case(40, batch=2, mask="TS", bounds="BT")], ids=str)
def test_compare(gpu_benchmark, case):
    given = case.inputs()
    right = attention.reference(*given, **case.options)
    assert gpu_benchmark.compare("x", given, right, case.options) is None
    for wrong in (right + 1e-3, right.clone().index_fill_(0, torch.tensor([1]), torch.nan)):
        assert "expected at most" in gpu_benchmark.compare("x", given, wrong, case.options)


def test_shapes_are_problems(gpu_benchmark):
    """With and without a buffer shared by q, k and v."""
    for keys in (33, 40):
        shape = gpu_benchmark.Shape("x", 33, keys, 4, 2, 72, batch=2, causal=True)
        (q, k, v, _, _), options = gpu_benchmark.problem(shape, "cpu")
        assert q.shape == (2, 33, 4, 72) and k.shape == v.shape == (2, keys, 2, 72)
        assert options["causal"] and q.stride(3) == 1
