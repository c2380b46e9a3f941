"""Pictures to be answered: files, tar files and Parquet files, wherever these lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mtmd.base.errors import OptionError
from mtmd.base.text import printable
from mtmd.batch.inputs import SUFFIXES, find_inputs
from mtmd.cluster.locations import as_text, expand, full_name, identity, is_address, path_in
from mtmd.cluster.locations import without_secrets as shown
from mtmd.cluster.manifest import Item

TAR, TABLE = ".tar", ".parquet"
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class Columns:
    """Columns of Parquet files: of the pictures, and of their names, "" for none. `anywhere`: files
    and addresses that they name may be any.
    """

    picture: str = "image"
    name: str = ""
    anywhere: bool = False


@dataclass(frozen=True)
class SourceItems:
    """`files` are items already. Of `shards`, tar and Parquet files, each has many."""

    files: tuple[Item, ...]
    shards: tuple[str, ...]
    skipped: Counter[str]


def find(words: Iterable[str], lists: Sequence[str], leave_out: str) -> SourceItems:
    """Return what `words` and `lists` name, each once, in the order named, but for what lies in the
    folder `leave_out`. Raises OptionError where one of them has nothing.
    """
    skipped: Counter[str] = Counter()
    requested = (*SUFFIXES, TAR, TABLE)
    named: dict[str, str] = {}  # what people call it, by the full name

    def take(path: str, word: str) -> None:
        if not path.startswith(f"{leave_out.rstrip('/')}/"):
            named.setdefault(path, word)

    for word in words:
        if is_address(word):
            for path in expand(word, requested):
                take(path, path)
            continue
        local = full_name(word) if word.startswith("file://") else word
        here = find_inputs([local], (), requested, audio=True)
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
    packed = next((name for name in named if path_in(name).lower().endswith(PACKED)), None)
    if packed is not None:
        raise OptionError(
            f"{printable(shown(packed))}: found a compressed tar file, expected .tar, whose "
            "pictures can be read one by one; unpack it once, as with gunzip"
        )
    is_shard = {path: path_in(path).lower().endswith((TAR, TABLE)) for path in named}
    files = [(as_text(path), word) for path, word in named.items() if not is_shard[path]]
    return SourceItems(
        tuple(Item(identity(path), shown(word), "file", path) for path, word in files),
        tuple(as_text(path) for path in named if is_shard[path]),
        skipped,
    )
