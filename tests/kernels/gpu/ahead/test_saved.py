"""Folders of compiled programs that are not as they were saved. Nothing is compiled here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from mtmd.kernels.errors import OptionError
from mtmd.kernels.gpu.ahead import saved

KEY = "ab" * 32
MADE = {"triton": triton.__version__, "triton_build": "b", "sources": "s"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saved, "made_with", lambda: dict(MADE))
    files = {"k.cubin": b"code", "k.ptx": b"text", "k.json": noted(KEY)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    group = {name: str(tmp_path / name) for name in files}
    one = SimpleNamespace(hash=KEY, name="k", metadata_group=group)
    assert saved.save(tmp_path / "kept", "cuda:90", "a model", "0", [one])["programs"] == 1
    return tmp_path / "kept"


def noted(key: str) -> bytes:
    return json.dumps({"hash": key, "triton_version": triton.__version__}).encode()


def change(folder: Path, **fields: Any) -> None:
    file = folder / saved.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def program(folder: Path, key: str = KEY, **files: Any) -> None:
    entry = json.loads((folder / saved.MANIFEST).read_text())["programs"][KEY]
    change(folder, programs={key: {"kernel": "k", "files": {**entry["files"], **files}}})


def test_what_was_saved_is_read(folder: Path) -> None:
    found = saved.read_saved(folder, "cuda:90")
    assert found.model == "a model"
    assert found.programs == {KEY: {"k.cubin": b"code", "k.json": noted(KEY)}}


WRONG = {
    "no folder": (shutil.rmtree, "manifest.json cannot be read"),
    "no manifest": (lambda f: (f / saved.MANIFEST).unlink(), "cannot be read"),
    "no JSON": (lambda f: (f / saved.MANIFEST).write_text("{"), "not JSON"),
    "deep JSON": (lambda f: (f / saved.MANIFEST).write_text("[" * 99999), "not JSON"),
    "a list": (lambda f: (f / saved.MANIFEST).write_text("[]"), "not of format 1"),
    "a later format": (lambda f: change(f, format=2), "not of format 1"),
    "no texts": (lambda f: change(f, triton=3), "lacks"),
    "programs in a list": (lambda f: change(f, programs=[]), "lacks"),
    "another card": (lambda f: change(f, target="cuda:80"), "made for 'cuda:80', found the device"),
    "another Triton": (lambda f: change(f, triton="2.0"), "made by Triton '2.0', found"),
    "another build": (lambda f: change(f, triton_build="c"), "another build of Triton"),
    "other kernels": (lambda f: change(f, sources="t"), "another mtmd, '0'"),
    "a way out": (lambda f: program(f, "../" + KEY[3:]), "has no program"),
    "a name out": (lambda f: program(f, **{"../../k.cubin": {}}), "expected one of machine code"),
    "no code": (lambda f: program(f, **{"l.json": {}}), "expected one of machine code"),
    "no facts": (lambda f: program(f, **{"k.cubin": 4}), "of None bytes"),
    "huge": (lambda f: program(f, **{"k.cubin": {"bytes": 1 << 40}}), "which no program has"),
    "missing": (lambda f: (f / KEY / "k.cubin").unlink(), "cannot be read"),
    "cut": (lambda f: (f / KEY / "k.cubin").write_bytes(b"cod"), "is not what was saved"),
    "longer": (lambda f: (f / KEY / "k.cubin").write_bytes(b"code+"), "more than 4 bytes"),
    "exchanged": (lambda f: (f / KEY / "k.cubin").write_bytes(b"edoc"), "is not what was saved"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_a_line(folder: Path, name: str) -> None:
    spoil, words = WRONG[name]
    spoil(folder)
    with pytest.raises(OptionError) as told:
        saved.read_saved(folder, "cuda:90")
    assert words in str(told.value) and "\n" not in str(told.value)


def test_a_program_under_the_name_of_another_is_refused(folder: Path) -> None:
    other = "cd" * 32
    (folder / KEY).rename(folder / other)
    program(folder, other)
    with pytest.raises(OptionError, match="noted as another program"):
        saved.read_saved(folder, "cuda:90")


def test_programs_replace_those_of_before_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    saved.save(folder, "cuda:90", "a model", "0", [])
    assert [path.name for path in folder.iterdir()] == [saved.MANIFEST]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(OptionError, match=r"found thesis.txt and no manifest.json"):
        saved.save(tmp_path / "full", "cuda:90", "a model", "0", [])


def test_all_programs_together_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.read_saved(folder, "cuda:90")
    monkeypatch.setattr(saved, "BYTES_MAX", 5)
    with pytest.raises(OptionError, match="0 MiB of programs, expected at most 0"):
        saved.read_saved(folder, "cuda:90")
