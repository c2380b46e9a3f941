"""Parts of benchmarks/gpu.py that run models, and other programs."""

from __future__ import annotations

import math
import stat
import sys
import time
import warnings
from contextlib import closing

import pytest
import torch

RATES = {"copied bytes/s": 4e12, "bf16 flop/s": 8e14}


@pytest.fixture
def rows(module):
    return module("gpu_kernels.rows")


@pytest.fixture
def models(module):
    return module("gpu_kernels.models")


@pytest.fixture
def dry(rows):
    return rows.Setting("cpu", dry=True, rates=RATES)


def made(tasks):
    return {task.label: task.make() for task in tasks}


def first(tasks):
    """The first row, made while there are others to come."""
    with closing(tasks):
        return next(tasks).make()


def test_decoding(models, dry):
    result = made(models.decoding("gemma-3-4b", "Q4_0", dry))
    assert list(result) == [
        "loaded and warmed up",
        "1 sequence",
        "16 sequences",
        "17 sequences",
        "32 sequences",
        "64 sequences",
        "synchronising calls of a step",
        "memory",
    ]
    one, cliff = result["1 sequence"], result["17 sequences"]
    assert one.cells["sequences"] == 1 and one.cells["model"] == "gemma-3-4b Q4_0"
    ms = one.cells["step ms"]
    assert one.cells["tokens/s"] == pytest.approx(1e3 / ms)
    share, estimate, compiled = one.aims
    assert share.name == "gemma-3-4b Q4_0, 1 sequence: of copying" and share.minimum == 0.5
    assert share.result == pytest.approx(one.cells["GB/s"] * 1e9 / 4e12)
    assert estimate.result == pytest.approx(one.cells["estimated ms"] / ms)
    assert (estimate.minimum, estimate.maximum, compiled.result) == (0.75, 1.25, 0)
    assert cliff.aims[0].maximum == 1.1
    assert cliff.aims[0].result == pytest.approx(
        cliff.cells["step ms"] / 17 / (result["16 sequences"].cells["step ms"] / 16)
    )


def test_encoding(models, dry):
    result = made(models.encoding("gemma-3-4b", "Q4_0", dry))
    first = result["the first picture, against the tenth"]
    assert first.aims[0].result == first.cells["first ms"] / first.cells["tenth ms"]
    assert 0 < first.cells["estimated ms, of the card"] < 1e3
    assert result["memory"].cells["predicted GiB"] > 0 and result["memory"].aims[0].met is None
    for count in (1, 4):
        row = result[f"{count} x 896 px, against transformers"]
        faster, estimate = row.aims
        ratio = row.cells["transformers SDPA ms"] / row.cells["encode ms"]
        assert faster.result == pytest.approx(ratio) and faster.minimum == 1.5
        assert math.isfinite(estimate.result) and row.cells["estimated ms"] > 0


def test_shares_of_what_was_not_measured_are_unknown(models, rows):
    _, task, *_ = models.decoding("qwen3-8b", "BF16", rows.Setting("cpu", dry=True))
    row = task.make()
    assert row.cells["of copy"] == "-" and row.aims[0].met is None and row.aims[0].minimum == 0.75


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
    ],
)
def test_cards_as_drivers_call_them(models, rows, monkeypatch, name, card):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    if card is None:
        with pytest.raises(rows.SkipError, match="T4"):
            models.card_of(rows.Setting("cuda:0"))
    else:
        assert models.card_of(rows.Setting("cuda:0")).name == card


def test_waits_for_the_device_are_counted(models, rows, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run():
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("it is deprecated", stacklevel=1)

    result = models.waits_in(run, rows.Setting("cuda:0"))
    assert len(result) == 2 and result[0].startswith("test_gpu_parts.py:")
    assert modes == ["warn", "default"]


@pytest.fixture
def tool(module, monkeypatch, tmp_path):
    """compute-sanitizer, which writes a log, says something and ends with a code."""

    def make(log="", stated="", code=0):
        file = tmp_path / "compute-sanitizer"
        file.write_text(
            f"#!{sys.executable}\nimport sys\nargs = sys.argv\n"
            f"open(args[args.index('--log-file') + 1], 'w').write({log!r})\n"
            f"print({stated!r})\nraise SystemExit({code})\n"
        )
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        sanitizer = module("gpu_kernels.sanitizer")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sanitizer, "own_names", lambda: frozenset({"attention_kernel"}))
        return sanitizer

    return make


@pytest.fixture
def on_device(rows):
    return rows.Setting("cuda:0", until=time.monotonic() + 60)


def test_clean_by_the_sanitizer(tool, on_device):
    sanitizer = tool("========= ERROR SUMMARY: 0 errors\n", "add_norm done\nmoe done\n")
    result = made(sanitizer.tasks(on_device))
    assert list(result) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert result["racecheck"].cells == {"check": "racecheck", "kernels": 2, "errors elsewhere": 0}


ERROR = """========= Invalid __global__ read of size 16 bytes
=========     at {0}+0x410 in kernel.py:120
========= ERROR SUMMARY: 1 error
"""


def test_errors_of_ours_are_wrong_and_others_are_counted(tool, rows, on_device):
    theirs = ERROR.format("void at::native::vectorized<4, attention<float>>(int)")
    row = first(tool(theirs, code=9).tasks(on_device))
    assert row.cells["errors elsewhere"] == 1
    for log, location in (
        (ERROR.format("attention_kernel"), "attention_kernel"),
        (
            "Race between Write access at 0x90 in kernel.py:120:attention_kernel\nERROR SUMMARY: 1\n",
            "attention_kernel",
        ),
        ("========= ERROR SUMMARY: 1 error\n", "an unknown place"),
    ):
        with pytest.raises(rows.WrongError, match=f"errors, in {location}"):
            first(tool(log, code=9).tasks(on_device))


def test_a_machine_that_the_sanitizer_does_not_take(tool, rows, on_device, monkeypatch):
    sanitizer = tool("========= Error: Device not supported\n", code=1)
    with pytest.raises(rows.SkipError, match="does not take"):
        first(sanitizer.tasks(on_device))
    tool(stated="Segmentation fault", code=1)
    with pytest.raises(rows.WrongError, match="exit code 1: Segmentation fault"):
        first(sanitizer.tasks(on_device))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(rows.SkipError, match="is not on the PATH"):
        first(sanitizer.tasks(on_device))


def test_tests_of_the_device(module, rows, dry, tmp_path):
    """Seconds: two processes of pytest."""
    fidelity = module("gpu_kernels.fidelity")
    assert [file.name for file in fidelity.files()][-1] == "test_against_transformers.py"
    row = fidelity.tested("tests/mtmd/test_on_a_device.py", dry)
    assert row.cells["file"] == "tests/mtmd/test_on_a_device.py"
    broken = tmp_path / "test_broken.py"
    broken.write_text("import gone\n")
    with pytest.raises(rows.WrongError, match="exit code"):
        fidelity.tested(str(broken), dry)


def test_demo(module, rows, dry):
    demo = module("gpu_kernels.demo")
    tasks = {task.label: task for task in demo.tasks(dry)}
    assert len([label for label in tasks if label.startswith("answer ")]) == 2 * 6
    wrong = rows.Once(lambda: [""] * 6)
    there = rows.Once(demo.on_cpu)
    requested = rows.Once(
        lambda: [(module("gpu_kernels.package").ROOT / "examples/shapes.png", "x")]
    )
    with pytest.raises(rows.WrongError, match="expected ''"):
        demo.answered(0, "fp32", there, requested, wrong)
