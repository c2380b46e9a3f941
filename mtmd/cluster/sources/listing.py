"""Lists of the pictures inside tar and Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mtmd.base.errors import ImageError, MtmdError, OptionError
from mtmd.base.extras import install_command
from mtmd.cluster.locations import identity, open_seekable, path_in, reason_text, stamp_of
from mtmd.cluster.locations import without_secrets as shown
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources.find import TAR, Columns
from mtmd.cluster.sources.tables import count_rows
from mtmd.cluster.sources.tar import members

WHOLE = ("member", "cell")  # kinds of items of a file that could be listed to its end


@dataclass(frozen=True)
class Listed:
    """The items of a tar file, or how many `rows` a table has. `stamp` changes when the file does,
    "" for one that is to be listed again.
    """

    source: str
    items: tuple[Item, ...] = ()
    rows: int = 0
    stamp: str = ""

    def __len__(self) -> int:
        return len(self.items) + self.rows

    def __iter__(self) -> Iterator[Item]:
        yield from self.items
        id_, name = identity(self.source), shown(self.source)
        for row in range(self.rows):
            yield Item(f"{id_}#{row}", f"{name}#{row}", "cell", self.source, row)


Shard = tuple[str, str]  # a tar file or table, and its stamp when it was listed, "" for never
Listing = Callable[[Sequence[Shard], Columns], Iterator[Listed]]


def list_shard(shard: Shard, columns: Columns) -> Listed:
    """The pictures in a tar or Parquet file, none where it has not changed; one item, of kind
    "shard", where they cannot be known. Raises OptionError where a table has not the columns.
    """
    source, before = shard
    try:
        return _listed(source, columns, before)
    except ImageError:
        return Listed(source, (Item(identity(source), shown(source), "shard", source),))


def check_shard(source: str, columns: Columns) -> None:
    """Raises ImageError where nothing of it can be listed."""
    _listed(source, columns, "")


def _listed(source: str, columns: Columns, before: str) -> Listed:
    kind = "tar" if path_in(source).lower().endswith(TAR) else "Parquet"
    try:
        stamp = stamp_of(source)
        if stamp and stamp == before:
            return Listed(source, stamp=stamp)
        with open_seekable(source) as file:
            if kind == "Parquet":
                return Listed(source, rows=count_rows(source, file, columns), stamp=stamp)
            items = tuple(members(source, file))
        is_whole = all(item.kind in WHOLE for item in items)
        return Listed(source, items, stamp=stamp if is_whole else "")
    except MtmdError:
        raise
    except ImportError as error:  # no other table would fare better
        raise OptionError(
            f"{shown(source)}: tables need pyarrow ({reason_text(error)}); run "
            f"`{install_command('ray')}` on every machine"
        ) from error
    except Exception as error:  # each file system has its own
        raise ImageError(
            f"{shown(source)}: cannot be read ({reason_text(error, source)}), expected a {kind} "
            "file with pictures"
        ) from error


def list_shards(shards: Sequence[Shard], columns: Columns) -> Iterator[Listed]:
    """One after another, in this process."""
    return (list_shard(shard, columns) for shard in shards)
