"""`mtmd warmup --save` and `--kernels`: what is refused, and what a GPU's warm-up makes ready, with
torch's device and the compiler in their place. Programs are compiled, saved and found again in
tests/kernels/gpu/ahead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtmd import OptionError, load
from mtmd.inspect import save_kernels as save_kernels_module
from mtmd.inspect.predict_target import subject_of
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.gpu import compile as compile_module
from mtmd.kernels.gpu.ahead import compiling, saved
from mtmd.kernels.gpu.ahead.compilations import Compilations
from mtmd.kernels.gpu.compile import specialisation
from mtmd.kernels.report.report_text import render
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded import programs
from mtmd.loaded.programs import (
    SavedPrograms,
    foreseen_programs,
    make_programs,
    saved_programs,
    use_saved,
)
from mtmd.options.load import LoadOptions
from mtmd.service import receipts


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_calls_that_contradict_themselves(mtmd: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    for words, arguments in {
        "--save is for a GPU that you do not have": ("--save", tmp_path),
        "save: found '', expected a folder": ("--target", "h100", "--save", ""),
        "--save is for": ("--save", ""),
        "target '': expected a card": ("--target", "", "--save", tmp_path),
        "memory: found ''": ("--target", "h100", "--memory", "", "--no-compile"),
        "--random-weights: found ''": ("--target", "h100", "--random-weights", ""),
        "expected one --target": ("--target", "h100,a10", "--save", tmp_path),
        "none of --memory": ("--target", "h100", "--memory", "8GiB", "--save", tmp_path),
        "found thesis.txt and no manifest.json": ("--target", "h100", "--save", tmp_path),
        "kernels: has no meaning for the target": ("--target", "h100", "--kernels", tmp_path),
    }.items():
        assert words in mtmd("warmup", *arguments).refused()


def test_a_device_without_compiled_kernels_takes_none() -> None:
    with pytest.raises(OptionError, match="found the device cpu, expected a GPU with Triton"):
        load(device="cpu", kernels="there")


def test_the_variable_of_a_whole_machine_stops_nothing_on_its_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for value, noted in (("/nowhere", ["MTMD_KERNELS is not used: cpu has no"]), ("", [])):
        caplog.clear()
        monkeypatch.setenv("MTMD_KERNELS", value)
        assert load(device="cpu").warmup_report.programs is None
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == len(noted) and all(map(str.startswith, lines, noted))


@pytest.mark.usefixtures("hopper")
def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTMD_KERNELS", "/nowhere")
    with pytest.raises(OptionError, match=r"MTMD_KERNELS: kernels /nowhere: manifest.json cannot"):
        saved_programs(None, Gpu())
    with pytest.raises(OptionError, match=r"^kernels /there: manifest.json cannot"):
        saved_programs("/there", Gpu())


@pytest.mark.usefixtures("hopper")
def test_a_gpu_is_given_what_was_saved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    there = saved.Saved("a model", {"ab": {}})
    monkeypatch.setattr(saved, "read_saved", lambda *given: requested.append(given) or there)
    monkeypatch.setattr(saved, "install", requested.append)
    result = use_saved("kernels", Gpu("cuda:1"))
    assert requested == [(Path("kernels"), "cuda:90"), there]
    assert result == SavedPrograms("kernels", "a model", frozenset(["ab"]))


@pytest.mark.usefixtures("hopper")
def test_a_warm_up_makes_what_is_foreseen_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same programs as for a card of that architecture that is not here; and of those that were
    given it is told how many are among them.
    """
    subject = subject_of("cuda:90", None, None, parallel=1, context=256)
    given = subject.encoder, subject.runner, subject.loaded.limits
    predicted = foreseen_programs(*given)
    compiled: list[Any] = []
    counts = iter((Compilations(2, 0, 10.0), Compilations(5, 1, 2010.0)) * 3)
    monkeypatch.setattr(programs, "compilations", lambda: next(counts))
    monkeypatch.setattr(compiling, "compile_all", lambda *all: compiled.append(all))
    monkeypatch.setattr(subject.runner, "backends", [Gpu(), Cpu(), Reference()])
    monkeypatch.setattr(subject.encoder, "backends", subject.runner.backends)
    facts = make_programs(*given)
    ((target, made, _),) = compiled
    assert target == "cuda:90" and facts is not None
    assert {specialisation(p) for p in made} == {specialisation(p) for p in predicted}
    assert (facts.needed, facts.compiled, facts.compile_ms) == (len(predicted), 3, 2000.0)
    report = WarmupReport("m", "cuda:0", "a card", "bf16", (), (), (), programs=facts)
    assert "GPU programs for cuda:90:" in render(report)
    assert "3 compiled now (2.0 s of compiling)" in render(report) and facts.given is None
    monkeypatch.setattr(compile_module, "disk_key", lambda _, p: str(specialisation(p)))
    keys = [str(specialisation(program)) for program in predicted]
    for given_keys, used in (([*keys[:2], "ab"], 2), (["ab"], 0)):
        caplog.clear()
        of_use = SavedPrograms("kernels", "another model", frozenset(given_keys))
        facts = make_programs(*given, given=of_use)
        assert facts is not None and facts.given is not None
        assert (facts.given.programs, facts.given.used) == (len(given_keys), used)
        text = render(replace(report, programs=facts))
        assert f"{used} of them among the {len(given_keys)} of kernels" in text
        reported = "of 1 programs, of another model, none is of use"
        assert (reported in caplog.text) == ("WARNING" in text) == (not used)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(save_kernels_module, "foreseen_programs", lambda *_: ["a program"])
    monkeypatch.setattr(compiling, "compile_all", lambda *all: compiled.append(all))
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot be written"):
        save_kernels_module.save_kernels("h100", tmp_path / "file" / "new", context=64, parallel=1)
    assert not compiled


def test_an_answer_that_waited_for_the_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Compilations(4, 0, 9.0, 1, 3.0)
    for late, words in ((1, ()), (3, ("2 GPU programs had to be compiled meanwhile (1.5 s)",))):
        now = Compilations(9, 0, 9.0, late, 3.0 + 750 * (late - 1))
        monkeypatch.setattr(receipts, "compilations", lambda now=now: now)
        reported = receipts._compiled_meanwhile(before)
        assert len(reported) == len(words) and all(
            w in t for w, t in zip(words, reported, strict=True)
        )


def test_the_option_is_a_path() -> None:
    assert LoadOptions(kernels=Path("a") / "b").kernels == "a/b"  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="kernels"):
        LoadOptions(kernels="a\0b")
