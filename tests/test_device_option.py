"""pytest --device, on a machine without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import requested_device
import torch
from lacking import without

ROOT = Path(__file__).parents[1]
FIXTURE = "requested_device"


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("cuda", "--device cuda: found 0 CUDA devices; use device=cpu"),
        ("cuda:1", "--device cuda:1: found 0 CUDA devices; use device=cpu"),
        ("mps", "--device mps: found 0 Metal devices; use device=cpu"),
        ("xpu:2", "--device xpu:2: found 0 XPU devices; use device=cpu"),
        ("hip", f"--device hip: this torch ({torch.__version__}) is no ROCm build; install one"),
        ("tpu", f"--device tpu: expected {requested_device.NAMES}"),
        ("cuda:", f"--device cuda:: expected {requested_device.NAMES}"),
    ],
)
def test_a_device_that_is_not_here_is_told(name: str, reported: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        requested_device.configure(name)
    assert str(refused.value).startswith(reported) and "\n" not in str(refused.value)


def test_on_a_card_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for name in (None, "cpu"):
        assert requested_device.configure(name) == requested_device.RequestedDevice("cpu")
    assert os.environ["TRITON_INTERPRET"] == "1" and not used
    assert requested_device.configure("cuda:1") == requested_device.RequestedDevice("cuda:1")
    assert "TRITON_INTERPRET" not in os.environ and used == ["cuda:1"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert requested_device.configure("hip").name == "cuda" and used[1:] == ["cuda:0"]
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert not requested_device.configure("xpu").has_kernels


def test_those_that_can_be_run_on_a_device_are_chosen() -> None:
    tests = [SimpleNamespace(fixturenames=n) for n in (["requested_device"], ["device"], [])]
    assert requested_device.choose(tests) == (tests[:1], tests[1:])


def test_files_are_chosen_before_they_are_read(tmp_path: Path) -> None:
    """By what their tests take, and folders by their files."""
    requesting, other = tmp_path / "a" / "test_asking.py", tmp_path / "b" / "test_other.py"
    for file in (requesting, other):
        file.parent.mkdir()
    requesting.write_text(f"def test_x(\n    one,\n    {FIXTURE}: str,\n) -> None: ...\n")
    other.write_text("import requested_device\n\ndef test_x(device): assert requested_device\n")
    result = {path.name for path in tmp_path.rglob("*") if requested_device.is_requesting(path)}
    assert result == {"a", "test_asking.py"} and requested_device.is_requesting(tmp_path)
    chosen = [
        f.name for f in (ROOT / "tests").rglob("test_*.py") if requested_device.is_requesting(f)
    ]
    assert {"test_table.py", "test_on_a_device.py", "test_against_transformers.py"} <= {*chosen}
    assert "test_device_option.py" not in chosen and len(chosen) < 10


def test_a_machine_with_a_device_may_lack_what_other_tests_need(tmp_path: Path) -> None:
    """The package itself, too: it is found by links. With `--device cpu` as with any other."""
    location = without(tmp_path, installed=False)
    links = subprocess.run(
        [sys.executable, ROOT / "tools" / "editable_types.py", tmp_path / "links"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert links == str(tmp_path / "links")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run(
        [
            *command,
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            "--device",
            "cpu",
            ROOT / "tests",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=location | {"PYTHONPATH": os.pathsep.join((location["PYTHONPATH"], links))},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert {Path(name).name for name in collected} == {
        "test_table.py",
        "test_on_a_device.py",
        "test_against_transformers.py",
    }


def test_warnings_of_other_versions_are_no_errors(tmp_path: Path) -> None:
    conftest = str(ROOT / "tests" / "conftest.py")
    text = f"exec(compile(open({conftest!r}).read(), {conftest!r}, 'exec'))\n"
    (tmp_path / "conftest.py").write_text(text)
    body = "    warnings.warn('it is old', stacklevel=1)\n"
    (tmp_path / "test_warning.py").write_text(f"import warnings\n\ndef test_x({FIXTURE}):\n{body}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-c"]
    command += [str(ROOT / "pyproject.toml"), str(tmp_path)]
    for options, code in ((["--device", "cpu"], 0), ([], 1)):
        done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        assert "it is old" in done.stdout


def test_pytest_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "mps:1"]
    done = subprocess.run(
        [*command, "tests/test_device_option.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.split("\n", 1)[0] == (
        f"ERROR: --device mps:1: expected {requested_device.NAMES}"
    )
