"""Describes what is wrong with a data folder, or a backup of one, found without changing it."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtmd.web.store.database import has_no_content, open_readonly
from mtmd.web.store.errors import StoreError, store_errors
from mtmd.web.store.image_files import digest, names_in
from mtmd.web.store.recovery import DATABASE
from mtmd.web.store.tables import MIGRATIONS

MAX_REPORTED = 20  # of one kind
RECENT_S = 3600.0  # a file so new may be of a picture that is just coming in
RECOVER = "stop the server and use `mtmd history recover`"


@dataclass(frozen=True)
class Checked:
    """`problems` are to be mended, each says how; `notes` are worth knowing. `unknown`: pictures
    that belong to no conversation and to no draft.
    """

    conversations: int
    messages: int
    pictures: int
    picture_bytes: int
    unknown: int
    unknown_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def check(folder: Path) -> Checked:
    """Every page and index of the database, every reference, the search index, and each picture
    against its name. A server may use the folder meanwhile. Raises StoreError where the folder
    cannot be read.
    """
    path, files = folder / DATABASE, folder / "images"
    counts, known = {"conversations": 0, "messages": 0}, dict[str, int]()
    problems, notes = list[str](), list[str]()
    if not folder.is_dir():
        raise StoreError(
            f"found no folder {str(folder)!r}, expected a data folder of the server, or a backup "
            "of one; name it with --data"
        )
    with store_errors("read"):
        if has_no_content(path):
            problems.append(
                "there is no database, or an empty one; use `mtmd history restore` if you have a "
                "backup"
            )
        else:
            try:
                with closing(open_readonly(path)) as db:
                    problems += _database_problems(db)
                    for table in counts:
                        counts[table] = db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
                    known = {
                        row["sha256"]: row["bytes"]
                        for row in db.execute("SELECT sha256, bytes FROM images")
                    }
                    problems += _picture_problems(db, files, known)
                    notes += _deletion_note(db)
            except sqlite3.DatabaseError as error:
                problems.append(f"the database cannot be read ({error}); {RECOVER}")
        unknown = unknown_pictures(files, set(known))
        size = sum(p.stat().st_size for p in unknown)
        notes += _notes(folder, len(unknown), size)
        problems += _open_to_others(folder)
    return Checked(
        counts["conversations"],
        counts["messages"],
        len(known),
        sum(known.values()),
        len(unknown),
        size,
        tuple(problems),
        tuple(notes),
    )


def remove_unknown(folder: Path) -> int:
    """Delete pictures that the database does not know, for good; how many. The database has to be
    there and sound. Raises StoreError.
    """
    with (
        store_errors("changed"),
        closing(sqlite3.connect(folder / DATABASE, isolation_level=None, timeout=5)) as db,
    ):
        db.execute("BEGIN IMMEDIATE")  # no picture comes in meanwhile
        known = {row[0] for row in db.execute("SELECT sha256 FROM images")}
        paths = unknown_pictures(folder / "images", known)
        for path in paths:
            path.unlink(missing_ok=True)
        db.execute("ROLLBACK")
    return len(paths)


def unknown_pictures(folder: Path, known: set[str]) -> list[Path]:
    result = [folder / name for name in names_in(folder) if name not in known]
    return [p for p in result if p.stat().st_mtime < time.time() - RECENT_S]


def _database_problems(db: sqlite3.Connection) -> Iterator[str]:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        yield (
            f"the database is of version {version}, this mtmd knows {len(MIGRATIONS)}; update mtmd"
        )
    for (line,) in db.execute(f"PRAGMA integrity_check({MAX_REPORTED})"):
        if line != "ok":
            yield f"the database is damaged: {line}; {RECOVER}"
    loose = len(db.execute("PRAGMA foreign_key_check").fetchall())
    loose += db.execute(
        "SELECT COUNT(*) FROM conversations c WHERE head IS NOT NULL AND NOT EXISTS "
        "(SELECT 1 FROM messages m WHERE m.id = c.head AND m.conversation = c.id)"
    ).fetchone()[0]
    if loose:
        yield f"{loose} rows refer to rows that are not there; {RECOVER}"
    if version >= 2 and not _search_index_is_right(db):
        yield f"the search index does not agree with the messages; {RECOVER}"


def _search_index_is_right(db: sqlite3.Connection) -> bool:
    """Asked of a copy: SQLite counts the question as a change."""
    with closing(sqlite3.connect("", isolation_level=None)) as copy:
        try:
            db.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode = OFF")
            copy.execute("INSERT INTO said (said, rank) VALUES ('integrity-check', 1)")
        except sqlite3.DatabaseError:
            return False
    return True


def _picture_problems(db: sqlite3.Connection, folder: Path, known: dict[str, int]) -> Iterator[str]:
    missing, wrong = [], []
    for name in known:
        try:
            if digest(folder / name) != name:
                wrong.append(name)
        except FileNotFoundError:  # perhaps deleted since, with its row
            if db.execute("SELECT 1 FROM images WHERE sha256 = ?", (name,)).fetchone():
                missing.append(name)
    advice = "take them from a backup with `mtmd history restore`, or attach them again"
    for names, words in ((missing, "missing"), (wrong, "damaged")):
        if names:
            yield (
                f"{len(names)} of {len(known)} pictures are {words}, the first {names[0]}; {advice}"
            )


def _deletion_note(db: sqlite3.Connection) -> Iterator[str]:
    with suppress(sqlite3.OperationalError):  # an older version has no such tables
        if db.execute(
            "SELECT 1 FROM facts WHERE name = 'deleting' UNION SELECT 1 FROM deleted_images"
        ).fetchone():
            yield (
                "some deleted data is not overwritten yet; the next start or "
                "stop of the server overwrites it"
            )


def _notes(folder: Path, unknown: int, size: int) -> Iterator[str]:
    if unknown:
        yield (
            f"{unknown} pictures ({size / 1e6:.1f} MB) belong to no conversation; "
            "`mtmd history check --remove-unknown` deletes them"
        )
    moved = sorted(
        p.name
        for p in folder.iterdir()
        if p.is_dir() and p.name.startswith(("damaged-", "replaced-"))
    )
    if moved:
        yield (
            f"{', '.join(moved[:MAX_REPORTED])}: old databases, which also "
            "contain what was deleted since; remove these folders when you no "
            "longer need them"
        )


def _open_to_others(folder: Path) -> Iterator[str]:
    """Yield what this program made, and others of this machine may read: their modes were
    changed.
    """
    if os.name != "posix":
        return
    ours = [folder / "images", *folder.glob("conversations.*")]
    names = [p.name for p in ours if p.exists() and p.stat().st_mode & 0o077]
    if names:
        yield (
            f"others on this machine may read {', '.join(names[:MAX_REPORTED])}; the next start of "
            "the server closes them"
        )
