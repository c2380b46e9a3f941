"""pytest --device, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import asked_device
import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("cuda", "--device cuda: found 0 CUDA devices; use device=cpu"),
        ("cuda:1", "--device cuda:1: found 0 CUDA devices; use device=cpu"),
        ("mps", "--device mps: found 0 Metal devices; use device=cpu"),
        ("xpu:2", "--device xpu:2: found 0 XPU devices; use device=cpu"),
        ("hip", f"--device hip: this torch ({torch.__version__}) is no ROCm build; install one"),
        ("tpu", f"--device tpu: expected {asked_device.NAMES}"),
        ("cuda:", f"--device cuda:: expected {asked_device.NAMES}"),
    ],
)
def test_a_device_that_is_not_here_is_told(name: str, told: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        asked_device.configure(name)
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_on_a_card_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in (None, "cpu"):
        assert asked_device.configure(name) == asked_device.AskedDevice("cpu")
    assert os.environ["TRITON_INTERPRET"] == "1" and not used
    assert asked_device.configure("cuda:1") == asked_device.AskedDevice("cuda:1")
    assert "TRITON_INTERPRET" not in os.environ and used == ["cuda:1"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert asked_device.configure("hip").name == "cuda" and used[1:] == ["cuda:0"]
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert not asked_device.configure("xpu").has_kernels


def test_those_that_can_be_run_on_a_device_are_chosen() -> None:
    tests = [SimpleNamespace(fixturenames=n) for n in (["asked_device"], ["device"], [])]
    assert asked_device.choose(tests) == (tests[:1], tests[1:])


def test_pytest_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "mps:1"]
    done = subprocess.run(
        [*command, "tests/test_device_option.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.split("\n", 1)[0] == (
        f"ERROR: --device mps:1: expected {asked_device.NAMES}"
    )
