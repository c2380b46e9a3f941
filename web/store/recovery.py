"""A database that is damaged, or gone: what can be read of it goes into a new one, the old file is
set aside, and the pictures stay.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mtmd import ImageError
from mtmd.base.text import plural
from mtmd.prompt.load_image import picture_size
from mtmd.web.store.conversation import COMPLETE, FAILED, RUNNING, STOPPED
from mtmd.web.store.database import (
    Database,
    has_no_content,
    log_of,
    open_readonly,
    shared_memory_of,
)
from mtmd.web.store.errors import StoreDamagedError, store_errors
from mtmd.web.store.folder import private_file, sync_folder
from mtmd.web.store.image_files import WHOLE, ImageFiles, media_type
from mtmd.web.store.tables import migrate

DATABASE = "conversations.db"
NEW = "conversations.new.db"  # whole, and to become the database
UNREADABLE = "(this message could not be recovered)"
NOBODY_KNOWN = "anybody"  # as `auth.ANYBODY`: seen where there is one person at most
# the second of texts, also of SQLite's own messages, that are no UTF-8 any more
UNREADABLE_ROWS = (sqlite3.DatabaseError, UnicodeDecodeError)
MENDED = "conversations.mended.db"  # for as long as it is read
PAGE_BYTES, HEADER_BYTES = 4096, 100  # of the first page (SQLite's file format, 1.3)
NOTICE_SECONDS = 30 * 86400.0
_LAST_ROW = 1 << 62
log = logging.getLogger("mtmd.web")


@dataclass(frozen=True)
class Notice:
    """Describes what the page says until it is put away; `id` is when it happened, in seconds since
    1970, and tells one from another.
    """

    id: str
    text: str

    def asdict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Recovered:
    """Describes what a new database has of an old one. `set_aside`: the name of the folder, inside
    the data folder, that has the old one.
    """

    conversations: int
    messages: int
    unreadable: int
    pictures_missing: int
    set_aside: str

    def __str__(self) -> str:
        lost = []
        if self.unreadable:
            lost.append(f"{plural(self.unreadable, 'message')} could not be read")
        if self.pictures_missing:
            lost.append(f"{plural(self.pictures_missing, 'picture')} could not be found")
        return (
            f"the database was damaged: {plural(self.conversations, 'conversation')} with "
            f"{plural(self.messages, 'message')} were recovered"
            f"{''.join(f', {words}' for words in lost)}. The damaged file is kept in the folder "
            f"{self.set_aside}, and every picture is kept"
        )


def open_or_recover(folder: Path, files: ImageFiles, *, alone: bool) -> Database:
    """The database of a data folder. `alone`: nobody else has the folder open, so that a damaged
    one may be replaced; else it is a StoreDamagedError.
    """
    path = folder / DATABASE
    if alone:
        finish_replacing(folder)
        if has_no_content(path) and not has_no_content(log_of(path)):
            # SQLite would delete the log, which may be all there is
            moved = displaced_folder(folder, "damaged")
            set_aside(folder, moved)
            _drop(folder)
            return _made_anew(folder, files, f"The database was empty; it is kept in {moved}")
    if has_no_content(path):
        return _made_anew(folder, files, "There was no database, or an empty one")
    try:
        return Database(path)
    except StoreDamagedError:
        if not alone:
            raise
    log.error("the database of conversations is damaged; recovering what can be read")
    log.error("%s", recover(folder, files))
    return Database(path)


def _made_anew(folder: Path, files: ImageFiles, why: str) -> Database:
    database = Database(folder / DATABASE)
    pictures = sum(1 for _ in files.names())
    if pictures:
        text = (
            f"{why}, but there are {plural(pictures, 'picture')}. They are kept, and a new "
            "database was made. To bring conversations back, stop the server and use `mtmd history "
            "restore`"
        )
        log.warning("conversations: %s", text)
        with database.change() as db:
            write_notice(db, text)
    return database


def read_notice(database: Database) -> Notice | None:
    """None also for one that has been said for long enough."""
    rows = database.rows("SELECT value FROM facts WHERE name = 'notice'")
    notice = Notice(**json.loads(rows[0]["value"])) if rows else None
    return notice if notice and time.time() - float(notice.id) < NOTICE_SECONDS else None


def write_notice(db: sqlite3.Connection, text: str) -> None:
    day = time.strftime("%Y-%m-%d %H:%M")
    value = json.dumps({"id": str(int(time.time())), "text": f"{day}: {text}."})
    db.execute("INSERT OR REPLACE INTO facts VALUES ('notice', ?)", (value,))


# replacing the database: whatever is interrupted, the old or the new one is there, and the old one
# in its folder


def new_database(folder: Path) -> Path:
    """An empty file to make one in; `replace_database` takes it."""
    path = folder / f"{NEW}.part"
    for old in (path, path.with_name(f"{path.name}-journal")):
        old.unlink(missing_ok=True)
    private_file(path).close()
    return path


def replace_database(folder: Path, made: Path, moved: str | None) -> None:
    """`made` becomes the database; the folder `moved` gets the old one, None where there is
    none.
    """
    with private_file(made) as file:
        os.fsync(file.fileno())
    if moved is not None:
        set_aside(folder, moved)
    made.replace(folder / NEW)
    sync_folder(folder)
    finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    """The old log goes first: SQLite would apply it to whatever has the database's name."""
    if (folder / NEW).exists():
        _drop(folder)
        (folder / NEW).replace(folder / DATABASE)
        sync_folder(folder)


def displaced_folder(folder: Path, why: str) -> str:
    """The name of a new folder inside the data folder; `why`: how it begins."""
    stamp = time.strftime("%Y-%m-%dT%H%M%S")
    for number in count():
        name = f"{why}-{stamp}{f'-{number}' if number else ''}"
        with suppress(FileExistsError):
            (folder / name).mkdir(mode=0o700)
            return name
    raise AssertionError("count() has no end")


def set_aside(folder: Path, name: str) -> None:
    """The database and its log are in the folder `name` as well afterwards."""
    path = folder / DATABASE
    for source in (path, log_of(path)):
        if source.exists():
            link_or_copy(source, folder / name / source.name)
    sync_folder(folder / name)
    sync_folder(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Link on one disk, as a second name for the same bytes; else a copy, on the disk when this
    returns.
    """
    try:
        target.hardlink_to(source)
    except OSError:
        with (
            source.open("rb") as old,
            private_file(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as new,
        ):
            while piece := old.read(1 << 20):
                new.write(piece)
            new.flush()
            os.fsync(new.fileno())


def _drop(folder: Path) -> None:
    """Drop what of the database has another name by now."""
    path = folder / DATABASE
    for old in (log_of(path), shared_memory_of(path), path):
        old.unlink(missing_ok=True)
    sync_folder(folder)


# reading what can be read


def recover(folder: Path, files: ImageFiles) -> Recovered:
    """A new database in place of the one that is there, with every row of it that can be read. The
    caller has the folder to itself. Raises StoreError.
    """
    with store_errors("recovered"):
        moved = displaced_folder(folder, "damaged")
        try:
            made = new_database(folder)
            with closing(sqlite3.connect(made, isolation_level=None)) as new:
                new.row_factory = sqlite3.Row
                new.execute("PRAGMA foreign_keys = OFF")  # until it is mended
                new.execute("PRAGMA synchronous = OFF")  # synced once, before it is used
                migrate(new)
                new.execute("BEGIN")
                if not _copy_tables(folder / DATABASE, new):
                    for size in (HEADER_BYTES, PAGE_BYTES):
                        if _copy_tables(_beginning_as(made, folder, size), new):
                            break
                recovered = _mend(new, files, moved)
                write_notice(new, f"{str(recovered)[0].upper()}{str(recovered)[1:]}")
                new.execute("COMMIT")
        except BaseException:
            with suppress(OSError):
                (folder / moved).rmdir()
            raise
        finally:
            copy = folder / MENDED
            for path in (copy, log_of(copy), shared_memory_of(copy)):
                path.unlink(missing_ok=True)
        replace_database(folder, made, moved)
        return recovered


def _copy_tables(path: Path, new: sqlite3.Connection) -> bool:
    """False where not even the names of the tables can be read."""
    try:
        with closing(open_readonly(path)) as old:
            old.text_factory = lambda data: data.decode("utf-8", "replace")
            if not old.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone():
                return False
            for table in _LEFT_OUT:
                _copy_rows(old, new, table)
            return True
    except UNREADABLE_ROWS:
        return False


def _beginning_as(made: Path, folder: Path, size: int) -> Path:
    """A copy of the database whose first `size` bytes are those of a new one: its header, or its
    first page, which has the names of its tables. Tables made by the same steps lie in the same
    places; rows read from another place are not of the right types.
    """
    path, copy = folder / DATABASE, folder / MENDED
    for source, target in ((path, copy), (log_of(path), log_of(copy))):
        target.unlink(missing_ok=True)
        if source.exists():
            with source.open("rb") as old, private_file(target) as new:
                shutil.copyfileobj(old, new)
    with made.open("rb") as file:
        first = bytearray(file.read(PAGE_BYTES))
    if log_of(path).exists():
        first[18:20] = b"\2\2"  # a log is read
    first[92:96] = b"\0\0\0\0"  # the number of pages is that of the file, whatever is written
    with private_file(copy) as file:
        file.write(first[:size])
    return copy


# of a row that only an index tells of, what it does not tell
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "conversations": {"owner": "", "title": "", "created": 0.0, "changed": 0.0},
    "messages": {"role": "", "text": UNREADABLE, "state": FAILED, "created": 0.0},
    "images": {"kind": "", "bytes": 0, "width": 0, "height": 0},
    "attachments": {"name": ""},
}
_TYPES: dict[str, tuple[type, ...]] = {"TEXT": (str,), "INTEGER": (int,), "REAL": (int, float)}


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    types = _columns(new, table)
    with suppress(*UNREADABLE_ROWS):
        columns = [name for name in _columns(old, table) if name in types]
        whole = set()
        for number, values in _readable(old, table, columns):
            if _insert(new, table, types, values):
                whole.add(number)
        for number, values in _from_indexes(old, table).items():
            if number not in whole:
                known = {name: value for name, value in values.items() if name in types}
                if table == "messages":
                    known["place"] = number
                _insert(new, table, types, _LEFT_OUT[table] | known)


def _columns(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Name: declared type."""
    return {row["name"]: row["type"] for row in db.execute(f"PRAGMA table_info({table})")}


def _insert(
    db: sqlite3.Connection, table: str, types: Mapping[str, str], values: Mapping[str, Any]
) -> bool:
    """False for a row that is no row of ours, as a page of something else would give."""
    for name, value in values.items():
        if value is not None and not isinstance(value, _TYPES.get(types[name], (object,))):
            return False
    marks = ", ".join("?" * len(values))
    with store_errors("recovered"):  # what cannot be written is not passed over
        done = db.execute(
            f"INSERT OR IGNORE INTO {table} ({', '.join(values)}) VALUES ({marks})",
            tuple(values.values()),
        )
    return done.rowcount == 1


def _readable(
    db: sqlite3.Connection, table: str, columns: list[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of each row that can be read, in order of their numbers."""
    select = (
        f"SELECT rowid AS _number, {', '.join(columns)} FROM {table} "
        "WHERE rowid >= ? ORDER BY rowid"
    )
    start: int | None = -_LAST_ROW
    while start is not None:
        try:
            for number, *values in db.execute(select, (start,)):
                start = number + 1
                yield number, dict(zip(columns, values, strict=True))
            return
        except UNREADABLE_ROWS:
            start = _next_readable(db, select, start)


def _next_readable(db: sqlite3.Connection, select: str, start: int) -> int | None:
    """Return from where on it can be read again: looked for number by number as far as one damaged
    page may reach, and in growing steps behind that.
    """
    at, step = max(start, -1), 1
    for tried in count():
        at += step
        if at > _LAST_ROW:
            return None
        with suppress(*UNREADABLE_ROWS):
            db.execute(f"{select} LIMIT 1", (at,)).fetchone()
            return at
        if tried >= 5000:
            step *= 2
    return None


def _from_indexes(db: sqlite3.Connection, table: str) -> dict[int, dict[str, Any]]:
    """Return what the indexes tell of the rows of a table, by number: they lie in pages of their
    own. Each is read from its beginning and, where that breaks off, from its end.
    """
    known: dict[int, dict[str, Any]] = {}
    for index in db.execute(f"PRAGMA index_list({table})").fetchall():
        with suppress(*UNREADABLE_ROWS):
            name = index["name"]
            columns = [row["name"] for row in db.execute(f'PRAGMA index_info("{name}")')]
            for order in ("ASC", "DESC"):
                with suppress(*UNREADABLE_ROWS):
                    by = ", ".join(f"{column} {order}" for column in columns)
                    for number, *values in db.execute(
                        f"SELECT rowid AS _number, {', '.join(columns)} FROM {table} "
                        f'INDEXED BY "{name}" ORDER BY {by}'
                    ):
                        known.setdefault(number, {}).update(zip(columns, values, strict=True))
                    break
    return known


def _mend(db: sqlite3.Connection, files: ImageFiles, moved: str) -> Recovered:
    """Return what refers to something that is lost refers to a stand-in, or to nothing."""
    owners = [
        row[0] for row in db.execute("SELECT DISTINCT owner FROM conversations WHERE owner <> ''")
    ]
    owner = owners[0] if len(owners) == 1 else NOBODY_KNOWN
    db.execute("UPDATE conversations SET owner = ? WHERE owner = ''", (owner,))
    db.execute(
        "INSERT INTO conversations (id, owner, title, created, changed) SELECT DISTINCT "
        "conversation, ?, 'Recovered', 0, 0 FROM messages WHERE conversation NOT IN "
        "(SELECT id FROM conversations)",
        (owner,),
    )
    _mend_trees(db)
    db.execute(
        "UPDATE conversations SET head = (SELECT id FROM messages m WHERE m.conversation = "
        "conversations.id ORDER BY place DESC LIMIT 1) WHERE head IS NULL OR head NOT IN "
        "(SELECT m.id FROM messages m WHERE m.conversation = conversations.id)"
    )
    for column, function in (("created", "MIN"), ("changed", "MAX")):
        db.execute(
            f"UPDATE conversations SET {column} = COALESCE((SELECT {function}(m.created) FROM "
            f"messages m WHERE m.conversation = conversations.id AND m.created > 0), 0) "
            f"WHERE {column} = 0"
        )
    db.execute(
        "UPDATE messages SET created = (SELECT c.created FROM conversations c WHERE c.id = "
        "messages.conversation) WHERE created = 0"
    )
    db.execute("UPDATE conversations SET latest = changed WHERE latest = 0")
    missing = _mend_pictures(db, files)
    counts = Counter(
        row["text"] == UNREADABLE and row["state"] == FAILED
        for row in db.execute("SELECT text, state FROM messages")
    )
    total = db.execute("SELECT COUNT(*) FROM conversations WHERE head IS NOT NULL").fetchone()[0]
    return Recovered(total, counts[False], counts[True], missing, moved)


def _mend_trees(db: sqlite3.Connection) -> None:
    """Each parent is a message of the same conversation that stands before; the first is the
    user's, and they take turns.
    """
    db.execute(
        "UPDATE messages SET state = ? WHERE state NOT IN (?, ?, ?)",
        (FAILED, RUNNING, COMPLETE, STOPPED),
    )
    lost = db.execute(
        "SELECT m.parent, m.conversation, MIN(m.role) AS below FROM messages m WHERE m.parent IS "
        "NOT NULL AND m.parent NOT IN (SELECT id FROM messages) GROUP BY m.parent"
    ).fetchall()
    first = db.execute("SELECT MIN(place) FROM messages").fetchone()[0] or 0
    for location, row in enumerate(lost, min(first, 0) - len(lost)):
        db.execute(
            "INSERT INTO messages (place, id, conversation, role, text, state, created) "
            "VALUES (?, ?, ?, ?, ?, ?, 0)",
            (
                location,
                row["parent"],
                row["conversation"],
                "assistant" if row["below"] == "user" else "user",
                UNREADABLE,
                FAILED,
            ),
        )
    first, known = min(first, 0) - len(lost), dict[str, tuple[str, str]]()
    for row in db.execute(
        "SELECT id, conversation, parent, role FROM messages ORDER BY place"
    ).fetchall():
        conversation, above = known.get(row["parent"] or "", ("", ""))
        parent = row["parent"] if conversation == row["conversation"] else None
        role = row["role"]
        if role not in ("user", "assistant"):
            role = "assistant" if parent and above == "user" else "user"
        elif role == above:
            parent = None
        if parent is None and role == "assistant":  # what it answers is lost
            first, parent = first - 1, uuid.uuid4().hex
            db.execute(
                "INSERT INTO messages (place, id, conversation, role, text, state, created) "
                "VALUES (?, ?, ?, 'user', ?, ?, 0)",
                (first, parent, row["conversation"], UNREADABLE, FAILED),
            )
        known[row["id"]] = row["conversation"], role
        if (parent, role) != (row["parent"], row["role"]):
            db.execute(
                "UPDATE messages SET parent = ?, role = ? WHERE id = ?", (parent, role, row["id"])
            )


def _mend_pictures(db: sqlite3.Connection, files: ImageFiles) -> int:
    """Rows of pictures that messages show are made from their files; rows of others go, as it is
    not known who needs them, and their files stay. How many pictures that are shown have no file.
    """
    db.execute("DELETE FROM attachments WHERE message NOT IN (SELECT id FROM messages)")
    missing = 0
    for (sha256,) in db.execute("SELECT DISTINCT sha256 FROM attachments").fetchall():
        data = files.get(sha256) if WHOLE.fullmatch(sha256) else None
        missing += data is None
        known = db.execute("SELECT width FROM images WHERE sha256 = ?", (sha256,)).fetchone()
        if known and known["width"]:
            continue
        size = (0, 0)
        with suppress(ImageError):
            size = picture_size(data or b"")
        if data is None:
            db.execute("DELETE FROM attachments WHERE sha256 = ?", (sha256,))
            db.execute("DELETE FROM images WHERE sha256 = ?", (sha256,))
        else:
            db.execute(
                "INSERT OR REPLACE INTO images (sha256, kind, bytes, width, height) "
                "VALUES (?, ?, ?, ?, ?)",
                (sha256, media_type(data), len(data), *size),
            )
    db.execute("DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM attachments)")
    return missing
