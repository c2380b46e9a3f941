"""A folder of rows, here and behind addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mtmd.cluster import folder as folders
from mtmd.cluster.folder import Folder


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize("place", ("memory://bucket/out.jsonl", "tmp"))
def test_a_file_is_there_whole_and_stays_as_it_was_first(
    place: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/bucket/x", b"")
    folder = Folder(place if "://" in place else str(tmp_path / "out.jsonl"))
    assert folder.names() == set()
    folder.make()
    assert folder.write("part-000000.jsonl", b"one")
    assert not folder.write("part-000000.jsonl", b"two")
    assert (folder.names(), folder.read("part-000000.jsonl")) == ({"part-000000.jsonl"}, b"one")
    (tmp_path / "out.jsonl").mkdir(exist_ok=True)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folders.os, "link", broken)
        patched.setattr(type(memory), "mv", broken)
        with pytest.raises(OSError, match="No space"):
            folder.write("part-000001.jsonl", b"three")
    assert folder.names() == {"part-000000.jsonl"}


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(folders.os, "link", none)
    folder = Folder(str(tmp_path))
    folder.write("a", b"one")
    folder.write("a", b"two")
    assert (folder.names(), folder.read("a")) == ({"a"}, b"one")
