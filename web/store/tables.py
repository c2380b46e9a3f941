"""The tables of the conversation store, as the steps that made them: a database of any earlier
version is brought up to date.
"""

from __future__ import annotations

import sqlite3

from mtmd.web.store.errors import StoreError

MIGRATIONS = (
    # 1: conversations as trees of messages; pictures are files, their rows count who uses them
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
    # 2: search in the texts of messages (`said` is the index); trigrams find parts of words, and
    # words of languages written without spaces
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
    # 3: who brought a picture that stands in no message yet; one in a message is its conversation's owner's
    """
    CREATE TABLE image_uploads (
        sha256 TEXT NOT NULL REFERENCES images (sha256) ON DELETE CASCADE, owner TEXT NOT NULL, since REAL NOT NULL,
        PRIMARY KEY (sha256, owner));
    """,
)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables up to date, each step whole or not at all. Raises StoreError for a database
    that a newer version wrote.
    """
    while (version := connection.execute("PRAGMA user_version").fetchone()[0]) != len(MIGRATIONS):
        if version > len(MIGRATIONS):
            raise StoreError(
                f"conversations: found a database of version {version}, expected at most "
                f"{len(MIGRATIONS)}; "
                "it was written by a newer mtmd: update this one, or give another data folder"
            )
        # Read again inside: another process may have done this step in between.
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("PRAGMA user_version").fetchone()[0] == version:
            for statement in _statements(MIGRATIONS[version]):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")


def _statements(script: str) -> list[str]:
    """The statements of a script one by one: `executescript` would commit between them."""
    statements, rest = [], ""
    for line in script.splitlines(keepends=True):
        rest += line
        if sqlite3.complete_statement(rest):
            statements.append(rest)
            rest = ""
    return statements
