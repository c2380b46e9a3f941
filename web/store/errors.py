"""What the disk or the database cannot do, as one error that says what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from mtmd import MtmdError


class StoreError(MtmdError):
    """The store of conversations cannot do what was asked: the disk is full, its database is
    damaged or of a newer version.
    """


@contextmanager
def store_errors(done: str) -> Iterator[None]:
    """What the disk or SQLite cannot do, as one StoreError. Their own words, which may hold paths,
    stay behind as its cause.
    """
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise StoreError(
            "conversations: found a picture or message that is no longer there; attach the picture "
            "again"
        ) from error
    except (OSError, sqlite3.OperationalError) as error:
        raise StoreError(
            f"conversations: the data folder cannot be {done}: is the disk full, or the folder "
            "read-only? "
            "Make room and try again"
        ) from error
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.ProgrammingError):
            raise
        raise StoreError(
            f"conversations: the database cannot be {done}, it is damaged; move it away, or give "
            "another folder"
        ) from error
