"""The manifest of an output folder: every picture numbered once, in units that become one file of
rows each. What is added later has later numbers, and nothing changes its number.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line
from mtmd.cluster.out.folder import Folder

MAX_ITEMS = 20_000_000
MAX_UNIT = 256  # rows that are answered again when a machine goes away
UNITS_PER_ACTOR = 16  # at least, where there are so many pictures: all actors end together then
NAME = "_plan-"
GROUP = 65_536
STAMPS = b"mtmd.stamps"  # in the schema: of files whose items are all in the table


@dataclass(frozen=True, slots=True)
class Item:
    """A picture or a video. `id` is unique: a path or an address, and the position inside. `name`
    is shown. `kind` is how it is read: a "file" whole; a "member" of a tar file, `size` bytes from
    `position` on; a "cell" of a Parquet file, in row `position`; a "shard" is such a file that
    could not be listed; a "rest" is what could not be listed of a tar file, from byte `position`.
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
    """Return how many of `count` pictures go into a unit: each actor gets several units, and each
    unit fills the slots of its batch.
    """
    return max(min(count // max(actors * UNITS_PER_ACTOR, 1), MAX_UNIT), slots, 1)


class Manifest:
    """The units of a folder. Raises OSError, and OptionError for damaged files."""

    def __init__(self, folder: Folder, names: Iterable[str]):
        self.folder, self.count = folder, 0
        self.stamps: dict[str, str] = {}
        """Of tar files and tables, as they were when their items were numbered."""
        self.written: list[str] = []
        """Names of the files that this object has written."""
        self._units: list[Any] = []
        """By unit, a table of its items."""
        for name in sorted(n for n in names if n.startswith(NAME) and n.endswith(".parquet")):
            self._load(name)

    @property
    def units(self) -> int:
        return len(self._units)

    def unit(self, number: int) -> Unit:
        return Unit(number, tuple(Item(**row) for row in self._units[number].to_pylist()))

    def size(self, number: int) -> int:
        return int(self._units[number].num_rows)

    def ids(self) -> set[str]:
        return {id_ for unit in self._units for id_ in unit.column("id").to_pylist()}

    def add(self, items: Iterable[Item], size: int, stamps: Mapping[str, str]) -> None:
        """Number what is new, in order. `stamps` are of the tar files and tables that it is from.
        Raises OSError, and OptionError for too many.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema, batches, numbered = _schema(pa), list[Any](), enumerate(items)
        while rows := [
            {"unit": self.units + at // size} | asdict(item) for at, item in islice(numbered, GROUP)
        ]:
            batches.append(pa.RecordBatch.from_pylist(rows, schema))
            check_count(self.count + sum(batch.num_rows for batch in batches))
        if not batches:
            return
        noted = schema.with_metadata({STAMPS: json.dumps(dict(stamps)).encode()})
        file, name = io.BytesIO(), f"{NAME}{self.units:06}.parquet"
        table = pa.Table.from_batches(batches).cast(noted)
        pq.write_table(table, file, write_page_checksum=True)
        if not self.folder.write(name, file.getvalue()):
            raise OptionError(
                f"out {self.folder.name}: found {name} there, expected no other "
                "command running; wait until it ends, then use --resume"
            )
        self.written.append(name)
        self._load(name)

    def _load(self, name: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = self.folder.read(name)
        try:
            table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
            stamps = json.loads((table.schema.metadata or {}).get(STAMPS, b"{}"))
            if table.schema.remove_metadata() != _schema(pa):
                raise ValueError("other columns")
            self._units += _split(table, self.units)
            self.stamps.update(stamps)
        except Exception as error:  # pyarrow has many, for what is damaged
            raise OptionError(
                f"out {self.folder.name}: found unexpected content in {name} "
                f"({one_line(error, 200)}), expected the list of units; restore "
                "the file, or name another folder"
            ) from error
        self.count += table.num_rows


def _split(table: Any, first: int) -> Iterator[Any]:
    """Yield the table of each unit. Raises ValueError for other numbers than `first` and up."""
    counts = dict.fromkeys(table.column("unit").unique().to_pylist(), 0)
    numbers, items, start = table.column("unit").to_pylist(), table.drop_columns("unit"), 0
    for number in numbers:
        counts[number] += 1
    if numbers != sorted(numbers) or list(counts) != list(range(first, first + len(counts))):
        raise ValueError("other numbers than those that are next")
    for count in counts.values():
        yield items.slice(start, count)
        start += count


def check_count(count: int) -> None:
    """Raises OptionError for too many pictures."""
    if count > MAX_ITEMS:
        raise OptionError(
            f"found more than {MAX_ITEMS:,} pictures, expected at most so many in one --out; "
            "share them out among several"
        )


def _schema(pa: Any) -> Any:
    numbers = ("position", "size")
    kinds = [(f.name, pa.int64() if f.name in numbers else pa.string()) for f in fields(Item)]
    return pa.schema([("unit", pa.int32()), *kinds])
