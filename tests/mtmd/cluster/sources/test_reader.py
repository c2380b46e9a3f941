"""What tables may name, how large it may be, and what is told of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtmd.base.errors import ImageError
from mtmd.cluster import locations as locations
from mtmd.cluster.locations import identity, named_by, reason_text, without_secrets
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources import reader as readers
from mtmd.cluster.sources.find import Columns, find
from mtmd.cluster.sources.listing import list_shard
from mtmd.cluster.sources.reader import Reader

MP4 = b"\0\0\0\x18ftypmp42"


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/bucket", recursive=True)


def table_of(location: Path, **columns: list[Any]) -> list[Item]:
    pq.write_table(pa.table(columns), location)
    return [*list_shard((str(location), ""), Columns())]


@pytest.mark.parametrize("value", ("../secret.png", "{}/secret.png", "file://{}/secret.png"))
def test_files_outside_of_a_tables_folder(value: str, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "shared").mkdir()
    (item,) = table_of(tmp_path / "shared" / "t.parquet", image=[value.format(tmp_path)])
    with pytest.raises(ImageError, match=r"outside of its folder.*--trust-tables"):
        Reader(Columns()).read(item)
    assert Reader(Columns(anywhere=True)).read(item)[1] == b"secret"


S3, WEB, HERE = (
    "s3://bucket/sets/t.parquet",
    "https://host:1/sets/t.parquet?sig=a/b",
    "/sets/t.parquet",
)


@pytest.mark.parametrize(
    ("table", "value", "result"),
    (
        (HERE, "deep/../a.png", "/sets/deep/../a.png"),
        (HERE, "/sets/a.png", "/sets/a.png"),
        (HERE, "deep/../../a.png", None),
        (HERE, "/setsb/a.png", None),
        ("/t.parquet", "a.png", "/a.png"),
        ("https://me:pass@host/t.parquet", "a.png", "https://me:pass@host/a.png"),
        (HERE, "s3://bucket/a.png", None),
        (HERE, "http://169.254.169.254/latest", None),
        (HERE, "FILE:///etc/passwd", None),
        (S3, "a.png", "s3://bucket/sets/a.png"),
        (S3, "../a.png", None),
        (S3, "s3://other/a.png", "s3://other/a.png"),
        (S3, "http://169.254.169.254/latest", None),
        (S3, "/etc/passwd", None),
        (S3, "file:///etc/passwd", None),
        (S3, "reference://x", None),
        (S3, "zip://a.png::http://host/a.zip", None),
        (S3, "a.png::http://host/a.zip", None),
        (WEB, "a.png", "https://host:1/sets/a.png"),
        (WEB, "https://host:1/a.png", "https://host:1/a.png"),
        (WEB, "https://host/a.png", None),
        (WEB, "http://host:1/a.png", None),
        ("sftp://me@host/t.parquet", "sftp://me@other/a.png", None),
    ),
)
def test_what_a_table_may_name(table: str, value: str, result: str | None) -> None:
    if result is None:
        with pytest.raises(ImageError, match="outside of its folder"):
            named_by(table, value, False)
    else:
        assert named_by(table, value, False) == result
    assert named_by(table, value, True)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (item,) = table_of(tmp_path / "t.parquet", image=["a.png"])
    with pytest.raises(ImageError, match="not a regular file"):
        Reader(Columns()).read(item)
    os.mkfifo(tmp_path / "s.tar")
    (shard,) = list_shard((f"{tmp_path}/s.tar", ""), Columns())
    assert shard.kind == "shard"


def test_what_is_a_video_its_first_bytes_say(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PICTURE_MAX", 100)
    monkeypatch.setattr(readers, "VIDEO_MAX", 1000)
    film, picture = MP4 + bytes(500), b"\x89PNG\r\n\x1a\n" + bytes(500)
    (tmp_path / "film").write_bytes(film)
    (tmp_path / "picture.mp4").write_bytes(picture)
    memory.pipe_file("/bucket/film?", film)
    items = table_of(tmp_path / "t.parquet", image=["film", "picture.mp4"], key=["clip 7", "a.mp4"])
    reader = Reader(Columns("image", "key"))
    assert reader.read(items[0]) == ("clip 7", film)
    with pytest.raises(ImageError, match=r"a\.mp4: found more than 100 bytes"):
        reader.read(items[1])
    assert reader.read(Item("a", "a", "file", "memory://bucket/film?"))[1] == film
    (tmp_path / "film").write_bytes(film * 2)
    with pytest.raises(ImageError, match="clip 7: found more than 1,000 bytes"):
        reader.read(items[0])
    data = table_of(tmp_path / "u.parquet", image=[film, picture])
    assert Reader(Columns()).read(data[0])[1] == film
    with pytest.raises(ImageError, match="found more than 100 bytes"):
        Reader(Columns()).read(data[1])
    member = Item("a", "a.mp4", "member", f"{tmp_path}/picture.mp4", 0, len(picture))
    with pytest.raises(ImageError, match="found more than 100 bytes"):
        Reader(Columns()).read(member)


@pytest.mark.parametrize("kind", ("binary", "struct", "dictionary"))
def test_nobody_reads_a_row_while_a_large_one_waits_for_room(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each thread would have one in memory."""
    monkeypatch.setattr(readers, "PICTURE_MAX", 100)
    monkeypatch.setattr(readers, "VIDEO_MAX", 1000)
    films, location = [MP4 + bytes([n]) * 900 for n in range(3)], tmp_path / "t.parquet"
    cells = pa.array([{"bytes": f, "path": None} for f in films] if kind == "struct" else films)
    cells = cells.dictionary_encode() if kind == "dictionary" else cells
    pq.write_table(pa.table({"key": ["a", "b", "c"], "image": cells}), location)
    columns = Columns("image", "key")
    items, reader = [*list_shard((str(location), ""), columns)], Reader(columns)
    result = dict[int, bytes]()
    with reader.holding() as read:
        assert read(items[0])[1] == films[0]
        threads = [
            threading.Thread(target=lambda n=n: result.update({n: reader.read(items[n])[1]}))
            for n in (1, 2)
        ]
        for thread in threads:
            thread.start()
        while not reader._room._changed._waiters:  # type: ignore[attr-defined]
            assert threads[0].is_alive()
            time.sleep(0.001)
        if is_free := reader._lock.acquire(timeout=0.2):
            reader._lock.release()
        assert not is_free and not result
    for thread in threads:
        thread.join(60)
    assert result == {1: films[1], 2: films[2]}


def test_large_videos_are_held_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PICTURE_MAX", 100)
    monkeypatch.setattr(readers, "VIDEO_MAX", 1000)
    (tmp_path / "film").write_bytes(MP4 + bytes(900))
    (tmp_path / "small").write_bytes(bytes(50))
    film, small = (Item(n, n, "file", f"file://{tmp_path}/{n}") for n in ("film", "small"))
    reader, second = Reader(Columns()), list[bytes]()
    with reader.holding() as read:
        read(film)
        thread = threading.Thread(target=lambda: second.append(reader.read(film)[1]))
        thread.start()
        assert reader.read(small)[1] == bytes(50)  # which waits for nobody
        while not reader._room._changed._waiters:  # type: ignore[attr-defined]
            assert thread.is_alive()
            time.sleep(0.001)
        assert not second
    thread.join(60)
    assert len(second) == 1


SIGNED = "https://me:pass@host/a/p.png?X-Amz-Signature=5ec2e7"


def test_secrets_of_addresses_stand_in_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SIGNED.replace("p.png", "s.tar")
    (item,) = (result := find([SIGNED, other], (), "/out")).files
    assert item.source == SIGNED and result.shards == (other,)
    assert item.name == "https://host/a/p.png" and item.id == identity(SIGNED)
    assert item.id.startswith("https://host/a/p.png?") and len(item.id) == len(item.name) + 17
    assert identity(SIGNED) != identity(SIGNED + "0")

    class Far:
        def __getattr__(self, _: str) -> Any:
            def refused(*_: Any, **__: Any) -> None:
                raise ValueError(f"403, message='Forbidden', url='{SIGNED}&x=1'")

            return refused

    monkeypatch.setattr(locations, "file_system", lambda _: (Far(), SIGNED))
    (shard,) = list_shard((other, ""), Columns())
    (cell,) = table_of(tmp_path / "t.parquet", image=[SIGNED])
    for one in (item, shard, cell):
        with pytest.raises(ImageError) as reported:
            Reader(Columns(anywhere=True)).read(one)
        words = f"{one.id} {one.name} {reported.value}"
        assert "host/a" in str(reported.value) and "5ec2e7" not in words and "pass" not in words


@pytest.mark.parametrize(
    ("address", "shown"),
    (
        (SIGNED, "https://host/a/p.png"),
        ("sftp://me:pass@host/p@2x.png", "sftp://host/p@2x.png"),
        ("sftp://me@host/p.png", "sftp://me@host/p.png"),
        ("abfs://photos@account.dfs/p.png", "abfs://photos@account.dfs/p.png"),
        ("s3://bucket/why?/p.png", "s3://bucket/why?/p.png"),
        ("zip://a.png::https://host/a.zip?sig=1", "zip://a.png::https://host/a.zip"),
        ("/a/what?.png", "/a/what?.png"),
    ),
)
def test_what_is_shown_of_an_address(address: str, shown: str) -> None:
    assert without_secrets(address) == shown
    assert identity(address).startswith(shown) and (identity(address) == shown) == (
        address == shown
    )
    assert reason_text(ValueError(f"no {address}"), address) == f"no {shown}"


def test_files_of_which_nothing_is_known_are_listed_again(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/bucket/t.parquet", b"x")
    before = locations.stamp_of("memory://bucket/t.parquet")
    assert before and before == locations.stamp_of("memory://bucket/t.parquet")
    memory.pipe_file("/bucket/t.parquet", b"xy")
    assert before != locations.stamp_of("memory://bucket/t.parquet")
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: {"size": None, "type": "file"})
    assert locations.stamp_of("memory://bucket/t.parquet") == ""
