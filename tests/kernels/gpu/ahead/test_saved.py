"""Folders of compiled programs that are not as they were saved. Nothing is compiled here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from mtmd.base.errors import OptionError
from mtmd.kernels.gpu.ahead import saved

KEY = "ab" * 32
MADE = {
    "triton": triton.__version__,
    "triton_build": "b",
    "sources": "s",
    "tools": "t",
    "variables": "{}",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(saved, "made_with", lambda _: dict(MADE))
    one = compiled(tmp_path)
    assert saved.save(tmp_path / "kept", "cuda:90", "a model", "0", [one])["programs"] == 1
    return tmp_path / "kept"


def compiled(folder: Path) -> SimpleNamespace:
    """As Triton gives it."""
    files = {"k.cubin": b"code", "k.ptx": b"text", "k.json": noted(KEY)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    group = {name: str(folder / name) for name in files}
    return SimpleNamespace(hash=KEY, name="k", metadata_group=group)


def noted(key: str) -> bytes:
    return json.dumps({"hash": key, "triton_version": triton.__version__}).encode()


def change(folder: Path, **fields: Any) -> None:
    file = folder / saved.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def program(folder: Path, key: str = KEY, **files: Any) -> None:
    entry = json.loads((folder / saved.MANIFEST).read_text())["programs"][KEY]
    change(folder, programs={key: {"kernel": "k", "files": {**entry["files"], **files}}})


def test_what_was_saved_is_read(folder: Path) -> None:
    result = saved.read_saved(folder, "cuda:90")
    assert result.model == "a model"
    assert result.programs == {KEY: {"k.cubin": b"code", "k.json": noted(KEY)}}


WRONG = {
    "no folder": (shutil.rmtree, "manifest.json cannot be read"),
    "no manifest": (lambda f: (f / saved.MANIFEST).unlink(), "cannot be read"),
    "no JSON": (lambda f: (f / saved.MANIFEST).write_text("{"), "not JSON"),
    "deep JSON": (lambda f: (f / saved.MANIFEST).write_text("[" * 99999), "not JSON"),
    "a list": (lambda f: (f / saved.MANIFEST).write_text("[]"), "not of format 2"),
    "a later format": (lambda f: change(f, format=3), "not of format 2"),
    "no texts": (lambda f: change(f, triton=3), "lacks"),
    "programs in a list": (lambda f: change(f, programs=[]), "lacks"),
    "another card": (lambda f: change(f, target="cuda:80"), "made for 'cuda:80', found the device"),
    "another Triton": (lambda f: change(f, triton="2.0"), "made by Triton '2.0', found"),
    "another build": (lambda f: change(f, triton_build="c"), "another build of Triton"),
    "other tools": (lambda f: change(f, tools="u"), "another version of the tools"),
    "other variables": (
        lambda f: change(f, variables='{"DISABLE_LLVM_OPT": "1"}'),
        'made with Triton\'s variables \'{"DISABLE_LLVM_OPT": "1"}\', found {} here',
    ),
    "nothing": (lambda f: change(f, programs={}), "holds no programs"),
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
    with pytest.raises(OptionError) as reported:
        saved.read_saved(folder, "cuda:90")
    assert words in str(reported.value) and "\n" not in str(reported.value)


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


def lost(_: Path) -> dict[str, str]:
    return {"l.cubin": "/nowhere/l.cubin"}


def stopped(_: Path) -> dict[str, str]:
    raise KeyboardInterrupt


@pytest.mark.parametrize("files", [lost, stopped])
def test_a_save_that_ends_midway_leaves_what_was_there(
    folder: Path, tmp_path: Path, files: Callable[[Path], dict[str, str]]
) -> None:
    before = saved.read_saved(folder, "cuda:90")

    class Second:
        hash, name = "cd" * 32, "l"

        @property
        def metadata_group(self) -> dict[str, str]:
            return files(tmp_path)

    (tmp_path / "k.cubin").write_bytes(b"another")
    with pytest.raises((OptionError, KeyboardInterrupt)):
        saved.save(folder, "cuda:90", "another", "0", [compiled(tmp_path), Second()])
    assert saved.read_saved(folder, "cuda:90") == before
    assert sorted(path.name for path in folder.iterdir()) == [KEY, saved.MANIFEST]
    saved.save(folder, "cuda:90", "a third", "0", [compiled(tmp_path)])
    assert saved.read_saved(folder, "cuda:90").model == "a third"


def test_programs_that_changed_are_exchanged(folder: Path, tmp_path: Path) -> None:
    one = compiled(tmp_path)
    (tmp_path / "k.cubin").write_bytes(b"another")
    saved.save(folder, "cuda:90", "a model", "0", [one])
    assert saved.read_saved(folder, "cuda:90").programs[KEY]["k.cubin"] == b"another"
    assert sorted(path.name for path in folder.iterdir()) == [KEY, saved.MANIFEST]


def test_what_a_killed_save_left_is_no_hindrance(folder: Path, tmp_path: Path) -> None:
    (folder / saved.MANIFEST).unlink()
    (folder / saved.TEMPORARY / "ef").mkdir(parents=True)
    saved.save(folder, "cuda:90", "a model", "0", [compiled(tmp_path)])
    assert sorted(path.name for path in folder.iterdir()) == [KEY, saved.MANIFEST]


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"file.new: cannot be written \(Not a directory\)"):
        saved.make_folder(tmp_path / "file" / "new")
    saved.make_folder(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())
