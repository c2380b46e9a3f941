"""SQLite as the store uses it: one connection that writes, others that read and wait for nobody,
and deletion after which the bytes are gone.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from mtmd.web.native_threads import waiting
from mtmd.web.store.errors import StoreBusyError, StoreDamagedError, StoreError, store_errors
from mtmd.web.store.folder import private_file, sync_folder
from mtmd.web.store.tables import migrate

WAIT_S = 5.0  # for all others who write, in this process and elsewhere
IDLE_READERS = 4  # connections kept open
MERGE_PAGES = 400  # of the search index at a time: others write in between
LARGEST_LOG = 16 << 20  # bytes that the log keeps once it was written back


class Database:
    """`path` None keeps it in memory. Thread-safe. Whoever reads sees what was committed last, and
    does not wait for who writes. What nobody closes is closed once nobody holds it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._writing, self._idle, self._closed = (
            threading.RLock(),
            list[sqlite3.Connection](),
            False,
        )
        self._lending = threading.Lock()
        with store_errors("opened"):
            if path is not None:
                _prepare(path)
            self._db = self._open()
        # From Python 3.13 on a connection that is let go open is a ResourceWarning.
        weakref.finalize(self, _close_all, self._idle, self._db).atexit = False

    def _open(self) -> sqlite3.Connection:
        db = _connect(str(self.path) if self.path else ":memory:")
        try:
            for pragma in (
                "journal_mode = WAL",
                "synchronous = FULL",
                "foreign_keys = ON",
                "temp_store = MEMORY",
                "secure_delete = ON",
                f"journal_size_limit = {LARGEST_LOG}",
            ):
                db.execute(f"PRAGMA {pragma}")
            migrate(db)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        """Close it. What was written is in the database file alone afterwards, without a log beside
        it.
        """
        with self._writing:
            with self._lending:
                self._closed = True
            _close_all(self._idle)
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.close()

    def rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self.reading() as db:
            return db.execute(statement, values).fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements all see the same state."""
        with store_errors("read"):
            if self.path is None:
                with self._writing:
                    yield self._db
                return
            db = self._borrow()
            try:
                db.execute("BEGIN")
                yield db
            finally:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                self._give_back(db)

    def _borrow(self) -> sqlite3.Connection:
        with self._lending:
            if self._closed:
                raise StoreError("conversations: the server is stopping; try again when it is back")
            if self._idle:
                return self._idle.pop()
        db = _connect(str(self.path))
        db.execute("PRAGMA query_only = ON")
        return db

    def _give_back(self, db: sqlite3.Connection) -> None:
        with self._lending:
            if not self._closed and not db.in_transaction and len(self._idle) < IDLE_READERS:
                self._idle.append(db)
                return
        db.close()

    @contextmanager
    def change(self, wait_s: float = WAIT_S) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk at the end. Raises StoreBusyError where others write for
        so long: all that wait for them are told after the same time, not one after another.
        """
        end = time.monotonic() + wait_s
        if not self._writing.acquire(timeout=wait_s):
            raise StoreBusyError(
                "conversations: others have been writing to the database for too long; try again "
                "in a moment"
            )
        try:
            with store_errors("written"):
                if self._closed:
                    raise StoreError(
                        "conversations: the server is stopping; try again when it is back"
                    )
                left = max(0.0, end - time.monotonic())
                self._db.execute(f"PRAGMA busy_timeout = {int(left * 1e3)}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):  # some failures have rolled back already
                        self._db.execute("ROLLBACK")
                    raise
        finally:
            self._writing.release()

    def erase(self) -> bool:
        """Take what was deleted out of the search index, where it stays until its blocks are
        merged, and out of the log. False where somebody still reads what was there before: then it
        is to be called again. Raises StoreError.
        """
        pages = -MERGE_PAGES  # negative: begins to merge all there is
        while True:
            with self.change() as db:
                before = db.total_changes
                db.execute("INSERT INTO said (said, rank) VALUES ('merge', ?)", (pages,))
                # "if the difference is less than 2, the command was a no-op" (FTS5, 6.8)
                if pages > 0 and db.total_changes - before < 2:
                    break
            pages = MERGE_PAGES
        return self.write_back()

    def write_back(self) -> bool:
        """The log into the database file, and the log empty. False where a reader is in the way."""
        with self._writing, store_errors("written"):
            self._db.execute(f"PRAGMA busy_timeout = {int(WAIT_S * 1e3 / 5)}")
            busy: int = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        return not busy

    def index_again(self) -> None:
        """The search index made anew from the messages."""
        with self.change() as db:
            db.execute("INSERT INTO said (said) VALUES ('rebuild')")


def _prepare(path: Path) -> None:
    """The file is there, closed to others, and sound. A damaged one is not touched: to open it for
    writing would apply its log to it.
    """
    made = not path.exists()
    private_file(path).close()
    if made:
        sync_folder(path.parent)
    elif not has_no_content(path):
        with closing(open_readonly(path)) as db:
            check_pages(db)


def check_pages(db: sqlite3.Connection) -> None:
    """Raises StoreDamagedError. Reads every page: 0.1 s for 100 MB. Of the search index it is
    looked whether it can be asked; the rest, which newer versions of SQLite look at too, is left to
    who searches, as it can be made anew.
    """
    result = [str(row[0]) for row in db.execute("PRAGMA quick_check(10)")]
    if [line for line in result if line != "ok" and "FTS5" not in line]:
        raise StoreDamagedError(
            "conversations: the database is damaged; start the server again: it recovers what can "
            "be read and keeps the damaged file"
        )
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'said'").fetchone():
        db.execute("SELECT 1 FROM said WHERE said MATCH 'any' LIMIT 1").fetchone()


def open_readonly(path: Path) -> sqlite3.Connection:
    """Reads only, its log too, and leaves the file as it is."""
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=WAIT_S
    )
    db.row_factory = sqlite3.Row
    return db


def _close_all(idle: list[sqlite3.Connection], *others: sqlite3.Connection) -> None:
    while idle:
        idle.pop().close()
    for connection in others:
        connection.close()


class _Connection(sqlite3.Connection):
    """Others are answered while a statement waits for the disk, or for another program."""

    def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:
        return waiting(super().execute, statement, values)


def _connect(database: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        database, isolation_level=None, check_same_thread=False, timeout=WAIT_S, factory=_Connection
    )
    db.row_factory = sqlite3.Row
    return db


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def shared_memory_of(path: Path) -> Path:
    return path.with_name(path.name + "-shm")


def has_no_content(path: Path) -> bool:
    """Not there, or empty as a full disk or an editor leaves it."""
    return not path.exists() or path.stat().st_size == 0
