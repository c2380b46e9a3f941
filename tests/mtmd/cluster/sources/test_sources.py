"""Pictures found and read in files, tar files and Parquet files, here and behind addresses."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtmd.base.errors import ImageError, OptionError
from mtmd.cluster import locations as locations
from mtmd.cluster.locations import as_text, full_name, identity, is_address
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources import reader as readers
from mtmd.cluster.sources.find import Columns, find
from mtmd.cluster.sources.listing import list_shard
from mtmd.cluster.sources.reader import Reader, path_of
from mtmd.prompt.url_kinds import url_identity


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/bucket", recursive=True)


def tar_bytes(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("folder.png"), None)  # empty
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def names_and_data(items: list[Item], columns: Columns = Columns()) -> list[tuple[str, bytes]]:  # noqa: B008
    reader = Reader(columns)
    return [reader.read(item) for item in items]


def test_folders_patterns_lists_and_addresses(memory: Any, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.png", "deep/b.JPG", "deep/c.tar", "deep/.d.png", "notes.txt", "t.parquet"):
        (tmp_path / name).write_bytes(b"x")
    out = tmp_path / "rows.parquet"
    out.mkdir()
    (out / "part-000000.parquet").write_bytes(b"x")
    for name in ("x/1.png", "x/y/2.jpg", "x/.z/3.png", "x/4.txt", "x/5.tar"):
        memory.pipe_file(f"/bucket/{name}", b"x")
    listed = tmp_path / "list"
    listed.write_text(f"{tmp_path}/a.png\nmemory://bucket/x/9.png\n")

    def match(*words: object) -> tuple[list[str], list[str]]:
        result = find([str(word) for word in words], (), full_name(str(out)))
        return [item.id for item in result.files], list(result.shards)

    t = str(tmp_path)
    assert match(t) == ([f"{t}/a.png", f"{t}/deep/b.JPG"], [f"{t}/deep/c.tar", f"{t}/t.parquet"])
    assert match(f"file://{t}/a.png", tmp_path / "a.png") == ([f"{t}/a.png"], [])
    assert match("memory://bucket/x") == (
        ["memory://bucket/x/1.png", "memory://bucket/x/y/2.jpg"],
        ["memory://bucket/x/5.tar"],
    )
    assert match("memory://bucket/x/*.png")[0] == ["memory://bucket/x/1.png"]
    assert match("https://host/p.png?size=1") == ([identity("https://host/p.png?size=1")], [])
    assert match("https://host/s.tar?size=1") == ([], ["https://host/s.tar?size=1"])
    result = find([], [str(listed)], "/out")
    assert [item.id for item in result.files] == [f"{t}/a.png", "memory://bucket/x/9.png"]
    assert find([t], (), "/out").skipped == {".txt": 1, "": 1}
    for word, reported in (
        ("memory://bucket/none/*.png", "found no file there"),
        (tmp_path / "none" / "*.png", "no file that fits"),
        ("other://bucket/x", "an address that fsspec does not know"),
    ):
        with pytest.raises(OptionError, match=reported):
            match(word)
    with pytest.raises(OptionError, match="no picture was named"):
        match()
    (tmp_path / "shard.tar.gz").write_bytes(b"x")
    with pytest.raises(OptionError, match=r"a compressed tar file, expected \.tar"):
        match(tmp_path / "shard.tar.gz")


def test_data_urls_are_pictures_too(tmp_path: Path) -> None:
    """Named by their digest, as without Ray; one as wrong as can be is told when it is read."""
    url, wrong = "data:image/png;base64,cGljdHVyZQ==", "data:image/png,shard.tar"
    listed = tmp_path / "list"
    listed.write_text(f"{url}\n{wrong}\n")
    result = find([url], [str(listed)], str(tmp_path / "rows"))
    assert not result.shards
    assert [item.id for item in result.files] == [url_identity(url), url_identity(wrong)]
    assert [item.id for item in result.files] == [item.name for item in result.files]
    assert path_of(result.files[0]) is None
    assert names_and_data([result.files[0]]) == [(url_identity(url), b"picture")]
    with pytest.raises(
        ImageError, match=r"^data:image/png;sha256=\w{16}: found a data URL that is"
    ):
        Reader(Columns()).read(result.files[1])
    pq.write_table(pa.table({"image": [url]}), tmp_path / "t.parquet")
    items = [*list_shard((str(tmp_path / "t.parquet"), ""), Columns())]
    assert names_and_data(items) == [(url_identity(url), b"picture")]


def test_a_host_stays_in_the_addresses_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Far:
        def exists(self, _: str) -> bool:
            return True

        isdir = exists

        def find(self, path: str) -> list[str]:
            return [f"{path}/a.png"]

    for word, path, expected in (
        ("sftp://host/photos/", "/photos", "sftp://host/photos/a.png"),
        ("s3://bucket/photos", "bucket/photos", "s3://bucket/photos/a.png"),
        ("s3://bucket", "bucket", "s3://bucket/a.png"),
    ):
        monkeypatch.setattr(locations, "file_system", lambda _, path=path: (Far(), path))
        assert [*locations.expand(word, (".png",))] == [expected]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff%41.png")
    Path(path).write_bytes(b"picture")
    (item,) = find([str(tmp_path)], (), "/out").files
    assert item.id.startswith("file:///") and item.id.encode() and full_name(item.id) == path
    assert full_name(as_text("/a/%41.png")) == "/a/%41.png"
    assert not is_address(item.id) and Reader(Columns()).read(item)[1] == b"picture"


@pytest.mark.parametrize("location", ("memory://bucket", "tmp"))
def test_pictures_of_a_tar_file(location: str, memory: Any, tmp_path: Path) -> None:
    data = tar_bytes({"1.jpg": b"one", "1.json": b"{}", "d/2.PNG": b"two" * 999, "1.jpg ": b""})
    memory.pipe_file("/bucket/s.tar", data)
    (tmp_path / "s.tar").write_bytes(data)
    source = f"{location}/s.tar" if "://" in location else f"{tmp_path}/s.tar"
    items = [*list_shard((source, ""), Columns())]
    assert [(item.id, item.name, item.size) for item in items] == [
        (f"{source}#0", "folder.png", 0),
        (f"{source}#2", "1.jpg", 3),
        (f"{source}#4", "d/2.PNG", 2997),
    ]
    assert names_and_data(items)[1:] == [("1.jpg", b"one"), ("d/2.PNG", b"two" * 999)]
    (tmp_path / "s.tar").write_bytes(data[:2100])
    memory.pipe_file("/bucket/s.tar", data[:2100])
    with pytest.raises(ImageError, match=r"of 3,509 bytes at .*it has been cut since"):
        Reader(Columns()).read(items[2])


def test_a_tar_file_that_is_none_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"no tar file")
    for name in ("s.tar", "none.tar", "none.parquet"):
        (item,) = list_shard((f"{tmp_path}/{name}", ""), Columns())
        assert (item.kind, item.id) == ("shard", f"{tmp_path}/{name}")
        with pytest.raises(ImageError, match=f"{name}: cannot be read"):
            Reader(Columns()).read(item)
    (tmp_path / "s.tar").write_bytes(tar_bytes({"a.png": b"x"}))
    with pytest.raises(ImageError, match="can now; run the command again with --resume"):
        Reader(Columns()).read(Item("s", "s", "shard", f"{tmp_path}/s.tar"))


def write_table(location: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), location, row_group_size=3)
    return str(location)


def test_rows_of_a_parquet_file(memory: Any, tmp_path: Path) -> None:
    memory.pipe_file("/bucket/far.png", b"far")
    (tmp_path / "near.png").write_bytes(b"near")
    table = write_table(
        tmp_path / "t.parquet",
        image=[bytes([n]) for n in range(10)],
        key=[f"k{n}" if n != 4 else None for n in range(10)],
        path=["near.png", "memory://bucket/far.png", f"{tmp_path}/near.png"] + [None] * 7,
        hf=[{"bytes": b"in", "path": "in.png"}, {"bytes": None, "path": "near.png"}] + [None] * 8,
    )
    items = [*list_shard((table, ""), Columns())]
    assert [(item.id, item.position) for item in items] == [(f"{table}#{n}", n) for n in range(10)]
    assert names_and_data(items) == [(f"{table}#{n}", bytes([n])) for n in range(10)]
    # in any order, as several threads ask
    reader, order = Reader(Columns("image", "key")), (9, 0, 4, 1, 8, 3)
    named = [reader.read(items[n]) for n in order]
    assert named == [(f"k{n}" if n != 4 else f"{table}#4", bytes([n])) for n in order]
    near, far = ("near.png", b"near"), ("memory://bucket/far.png", b"far")
    assert names_and_data(items[:3], Columns("path", anywhere=True)) == [
        near,
        far,
        (f"{tmp_path}/near.png", b"near"),
    ]
    assert names_and_data(items[:2], Columns("hf")) == [("in.png", b"in"), near]
    write_table(tmp_path / "u.parquet", path=["foo://bucket/x.png"])
    with pytest.raises(ImageError, match="an address that fsspec does not know"):
        Reader(Columns("path", anywhere=True)).read(Item("a", "a", "cell", f"{tmp_path}/u.parquet"))
    with pytest.raises(ImageError, match=r"#5: found NoneType in the column 'path'"):
        Reader(Columns("path")).read(items[5])
    with pytest.raises(OptionError, match=r"columns image, key, path, hf, expected 'photo'"):
        list_shard((table, ""), Columns("photo"))
    with pytest.raises(OptionError, match=r"expected 'id'; name one with --name-column"):
        list_shard((table, ""), Columns("image", "id"))
    write_table(tmp_path / "t.parquet", image=[b"x"])
    with pytest.raises(ImageError, match="found 1 rows, expected row 9"):
        Reader(Columns()).read(items[9])


def test_what_is_too_large_is_not_read(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PICTURE_MAX", 10)
    (tmp_path / "a.png").write_bytes(b"x" * 11)
    (tmp_path / "long.png").write_bytes(b"x" * 64)
    memory.pipe_file("/bucket/a.png", b"x" * 11)
    table = write_table(tmp_path / "t.parquet", image=[b"x" * 11])
    for item in (
        Item("a", "a.png", "file", f"{tmp_path}/a.png"),
        Item("a", "a.png", "file", "memory://bucket/a.png"),
        Item("a", "a.mp4", "member", f"{tmp_path}/long.png", 0, 64),
        Item("a", "a.png", "cell", table),
    ):
        with pytest.raises(ImageError, match="found more than 10 bytes"):
            Reader(Columns()).read(item)
