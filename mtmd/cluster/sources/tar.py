"""Tar files: where their members lie. What their headers say is not believed."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from mtmd.base.errors import ImageError
from mtmd.base.text import printable
from mtmd.batch.inputs import SUFFIXES
from mtmd.cluster.locations import LOOKED_AT, identity, read_range, without_secrets
from mtmd.cluster.manifest import MAX_ITEMS, Item

HEADERS_MAX = 1 << 20  # bytes before a member: its name, as long as systems allow, and attributes
HEADER = tarfile.BLOCKSIZE
PADDING_MAX = 64 << 20  # of zeros at the end


class _Headers:
    """A file as `tarfile` reads it, which holds in memory whatever it takes for headers."""

    def __init__(self, file: Any):
        self._file, self._left = file, HEADERS_MAX

    def __getattr__(self, name: str) -> Any:  # `seek` and `tell`
        return getattr(self._file, name)

    def begin(self) -> None:
        """A member."""
        self._left = HEADERS_MAX

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self._left:
            raise tarfile.ReadError(
                f"a header of {count:,} bytes, expected at most {HEADERS_MAX:,} before a member"
            )
        self._left -= count
        return bytes(self._file.read(count))


def members(source: str, file: Any) -> Iterator[Item]:
    """Pictures and videos. Where the file is damaged, those before, and an item of kind "rest".
    Raises what `tarfile` does where nothing of it can be read.
    """
    headers, name = _Headers(file), identity(source)
    number, at = 0, 0
    opened: Any = tarfile.open  # typeshed does not have `members`
    try:
        with opened(fileobj=headers, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0 or tar.offset <= at or number >= MAX_ITEMS:
                    raise tarfile.ReadError(f"member {number:,} of {member.size:,} bytes")
                headers.begin()
                tar.members.clear()  # else all are kept
                at = tar.offset
                if member.isreg() and not member.issparse() and _is_requested(member.name):
                    location, reported = member.offset_data, printable(member.name)
                    yield Item(
                        f"{name}#{number}", reported, "member", source, location, member.size
                    )
                number += 1
        is_whole = _ends_at(file, at)
    except Exception:
        if not number:
            raise
        is_whole = False
    if not is_whole:
        yield Item(f"{name}#byte-{at}", without_secrets(source), "rest", source, at)


def read_member(item: Item) -> bytes:
    """Raises ImageError, also where another file stands now where it was."""
    whole = read_range(item.source, item.position - HEADER, HEADER + item.size)
    try:
        result = tarfile.TarInfo.frombuf(whole[:HEADER], "utf-8", "surrogateescape").size
    except tarfile.HeaderError:
        result = None
    if result != item.size:
        raise ImageError(
            f"{item.name}: found no header of {item.size:,} bytes before it in "
            f"{without_secrets(item.source)}, expected the file as it was when it was listed; it "
            "has been written anew since"
        )
    return whole[HEADER:]


def _is_requested(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _ends_at(file: Any, location: int) -> bool:
    """Return whether a tar file ends there, by POSIX with zeros: `tarfile` takes what it cannot
    read for the end, and the end of a file that was cut.
    """
    file.seek(0, 2)
    left = file.tell() - location
    file.seek(location)
    if not 0 < left <= PADDING_MAX:
        return False
    while left > 0 and (data := file.read(LOOKED_AT)):
        if data.strip(b"\0"):
            return False
        left -= len(data)
    return True
