"""A folder of rows, here and behind addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from mtmd.cluster.out import folder as folders
from mtmd.cluster.out.folder import Folder


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize("location", ("memory://bucket/out.jsonl", "tmp"))
def test_a_file_is_there_whole_and_stays_as_it_was_first(
    location: str, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/bucket/x", b"")
    folder = Folder(location if "://" in location else str(tmp_path / "out.jsonl"))
    assert folder.names() == set()
    folder.make()
    assert folder.write("part-000000.jsonl", b"one")
    assert not folder.write("part-000000.jsonl", b"two")
    assert (folder.names(), folder.read("part-000000.jsonl")) == ({"part-000000.jsonl"}, b"one")
    (tmp_path / "out.jsonl").mkdir(exist_ok=True)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "mv", broken)
        patched.setattr(type(memory), "mv", broken)
        with pytest.raises(OSError, match="No space"):
            folder.write("part-000001.jsonl", b"three")
    assert folder.names() == {"part-000000.jsonl"}


class Store:
    """Objects, written by several at once. `words`: what it says of one that is there."""

    def __init__(self, words: Exception | None):
        self.objects: dict[str, bytes] = {}
        self.words, self.requested = words, list[str]()

    def exists(self, path: str) -> bool:
        """Not what was written after somebody began to write."""
        return path in self.objects and len(self.requested) > 1

    def invalidate_cache(self) -> None:
        pass

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        self.requested.append(mode)
        if mode == "create" and path in self.objects and self.words is not None:
            raise self.words
        self.objects[path] = data

    def cat_file(self, path: str) -> bytes:
        return self.objects[path]


class Other(Exception):
    """Of a library's own."""


@pytest.mark.parametrize("words", (FileExistsError(), Other("412 precondition failed")))
def test_an_object_is_written_once_whoever_else_writes(
    words: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looked before: the store is asked to write nothing over what is there."""
    store = Store(words)
    monkeypatch.setattr(folders, "file_system", lambda _: (store, "bucket/out"))
    one, two = Folder("s3://bucket/out"), Folder("s3://bucket/out")
    assert one.write("_plan", b"one") and not two.write("_plan", b"two")
    assert two.read("_plan") == b"one" and store.requested == ["create", "create"]


def test_what_file_systems_raise_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, _: str) -> Any:
            def refused(*_: Any, **__: Any) -> None:
                raise Other("403 for https://host/a?sig=5ec2e7")

            return refused

    class Absent(Broken):
        def exists(self, _: str) -> bool:
            return False

        def invalidate_cache(self) -> None:
            pass

    monkeypatch.setattr(folders, "file_system", lambda _: (Absent(), "bucket/out"))
    folder = Folder("s3://bucket/out")
    for work in (
        folder.names,
        folder.make,
        lambda: folder.read("a"),
        lambda: folder.write("a", b""),
    ):
        with pytest.raises(OSError, match=r"^Other: 403 for https://host/a$"):
            work()
    folder.remove("a")


def test_file_systems_that_copy_to_rename_are_written_at_once(memory: Any) -> None:
    memory.pipe_file("/bucket/x", b"")
    folder = Folder("memory://bucket")
    assert not folders.renames(memory) and folder.write("a", b"one")
    assert folder.names() == {"x", "a"} and not folder.write("a", b"two")
