"""The tables of the conversation store, as the steps that made them: a database of any earlier
version is brought up to date.
"""

from __future__ import annotations

import sqlite3
import time

from mtmd.web.store.errors import StoreError


def _conversations(db: sqlite3.Connection) -> None:
    """Conversations as trees of messages; pictures are files, their rows count who uses them."""
    _run(
        db,
        """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, title TEXT NOT NULL, head TEXT, created REAL NOT NULL, changed REAL NOT NULL);
    CREATE INDEX conversations_by_owner ON conversations (owner, changed);
    CREATE TABLE messages (
        place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent TEXT REFERENCES messages (id) DEFERRABLE INITIALLY DEFERRED,
        role TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL, options TEXT, receipt TEXT, error TEXT, created REAL NOT NULL);
    CREATE INDEX messages_by_conversation ON messages (conversation);
    CREATE INDEX messages_by_parent ON messages (parent);
    CREATE TABLE images (
        sha256 TEXT PRIMARY KEY, kind TEXT NOT NULL, bytes INTEGER NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL,
        unused_since REAL);
    CREATE TABLE attachments (
        message TEXT NOT NULL REFERENCES messages (id) ON DELETE CASCADE, position INTEGER NOT NULL,
        sha256 TEXT NOT NULL REFERENCES images (sha256), name TEXT NOT NULL, PRIMARY KEY (message, position));
    CREATE INDEX attachments_by_image ON attachments (sha256);
    """,
    )


def _search(db: sqlite3.Connection) -> None:
    """Search in the texts of messages (`stated` is the index); trigrams find parts of words, and
    words of languages written without spaces.
    """
    _run(
        db,
        """
    CREATE VIRTUAL TABLE said USING fts5 (text, content='messages', content_rowid='place', tokenize='trigram');
    INSERT INTO said (said) VALUES ('rebuild');
    CREATE TRIGGER said_new AFTER INSERT ON messages BEGIN
        INSERT INTO said (rowid, text) VALUES (new.place, new.text);
    END;
    CREATE TRIGGER said_gone AFTER DELETE ON messages BEGIN
        INSERT INTO said (said, rowid, text) VALUES ('delete', old.place, old.text);
    END;
    CREATE TRIGGER said_otherwise AFTER UPDATE OF text ON messages BEGIN
        INSERT INTO said (said, rowid, text) VALUES ('delete', old.place, old.text);
        INSERT INTO said (rowid, text) VALUES (new.place, new.text);
    END;
    """,
    )


def _order_and_deletion(db: sqlite3.Connection) -> None:
    """`latest` orders conversations whatever the clock does. `deleted_images` are files that are
    to go once the deletion of their rows is on the disk; `facts` are single values.
    """
    _run(
        db,
        """
    ALTER TABLE conversations ADD COLUMN latest REAL NOT NULL DEFAULT 0;
    UPDATE conversations SET latest = changed;
    DROP INDEX conversations_by_owner;
    CREATE INDEX conversations_by_owner ON conversations (owner, latest);
    CREATE TABLE deleted_images (sha256 TEXT PRIMARY KEY);
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
    )
    db.execute("INSERT INTO facts VALUES ('made', ?)", (str(time.time()),))


def _uploads(db: sqlite3.Connection) -> None:
    """Return who brought a picture that stands in no message yet; one in a message is its
    conversation's owner's.
    """
    _run(
        db,
        """
    CREATE TABLE image_uploads (
        sha256 TEXT NOT NULL REFERENCES images (sha256) ON DELETE CASCADE, owner TEXT NOT NULL, since REAL NOT NULL,
        PRIMARY KEY (sha256, owner));
    """,
    )


def _videos(db: sqlite3.Connection) -> None:
    """Videos lie among the pictures: how long one is, and which part of it a message shows."""
    _run(
        db,
        """
    ALTER TABLE images ADD COLUMN seconds REAL;
    ALTER TABLE attachments ADD COLUMN start REAL;
    ALTER TABLE attachments ADD COLUMN until REAL;
    """,
    )


def _pins(db: sqlite3.Connection) -> None:
    """Conversations that stand before all others."""
    db.execute("ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0")


# A new one goes to the end; what is there never changes.
MIGRATIONS = (_conversations, _search, _order_and_deletion, _uploads, _videos, _pins)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the tables up to date, each step whole or not at all. Raises StoreError for a database
    that a newer version wrote.
    """
    while (version := db.execute("PRAGMA user_version").fetchone()[0]) != len(MIGRATIONS):
        if version > len(MIGRATIONS):
            raise StoreError(
                f"conversations: found a database of version {version}, expected at most "
                f"{len(MIGRATIONS)}; "
                "it was written by a newer mtmd: update this one, or give another data folder"
            )
        db.execute("BEGIN IMMEDIATE")
        try:
            # Read again inside: another process may have done this step in between.
            if db.execute("PRAGMA user_version").fetchone()[0] == version:
                MIGRATIONS[version](db)
                db.execute(f"PRAGMA user_version = {version + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some failures have rolled back already
                db.execute("ROLLBACK")
            raise


def _run(db: sqlite3.Connection, script: str) -> None:
    """Statement by statement: `executescript` would commit between them."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""
