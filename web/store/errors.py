"""Describes what the disk or the database cannot do, as typed errors that say what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from mtmd import MtmdError

_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.EEXIST, errno.ENOTDIR)


class StoreError(MtmdError):
    """The store of conversations cannot do what was asked."""


class StoreBusyError(StoreError):
    """Another program holds the database; the same may succeed in a moment."""


class NewerTurnError(StoreError):
    """A message has a reply that its sender did not know of."""


class StoreFullError(StoreError):
    """There is no room on the disk, or the disk does not take what is written."""


class StoreReadOnlyError(StoreError):
    """The folder, or a file in it, may not be written by this user."""


class StoreDamagedError(StoreError):
    """The database file is damaged."""


@contextmanager
def store_errors(done: str) -> Iterator[None]:
    """Raise StoreError for what the disk or SQLite cannot do. Their own words, which may hold
    paths, stay behind as its cause.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.ProgrammingError):
            raise
        raise _as_store_error(error, done) from error


def _as_store_error(error: OSError | UnicodeDecodeError | sqlite3.Error, done: str) -> StoreError:
    """Return the as store error by the words of SQLite, which are the same in every version; Python
    tells its codes from 3.11 on only.
    """
    words, number = str(error), getattr(error, "errno", None)
    if isinstance(error, sqlite3.IntegrityError):
        return StoreError(
            "conversations: found a picture or message that is no longer there; attach the picture "
            "again"
        )
    if "is locked" in words:
        return StoreBusyError(
            f"conversations: the database cannot be {done} now, another program "
            "is using it; try again in a moment"
        )
    # its plain class is that of "not a database", "malformed" and of what FTS5 finds
    # and texts that are no UTF-8 any more come from damaged pages
    if (
        type(error) in (sqlite3.DatabaseError, UnicodeDecodeError)
        or "malformed" in words
        or "to UTF-8" in words
    ):
        return StoreDamagedError(
            f"conversations: the database cannot be {done}, it is damaged; start the server again: "
            "it recovers what can be read and keeps the damaged file"
        )
    if number in _READ_ONLY or "readonly" in words or "unable to open" in words:
        return StoreReadOnlyError(
            f"conversations: the data folder cannot be {done}, it is read-only or belongs to "
            "another user; give a folder that this user may write"
        )
    if number in _NO_FOLDER:
        return StoreError(
            f"conversations: the data folder cannot be {done}, a file is in its place; give a "
            "folder"
        )
    if number in _FULL or "is full" in words:
        return StoreFullError(
            f"conversations: the data folder cannot be {done}, disk full; make room and try again"
        )
    why = f" ({os.strerror(number)})" if isinstance(number, int) else ""
    return StoreFullError(
        f"conversations: the data folder cannot be {done}{why}: is the disk full, or failing? Make "
        "room and try again"
    )
