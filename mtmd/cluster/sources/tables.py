"""Parquet files: how many rows there are, and one after another. What they say of their size is not
believed: a column of a few bytes may be gigabytes once it is decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any
from weakref import finalize

from mtmd.base.errors import ImageError, MtmdError, OptionError
from mtmd.cluster.locations import LOOKED_AT, open_seekable, reason_text, without_secrets
from mtmd.cluster.manifest import MAX_ITEMS
from mtmd.cluster.sources.find import Columns

GROUP_MAX = 4 << 30  # bytes of a row group that are decoded to get at one of its rows
CURSORS = 4  # places at which tables are read: an actor has two units
SAVED_MAX = 64 << 20  # bytes of rows at each that were passed over
Ask = Callable[[int], None]
"""Called with how many bytes a picture in a row has, before they are handed over: it may wait."""


def count_rows(source: str, file: Any, columns: Columns) -> int:
    """Raises OptionError where the table has not the columns, ImageError for one that contradicts
    itself or is too long.
    """
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    result, facts = table.schema_arrow.names, table.metadata
    for option, column in (("column", columns.picture), ("name-column", columns.name)):
        if column and column not in result:
            raise OptionError(
                f"{without_secrets(source)}: found the columns {', '.join(result)[:200]}, expected "
                f"{column!r}; name one with --{option}"
            )
    count = int(facts.num_rows)
    inside = sum(facts.row_group(i).num_rows for i in range(facts.num_row_groups))
    if count != inside or not 0 <= count <= MAX_ITEMS:
        raise ImageError(
            f"{without_secrets(source)}: found {count:,} rows, {inside:,} in its row groups, "
            f"expected the same number, at most {MAX_ITEMS:,}"
        )
    return count


class Rows:
    """Rows of tables, of which few are in memory. For one thread at a time."""

    def __init__(self, columns: Columns):
        self._names = [*dict.fromkeys(n for n in (columns.picture, columns.name) if n)]
        self._starts: OrderedDict[str, list[int]] = OrderedDict()
        self._cursors: OrderedDict[_Cursor, None] = OrderedDict()

    def read(self, source: str, number: int, ask: Ask = lambda _: None) -> dict[str, Any]:
        """Raises ImageError."""
        try:
            starts = self._starts_of(source)
            if number >= starts[-1]:
                raise ImageError(
                    f"{without_secrets(source)}: found {starts[-1]:,} rows, expected row "
                    f"{number:,}; it has been written anew since it was listed"
                )
            group = bisect_right(starts, number) - 1
            return self._take(source, group, number - starts[group], ask)
        except MtmdError:
            raise
        except ImportError as error:
            raise OptionError(f"tables need pyarrow ({reason_text(error)})") from error
        except Exception as error:  # each file system has its own
            raise ImageError(
                f"{without_secrets(source)}: cannot be read ({reason_text(error, source)}), "
                "expected a Parquet file with pictures"
            ) from error

    def _starts_of(self, source: str) -> list[int]:
        import pyarrow.parquet as pq

        if source not in self._starts:
            with open_seekable(source) as file:
                facts = pq.ParquetFile(file).metadata
                counts = [facts.row_group(i).num_rows for i in range(facts.num_row_groups)]
            self._starts[source] = [0, *accumulate(counts)]
            while len(self._starts) > 1024:
                self._starts.popitem(last=False)
        return self._starts[source]

    def _take(self, source: str, group: int, at: int, ask: Ask) -> dict[str, Any]:
        here = [c for c in self._cursors if (c.source, c.group) == (source, group)]
        cursor = next((c for c in here if at in c.saved), None)
        if cursor is None:
            before = [c for c in here if c.next <= at]
            cursor = max(before, key=lambda c: c.next, default=None)
        if cursor is None:
            while len(self._cursors) >= CURSORS:
                self._cursors.popitem(last=False)[0].close()
            cursor = _Cursor(source, group, self._names)
            self._cursors[cursor] = None
        self._cursors.move_to_end(cursor)
        try:
            return cursor.take(at, ask)
        except ImageError:
            raise
        except BaseException:
            del self._cursors[cursor]
            cursor.close()
            raise


class _Cursor:
    """Rows of a row group, decoded one by one up to that which is asked for. `saved` are those that
    were passed over, for threads ask in no strict order.
    """

    def __init__(self, source: str, group: int, names: list[str]):
        import pyarrow.parquet as pq

        self.source, self.group, self.next = source, group, 0
        self.saved: OrderedDict[int, Any] = OrderedDict()
        self._picture, self._bytes, self._saved_bytes = names[0], 0, 0
        file = open_seekable(source)
        self._finalizer = finalize(self, file.close)
        table = pq.ParquetFile(file, buffer_size=LOOKED_AT, pre_buffer=False)
        self._count = table.metadata.row_group(group).num_rows
        self._rows = table.iter_batches(1, [group], names, use_threads=False)

    def take(self, at: int, ask: Ask) -> dict[str, Any]:
        while self.next <= at:
            if self._bytes > GROUP_MAX:
                raise ImageError(
                    f"{without_secrets(self.source)}: found more than {GROUP_MAX:,} bytes before "
                    "this row in its row group, expected at most so many; write the table with "
                    "smaller ones"
                )
            row = next(self._rows)
            self._bytes += row.nbytes
            self.saved[self.next] = row
            self._saved_bytes += row.nbytes
            self.next += 1
            while self._saved_bytes > SAVED_MAX and len(self.saved) > 1:
                self._saved_bytes -= self.saved.popitem(last=False)[1].nbytes
        if self.next == self._count:
            self.close()
        row = self.saved.pop(at)
        self._saved_bytes -= row.nbytes
        ask(_picture_bytes(row.column(self._picture)[0]))
        result: dict[str, Any] = row.to_pylist()[0]
        return result

    def close(self) -> None:
        with suppress(Exception):  # each file system has its own
            self._finalizer()


def _picture_bytes(cell: Any) -> int:
    """Return the bytes of a picture that is in the table itself, 0 for others."""
    import pyarrow as pa

    if isinstance(cell, pa.StructScalar):
        cell = dict(cell).get("bytes") if cell.is_valid else None
    if isinstance(cell, pa.DictionaryScalar):
        cell = cell.value
    is_binary = isinstance(cell, pa.BinaryScalar) and not isinstance(cell, pa.StringScalar)
    return cell.as_buffer().size if is_binary and cell.is_valid else 0
