"""Parquet files: rows one after another, and those that say less than they are."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtmd.base.errors import ImageError, OptionError
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources import tables
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.listing import list_shard
from mtmd.cluster.sources.reader import Reader
from mtmd.cluster.sources.tables import Rows

COLUMNS = Columns()


def table_of(location: Path, images: Any, rows: int = 1000, **options: Any) -> str:
    pq.write_table(pa.table({"image": images}), location, row_group_size=rows, **options)
    return str(location)


def test_rows_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two units ask for them, mixed; also where next to nothing is kept."""
    pictures = [bytes([n]) * 50 for n in range(60)]
    source = table_of(tmp_path / "t.parquet", pictures, 25)
    for saved in (tables.SAVED_MAX, 100):
        monkeypatch.setattr(tables, "SAVED_MAX", saved)
        rows, order = Rows(COLUMNS), [*range(60)] * 2
        random.Random(saved).shuffle(order)
        assert [rows.read(source, n)["image"] for n in order] == [pictures[n] for n in order]


def test_rows_that_follow_one_another_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = tables.open_seekable

    def noted(source: str) -> Any:
        opened.append(source)
        return real(source)

    monkeypatch.setattr(tables, "open_seekable", noted)
    source = table_of(tmp_path / "t.parquet", [bytes([n]) for n in range(100)], 100)
    rows = Rows(COLUMNS)
    for n in range(40):
        for row in (n ^ 3, 50 + (n ^ 3)):  # two units, each by four threads
            assert rows.read(source, row)["image"] == bytes([row])
    assert len(opened) == 2  # for what it says of itself, and for its rows


def test_a_table_is_decoded_no_further_than_its_rows_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dictionary of one picture, which a thousand rows name: a file of 100 KB for 100 MB."""
    values = pa.DictionaryArray.from_arrays(
        pa.array([0] * 1000, pa.int32()), pa.array([os.urandom(100_000)], pa.binary())
    )
    source = table_of(tmp_path / "t.parquet", values, dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "t.parquet").stat().st_size < 120_000
    monkeypatch.setattr(tables, "GROUP_MAX", 1_000_000)
    before, rows = pa.total_allocated_bytes(), Rows(COLUMNS)
    assert len(rows.read(source, 3)["image"]) == 100_000
    assert pa.total_allocated_bytes() - before < 2_000_000
    with pytest.raises(ImageError, match="more than 1,000,000 bytes before this row"):
        rows.read(source, 500)
    assert pa.total_allocated_bytes() - before < 3_000_000
    assert len(rows.read(source, 1)["image"]) == 100_000


def test_rows_of_nothing_are_counted_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 million of them are a file of 58 KB."""
    source = table_of(tmp_path / "t.parquet", pa.nulls(300_000, pa.binary()), 1 << 20)
    listed = list_shard((source, ""), COLUMNS)
    assert len(listed) == 300_000 and not listed.items
    assert next(iter(listed)) == Item(f"{source}#0", f"{source}#0", "cell", source, 0)
    monkeypatch.setattr(tables, "MAX_ITEMS", 299_999)
    (item,) = list_shard((source, ""), COLUMNS)
    assert item.kind == "shard"
    with pytest.raises(
        ImageError, match=r"found 300,000 rows, 300,000 in its row groups, .*299,999"
    ):
        Reader(COLUMNS).read(item)


def test_a_table_without_pyarrow_is_no_row_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = table_of(tmp_path / "t.parquet", [b"x"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for work in (lambda: list_shard((source, ""), COLUMNS), lambda: Rows(COLUMNS).read(source, 0)):
        with pytest.raises(OptionError, match="tables need pyarrow"):
            work()
