"""SQLite's connections, by themselves."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from mtmd.web.store.database import Database


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_connections_are_closed_when_nobody_holds_the_database(where: str, tmp_path: Path) -> None:
    """Nothing of it is in a cycle: Python 3.13 and later warn of a connection that is let go."""
    database = Database(tmp_path / "chat.db" if where == "disk" else None)
    with database.change() as writing:
        writing.execute("SELECT 1")
    with database.reading() as reading:
        reading.execute("SELECT 1")
    del database
    for connection in (writing, reading):
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
