"""Tar files that are damaged, cut, or lie: what is whole is answered, and the rest is told."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mtmd.base.errors import ImageError
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources import tar as tars
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.listing import list_shard
from mtmd.cluster.sources.reader import Reader

RECORD = 512 + 1024  # of a member of 1,000 bytes


def tar_of(count: int = 10) -> bytearray:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for n in range(count):
            info = tarfile.TarInfo(f"{n:03}.png")
            info.size = 1000
            tar.addfile(info, io.BytesIO(bytes([n + 1]) * 1000))
    return bytearray(file.getvalue())


def header(size: bytes, name: str = "a.png", kind: bytes = tarfile.REGTYPE) -> bytes:
    """One whose field of 12 bytes says `size`."""
    info = tarfile.TarInfo(name)
    info.type = kind
    data = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    data[124:136] = size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def listed(folder: Path, data: bytes) -> list[Item]:
    (folder / "s.tar").write_bytes(data)
    return [*list_shard((f"{folder}/s.tar", ""), Columns())]


def test_a_whole_one_has_nothing_else(tmp_path: Path) -> None:
    data = tar_of()
    for whole in (data, data[: RECORD * 10 + 1024], data[: RECORD * 10 + 512]):
        assert [item.kind for item in listed(tmp_path, whole)] == ["member"] * 10
    assert listed(tmp_path, bytes(10_240)) == []


@pytest.mark.parametrize(
    ("damage", "before"),
    (
        (lambda d: d[: RECORD * 4 + 148] + b"9999999\0" + d[RECORD * 4 + 156 :], 4),
        (lambda d: d[: RECORD * 4] + bytes(512) + d[RECORD * 4 + 512 :], 4),
        (lambda d: d[: RECORD * 5 + 100], 5),
        (lambda d: d[: RECORD * 5], 5),
        (lambda d: d[: RECORD * 10], 10),
        (lambda d: d + tar_of(), 10),  # as `cat` puts them together
    ),
    ids=("checksum", "zeroed", "cut in a header", "cut at one", "without an end", "two"),
)
def test_what_is_before_the_damage_is_listed_and_the_rest_is_a_row(
    damage, before: int, tmp_path: Path
) -> None:
    items = listed(tmp_path, damage(tar_of()))
    assert [item.kind for item in items] == ["member"] * before + ["rest"]
    at = RECORD * before
    assert items[-1].id == f"{tmp_path}/s.tar#byte-{at}"
    with pytest.raises(ImageError, match=rf"found damage at byte {at:,} .*--resume"):
        Reader(Columns()).read(items[-1])
    assert Reader(Columns()).read(items[0]) == ("000.png", b"\1" * 1000)


def test_a_member_that_is_cut_is_told_too(tmp_path: Path) -> None:
    items = listed(tmp_path, tar_of()[: RECORD * 5 + 600])
    assert [item.kind for item in items] == ["member"] * 6 + ["rest"]
    with pytest.raises(ImageError, match="it has been cut since"):
        Reader(Columns()).read(items[5])


@pytest.mark.parametrize("size", (b"\xff" * 12, b"\xff" * 10 + b"\xfe\x00", b"\xff" * 11 + b"\x00"))
def test_sizes_below_nothing_are_refused(size: bytes, tmp_path: Path) -> None:
    """-1 reads all there is, -512 the same header for ever."""
    (item,) = listed(tmp_path, header(size) + bytes(4096))
    assert item.kind == "shard"
    *whole, rest = listed(tmp_path, bytes(tar_of()[:RECORD]) + header(size) + bytes(4096))
    assert [item.kind for item in whole] == ["member"] and rest.kind == "rest"


@pytest.mark.parametrize("kind", (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE))
def test_a_name_of_megabytes_is_not_read(kind: bytes, tmp_path: Path) -> None:
    long = header(b"%011o\0" % (600 << 20), kind=kind)
    location = tmp_path / "s.tar"
    for first, kinds in ((b"", ["shard"]), (bytes(tar_of()[:RECORD]), ["member", "rest"])):
        with location.open("wb") as file:
            file.write(first + long)
            file.truncate(700 << 20)
        assert [item.kind for item in list_shard((str(location), ""), Columns())] == kinds


def test_headers_without_end_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "HEADERS_MAX", 8192)
    one = header(b"%011o\0" % 10, kind=tarfile.XHDTYPE) + b"10 path=a\n".ljust(512, b"\0")
    assert [item.kind for item in listed(tmp_path, one * 100 + bytes(tar_of()))] == ["shard"]
    assert len(listed(tmp_path, bytes(tar_of(40)))) == 40  # each member has as much


def test_another_picture_in_its_place_is_not_taken_for_it(tmp_path: Path) -> None:
    *_, last = listed(tmp_path, tar_of(3))
    for other in (tar_of(1) + bytes(4096), bytes(10_240), bytes(512) + tar_of(3)):
        (tmp_path / "s.tar").write_bytes(other)
        with pytest.raises(ImageError, match=r"002\.png: found no header of 1,000 bytes .* anew"):
            Reader(Columns()).read(last)
