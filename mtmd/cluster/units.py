"""What there is to be answered, numbered once: pictures with an id each, cut into units, of which
each becomes a file of rows. The numbers stay, whoever asks again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line
from mtmd.cluster.out.folder import Folder

ITEMS_MOST = 20_000_000
UNIT_MOST = 256  # rows that are lost, to be done again, when a machine goes away
UNITS_EACH = 16  # of one actor, where there are so many pictures: so that all end together
PLAN = "_plan-"
GROUP = 65_536
STAMPS = b"mtmd.stamps"  # in a plan's schema: of files whose items are all in it


@dataclass(frozen=True, slots=True)
class Item:
    """A picture or a video. `id` is its own among all: path or address, and where in that it is.
    `name` is what people call it. `kind` says how it is read: a "file" whole; a "member" of a tar
    file, `size` bytes from `position` on; a "cell" of a Parquet file, in row `position`. A "shard"
    is such a file that could not be listed, which is all that can be said of its pictures; a "rest"
    is what could not, of a tar file from byte `position` on.
    """

    id: str
    name: str
    kind: str
    source: str
    position: int = 0
    size: int = 0


@dataclass(frozen=True)
class Unit:
    """Rows that become one file."""

    number: int
    items: tuple[Item, ...]


def unit_size(count: int, actors: int, slots: int) -> int:
    """How many pictures of `count` go into a unit: each of the actors gets several, each of which
    fills the places of its batch.
    """
    return max(min(count // max(actors * UNITS_EACH, 1), UNIT_MOST), slots, 1)


class Plan:
    """The units of a folder. What is added later has later numbers."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self._tables: list[Any] = []
        self._starts: list[tuple[int, int]] = []
        """By unit: the table, and the first row there."""
        self.count = 0
        self.stamps: dict[str, str] = {}
        """Of tar files and tables, as they were when their items were numbered."""
        self.written: list[str] = []
        """Names of the files that this one has added."""
        self._names: list[str] = []
        self._digests: list[bytes] = []
        self._stamps: list[str] = []
        names = sorted(n for n in folder.names() if n.startswith(PLAN) and n.endswith(".parquet"))
        for name in names:
            self._take(name)

    @property
    def units(self) -> int:
        return len(self._starts)

    def unit(self, number: int) -> Unit:
        table, start = self._starts[number]
        columns = self._tables[table].slice(start, self.size(number)).drop_columns("unit")
        return Unit(number, tuple(Item(**row) for row in columns.to_pylist()))

    def size(self, number: int) -> int:
        table, start = self._starts[number]
        last = number + 1 == self.units or self._starts[number + 1][0] != table
        end = self._tables[table].num_rows if last else self._starts[number + 1][1]
        return int(end - start)

    def ids(self) -> set[str]:
        return {id_ for table in self._tables for id_ in table.column("id").to_pylist()}

    def add(self, items: Iterable[Item], size: int, stamps: Mapping[str, str]) -> bool:
        """Number what is new, in order, and keep it. `stamps` are of the tar files and tables that
        it is from. Whether that is done: not where another command has numbered something in the
        meantime, which is taken in. Raises OSError, and OptionError for too many.
        """
        import pyarrow as pa

        first, batches, rows = self.units, list[Any](), list[dict[str, Any]]()
        number = -1
        for number, item in enumerate(items):
            check_count(self.count + number + 1)
            rows.append({"unit": first + number // size} | asdict(item))
            if len(rows) == GROUP:
                batches.append(pa.RecordBatch.from_pylist(rows, _schema(pa)))
                rows.clear()
        if number < 0:
            return True
        batches.append(pa.RecordBatch.from_pylist(rows, _schema(pa)))
        noted = {STAMPS: json.dumps(dict(stamps)).encode()}
        table = pa.Table.from_batches(batches).replace_schema_metadata(noted)
        name = f"{PLAN}{first:06}.parquet"
        is_ours = self.folder.write(name, _bytes_of(table))
        self._take(name)  # what stands there counts
        if is_ours:
            self.written.append(name)
        return is_ours

    def keep(self, names: set[str]) -> None:
        """Write again what is not among `names`, those of the folder. Raises OSError, and
        OptionError where it has other numbers there than this one: files of rows would mix them.
        """
        all_ = zip(self._names, self._tables, self._digests, strict=True)
        for at, (name, table, digest) in enumerate(all_):
            if name not in names:
                self.folder.write(name, _bytes_of(table))
            stamp = self.folder.stamp(name)
            if stamp and stamp == self._stamps[at]:  # some GB of a large job are not read again
                continue
            data = self.folder.read(name)
            if sha256(data).digest() != digest and not self._has(data, table):
                raise OptionError(
                    f"out {self.folder.name}: found in {name} other pictures than this command has "
                    "numbered, expected the same: another command began anew there meanwhile; "
                    "--resume goes on with its numbers"
                )
            self._stamps[at] = stamp

    def _has(self, data: bytes, table: Any) -> bool:
        """The same, written at another time."""
        try:
            return bool(_parquet_of(data).equals(table))
        except Exception:  # pyarrow has many, for what is damaged
            return False

    def _take(self, name: str) -> None:
        import pyarrow as pa

        stamp = self.folder.stamp(name)  # before it is read: older, if anything
        data, at, last = self.folder.read(name), len(self._tables), self.units - 1
        try:
            table = _parquet_of(data)
            stamps = json.loads((table.schema.metadata or {}).get(STAMPS, b"{}"))
            if table.schema.remove_metadata() != _schema(pa):
                raise ValueError("other columns")
            starts = []
            for row, number in enumerate(table.column("unit").to_pylist()):
                if number == last + 1:
                    starts.append((at, row))
                    last = number
                elif number != last or not starts:
                    raise ValueError("other numbers than those that are next")
            self.stamps.update(stamps)
        except Exception as error:  # pyarrow has many, for what is damaged
            raise OptionError(
                f"out {self.folder.name}: found in {name} what was not written there "
                f"({one_line(error, 200)}), expected what units there are; bring it back as it "
                "was, or name another folder"
            ) from error
        self._tables.append(table)
        self._names.append(name)
        self._digests.append(sha256(data).digest())
        self._stamps.append(stamp)
        self._starts += starts
        self.count += table.num_rows


def check_count(count: int) -> None:
    """Raises OptionError for too many pictures."""
    if count > ITEMS_MOST:
        raise OptionError(
            f"found more than {ITEMS_MOST:,} pictures, expected at most so many in one --out; "
            "share them out among several"
        )


def _schema(pa: Any) -> Any:
    numbers = ("position", "size")
    kinds = [(f.name, pa.int64() if f.name in numbers else pa.string()) for f in fields(Item)]
    return pa.schema([("unit", pa.int32()), *kinds])


def _parquet_of(data: bytes) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(io.BytesIO(data), page_checksum_verification=True)


def _bytes_of(table: Any) -> bytes:
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(table, file, write_page_checksum=True)
    return file.getvalue()


def part_name(number: int, ending: str) -> str:
    return f"part-{number:06}{ending}"


def done_in(names: Iterable[str], ending: str) -> Iterator[int]:
    """The units whose rows are there."""
    for name in names:
        digits = name.removeprefix("part-").removesuffix(ending)
        if digits.isdecimal() and name == part_name(int(digits), ending):
            yield int(digits)
