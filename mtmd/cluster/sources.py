"""Pictures out of files, tar files and Parquet files, wherever these lie: found, and read one by
one.
"""

from __future__ import annotations

import tarfile
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

from mtmd.batch.inputs import SUFFIXES, find_inputs
from mtmd.cluster.places import (
    REASON_CHARS,
    as_text,
    expand,
    full_name,
    is_address,
    open_seekable,
    read_most,
    read_range,
)
from mtmd.cluster.units import Item
from mtmd.config import VIDEO_SUFFIXES
from mtmd.kernels.errors import ImageError, MtmdError, OptionError
from mtmd.kernels.text import one_line, printable

TAR, TABLE = ".tar", ".parquet"
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
PICTURE_MOST = 64 << 20  # bytes, as of a picture's file
VIDEO_MOST = 1 << 30  # of one that is held in memory
GROUPS = 2  # parts of tables that are kept while their rows are read
GROUP_MOST = 4 << 30


@dataclass(frozen=True)
class Columns:
    """Of Parquet files: that of the pictures, and that of their names, "" for none."""

    picture: str = "image"
    name: str = ""


@dataclass(frozen=True)
class Found:
    """`files` are items already. Of `shards`, tar and Parquet files, each has many."""

    files: tuple[Item, ...]
    shards: tuple[str, ...]
    skipped: Counter[str]


def find(words: Iterable[str], lists: Sequence[str], leave_out: str) -> Found:
    """What `words` and `lists` name, each once, in the order named, but for what lies in the folder
    `leave_out`. Raises OptionError where one of them has nothing.
    """
    skipped: Counter[str] = Counter()
    wanted = (*SUFFIXES, TAR, TABLE)
    named: dict[str, str] = {}  # what people call it, by the full name

    def take(path: str, word: str) -> None:
        if not path.startswith(f"{leave_out.rstrip('/')}/"):
            named.setdefault(path, word)

    for word in words:
        if is_address(word):
            for path in expand(word, wanted):
                take(path, path)
            continue
        here = find_inputs([full_name(word) if word.startswith("file://") else word], (), wanted)
        skipped.update(here.skipped)
        for one in here.inputs:
            take(full_name(one.path), one.name)
    for file in lists:
        for one in find_inputs((), [file]).inputs:
            take(full_name(one.path), one.name)
    if not named:
        raise OptionError(
            "no picture was named; give files, folders, patterns, addresses like "
            "s3://bucket/photos, or --list FILE"
        )
    packed = next((name for name in named if name.lower().endswith(PACKED)), None)
    if packed is not None:
        raise OptionError(
            f"{printable(packed)}: found a compressed tar file, expected .tar, whose pictures can "
            "be read one by one; unpack it once, as with gunzip"
        )
    is_shard = {path: path.lower().endswith((TAR, TABLE)) for path in named}
    files = [(as_text(path), word) for path, word in named.items() if not is_shard[path]]
    return Found(
        tuple(Item(path, word, "file", path) for path, word in files),
        tuple(as_text(path) for path in named if is_shard[path]),
        skipped,
    )


def list_shard(source: str, columns: Columns) -> list[Item]:
    """The pictures in a tar or Parquet file; one item, of kind "shard", where that cannot be known.
    Raises OptionError where a table has not the columns.
    """
    try:
        return [*_items_in(source, columns)]
    except ImageError:
        return [Item(source, source, "shard", source)]


def _items_in(source: str, columns: Columns) -> Iterator[Item]:
    """Raises ImageError."""
    try:
        with open_seekable(source) as file:
            if source.lower().endswith(TAR):
                yield from _members(source, file)
            else:
                yield from _cells(source, file, columns)
    except MtmdError:
        raise
    except Exception as error:  # each file system has its own
        reason = one_line(error, REASON_CHARS) or type(error).__name__
        kind = "tar" if source.lower().endswith(TAR) else "Parquet"
        raise ImageError(
            f"{source}: cannot be read ({reason}), expected a {kind} file with pictures"
        ) from error


def _members(source: str, file: Any) -> Iterator[Item]:
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for number, member in enumerate(tar):
            tar.members.clear()  # type: ignore[attr-defined]  # else all are kept
            name = member.name
            if member.isreg() and not member.issparse() and name.lower().endswith(SUFFIXES):
                place = member.offset_data
                yield Item(
                    f"{source}#{number}", printable(name), "member", source, place, member.size
                )


def _cells(source: str, file: Any, columns: Columns) -> Iterator[Item]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    found = table.schema_arrow.names
    for option, column in (("column", columns.picture), ("name-column", columns.name)):
        if column and column not in found:
            raise OptionError(
                f"{source}: found the columns {', '.join(found)[:200]}, expected {column!r}; name "
                f"one with --{option}"
            )
    for row in range(table.metadata.num_rows):
        name = f"{source}#{row}"
        yield Item(name, name, "cell", source, row)


class Reader:
    """Items as bytes. Any thread may ask."""

    def __init__(self, columns: Columns):
        self._columns = columns
        self._groups: OrderedDict[tuple[str, int], list[dict[str, Any]]] = OrderedDict()
        self._starts: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = Lock()

    def read(self, item: Item) -> tuple[str, bytes]:
        """What it is called, and what is in it. Raises MtmdError."""
        if item.kind == "member":
            _check_size(item.name, item.size)
            return item.name, read_range(item.source, item.position, item.size)
        if item.kind == "cell":
            return self._cell(item)
        if item.kind == "shard":
            for _ in _items_in(item.source, self._columns):
                break
            raise ImageError(
                f"{item.source}: could not be read when pictures were listed, and can now; run "
                "the command again with --resume"
            )
        return item.name, _file(item.source, item.name)

    def _cell(self, item: Item) -> tuple[str, bytes]:
        with self._lock:
            row = self._row(item.source, item.position)
        value, name = row[self._columns.picture], item.name
        if isinstance(value, dict):  # as Hugging Face's datasets keep pictures
            path = value.get("path")
            name = path if isinstance(path, str) and path else name
            value = value.get("bytes") or path
        if isinstance(value, str) and value:
            name = value
        if self._columns.name and row[self._columns.name] is not None:
            name = str(row[self._columns.name])
        if isinstance(value, bytes):
            _check_size(name, len(value))
            return name, value
        if isinstance(value, str) and value:
            beside = item.source.rpartition("/")[0]
            is_whole = is_address(value) or value.startswith(("/", "file://"))
            return name, _file(value if is_whole else f"{beside}/{value}", name)
        raise ImageError(
            f"{item.id}: found {type(value).__name__} in the column {self._columns.picture!r}, "
            "expected the bytes of a picture, or where it is; choose another with --column"
        )

    def _row(self, source: str, number: int) -> dict[str, Any]:
        starts = self._starts.get(source)
        if starts is None or (source, bisect_right(starts, number) - 1) not in self._groups:
            self._load(source, number)
            starts = self._starts[source]
        group = bisect_right(starts, number) - 1
        return self._groups[source, group][number - starts[group]]

    def _load(self, source: str, number: int) -> None:
        import pyarrow.parquet as pq

        try:
            with open_seekable(source) as file:
                table = pq.ParquetFile(file)
                facts = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
                starts = [0, *accumulate(f.num_rows for f in facts)]
                if number >= starts[-1]:
                    raise ImageError(
                        f"{source}: found {starts[-1]:,} rows, expected row {number:,}; it has "
                        "been written anew since it was listed"
                    )
                group = bisect_right(starts, number) - 1
                if facts[group].total_byte_size > GROUP_MOST:
                    raise ImageError(
                        f"{source}: found {facts[group].total_byte_size:,} bytes in a row group, "
                        f"expected at most {GROUP_MOST:,}; write it with smaller ones"
                    )
                names = [name for name in (self._columns.picture, self._columns.name) if name]
                rows = table.read_row_group(group, columns=[*dict.fromkeys(names)]).to_pylist()
        except MtmdError:
            raise
        except Exception as error:
            reason = one_line(error, REASON_CHARS) or type(error).__name__
            raise ImageError(
                f"{source}: cannot be read ({reason}), expected a Parquet file with pictures"
            ) from error
        self._starts[source], self._groups[source, group] = starts, rows
        while len(self._groups) > GROUPS:
            self._groups.popitem(last=False)
        while len(self._starts) > 1024:
            self._starts.popitem(last=False)


def _file(source: str, name: str) -> bytes:
    most = VIDEO_MOST if name.lower().endswith(VIDEO_SUFFIXES) else PICTURE_MOST
    data = read_most(source, most)
    _check_size(name, len(data))
    return data


def _check_size(name: str, count: int) -> None:
    most = VIDEO_MOST if name.lower().endswith(VIDEO_SUFFIXES) else PICTURE_MOST
    if count > most:
        raise ImageError(
            f"{name}: found more than {most:,} bytes, expected at most so many; scale the picture "
            "down, or cut the video"
        )


def path_of(item: Item) -> Path | None:
    """Of a file that can be opened by a path."""
    return None if item.kind != "file" or is_address(item.source) else Path(full_name(item.source))


Listing = Callable[[Sequence[str], Columns], Iterator[list[Item]]]


def list_shards(sources: Sequence[str], columns: Columns) -> Iterator[list[Item]]:
    """One after another, in this process."""
    return (list_shard(source, columns) for source in sources)
