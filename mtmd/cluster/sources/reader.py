"""Pictures and videos out of files, tar files and tables, read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Lock

from mtmd.base.errors import ImageError
from mtmd.clip.video.signatures import HEAD_BYTES, is_container, video_format
from mtmd.cluster.locations import full_name, is_address, named_by, read_limited, read_range
from mtmd.cluster.locations import without_secrets as shown
from mtmd.cluster.manifest import Item
from mtmd.cluster.sources.find import Columns
from mtmd.cluster.sources.listing import check_shard
from mtmd.cluster.sources.tables import Rows
from mtmd.cluster.sources.tar import read_member
from mtmd.prompt.url_kinds import is_data_url, url_identity

PICTURE_MAX = 64 << 20  # bytes, as of a picture's file
VIDEO_MAX = 1 << 30  # of one that is held in memory, and of all that are at a time
Read = Callable[[Item], tuple[str, bytes]]


class Reader:
    """Items as bytes. Any thread may ask."""

    def __init__(self, columns: Columns):
        self._columns, self._rows, self._lock = columns, Rows(columns), Lock()
        self._room = _Room()

    @contextmanager
    def holding(self) -> Iterator[Read]:
        """Yield a function that returns the name of an item and its bytes, which stay in memory
        until the end. Raises MtmdError.
        """
        with self._room.part() as take:
            yield lambda item: self._read(item, take)

    def read(self, item: Item) -> tuple[str, bytes]:
        """Return the name of an item and its bytes, for a caller that has no others. Raises
        MtmdError.
        """
        with self.holding() as read:
            return read(item)

    def _read(self, item: Item, take: Callable[[int], None]) -> tuple[str, bytes]:
        if item.kind == "member":
            if item.size > PICTURE_MAX:
                head = read_range(item.source, item.position, HEAD_BYTES)
                _check_size(item.name, item.size, head)
                take(item.size)
            return item.name, read_member(item)
        if item.kind == "cell":
            return self._cell(item, take)
        if item.kind == "rest":
            raise ImageError(
                f"{shown(item.source)}: found damage at byte {item.position:,} when it was listed, "
                "expected a whole tar file; pictures behind that have no row: make it whole, and "
                "run the command again with --resume"
            )
        if item.kind == "shard":
            check_shard(item.source, self._columns)
            raise ImageError(
                f"{shown(item.source)}: could not be read when pictures were listed, and can now; "
                "run the command again with --resume"
            )
        return item.name, _file(item.source, item.name, take)

    def _cell(self, item: Item, take: Callable[[int], None]) -> tuple[str, bytes]:
        def ask(count: int) -> None:
            """Wait with a large row in memory, and keep others from reading theirs."""
            if count > PICTURE_MAX:
                take(count)

        with self._lock:
            row = self._rows.read(item.source, item.position, ask)
        value, name = row[self._columns.picture], item.name
        if isinstance(value, dict):  # as Hugging Face's datasets keep pictures
            path = value.get("path")
            name = path if isinstance(path, str) and path else name
            value = value.get("bytes") or path
        if isinstance(value, str) and value:
            name = url_identity(value) if is_data_url(value) else value
        if self._columns.name and row[self._columns.name] is not None:
            name = str(row[self._columns.name])
        name = shown(name)
        if isinstance(value, bytes):
            if len(value) > PICTURE_MAX:
                _check_size(name, len(value), value[:HEAD_BYTES])
            return name, value
        if isinstance(value, str) and value:
            return name, _file(named_by(item.source, value, self._columns.anywhere), name, take)
        raise ImageError(
            f"{item.id}: found {type(value).__name__} in the column {self._columns.picture!r}, "
            "expected the bytes of a picture, or where it is; choose another with --column"
        )


def _file(source: str, name: str, take: Callable[[int], None]) -> bytes:
    data = read_limited(source, PICTURE_MAX)
    if len(data) <= PICTURE_MAX:
        return data
    head = data[:HEAD_BYTES]
    _check_size(name, len(data), head)
    del data
    take(VIDEO_MAX)  # how long it is, not every store says
    data = read_limited(source, VIDEO_MAX)
    _check_size(name, len(data), head)
    return data


def _check_size(name: str, count: int, head: bytes) -> None:
    """`head`: the first bytes, which say whether it is a video: its name is anybody's."""
    maximum = VIDEO_MAX if is_container(video_format(head)) else PICTURE_MAX
    if count > maximum:
        raise ImageError(
            f"{name}: found more than {maximum:,} bytes, expected at most so many; scale the "
            "picture down, or cut the video"
        )


class _Room:
    """Memory for what is larger than a picture: at most `VIDEO_MAX` bytes of it at a time."""

    def __init__(self) -> None:
        self._taken, self._changed = 0, Condition()

    @contextmanager
    def part(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that waits until there is room for so many bytes, to be called once."""
        mine = 0

        def take(count: int) -> None:
            nonlocal mine
            with self._changed:
                self._changed.wait_for(lambda: self._taken + count <= max(VIDEO_MAX, count))
                self._taken += count
                mine = count

        try:
            yield take
        finally:
            with self._changed:
                self._taken -= mine
                self._changed.notify_all()


def path_of(item: Item) -> Path | None:
    """Return the path of an item that can be opened by one, else None."""
    source = item.source
    if item.kind != "file" or is_address(source) or is_data_url(source):
        return None
    return Path(full_name(source))
