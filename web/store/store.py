"""Conversations in SQLite, their pictures as files beside it.

What a method acknowledges by returning is on the disk: the database is in WAL mode with a sync at
every commit, and a picture's file is written and synced before the row that names it. Pictures that
no message shows any more are collected.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtmd.web.store.conversation import COMPLETE, RUNNING, Conversation, Hit, Message, StoredImage
from mtmd.web.store.errors import StoreError, store_errors
from mtmd.web.store.image_files import ImageFiles, media_type
from mtmd.web.store.search import around, condition, words_of
from mtmd.web.store.tables import migrate

# a picture attached to a message not sent yet is in nobody's way for so long
UNUSED_SECONDS = 3600.0
TITLE_LENGTH = 200


class Store:
    """Safe to use from several threads, and the folder from several processes. `folder` None keeps
    everything in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = threading.RLock()
        self.keeps = folder is not None
        self.before_close: list[
            Callable[[], None]
        ] = []  # of those who still have something to write
        with store_errors("opened"):
            if folder:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.files = ImageFiles(folder / "images" if folder else None)
            self._db = _connect(str(folder / "conversations.db") if folder else ":memory:")
        self.collect()

    def close(self) -> None:
        for end in self.before_close:
            end()
        with self._lock:
            self._db.close()

    # conversations

    def create(self, owner: str, title: str = "") -> Conversation:
        """A new one of `owner`: whose, in words that only the caller needs to understand; an owner
        sees no other's conversations.
        """
        now = time.time()
        made = Conversation(uuid.uuid4().hex, title[:TITLE_LENGTH], None, now, now)
        with self.change() as db:
            self.insert_conversation(db, owner, made)
        return made

    def insert_conversation(self, db: sqlite3.Connection, owner: str, made: Conversation) -> None:
        """Its row alone, inside a change."""
        db.execute(
            "INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)",
            (made.id, owner, made.title, made.head, made.created, made.changed),
        )

    def conversation(self, owner: str, id_: str) -> Conversation | None:
        rows = self._rows("SELECT * FROM conversations WHERE id = ? AND owner = ?", id_, owner)
        return _conversation(rows[0]) if rows else None

    def conversations(self, owner: str, limit: int = -1) -> list[Conversation]:
        """Those that have a message, the latest first."""
        rows = self._rows(
            "SELECT * FROM conversations WHERE owner = ? AND head IS NOT NULL ORDER BY changed "
            "DESC LIMIT ?",
            owner,
            limit,
        )
        return [_conversation(r) for r in rows]

    def search(self, owner: str, query: str, limit: int = 100) -> list[Hit]:
        """Conversations with a message, or a title, that has every word of the query in it; the
        latest first.
        """
        words = words_of(query)
        in_titles, title_values = condition("c.title", words, indexed=False)
        in_texts, text_values = condition("said.text", words, indexed=True)
        rows = self._rows(
            f"""WITH hits AS (
                    SELECT m.conversation AS id, m.text AS text, MIN(m.place)
                    FROM said JOIN messages m ON m.place = said.rowid
                    WHERE {in_texts} GROUP BY m.conversation)
                SELECT c.*, hits.text AS hit, {in_titles} AS titled
                FROM conversations c LEFT JOIN hits ON hits.id = c.id
                WHERE c.owner = ? AND (titled OR hits.text IS NOT NULL)
                ORDER BY c.changed DESC LIMIT ?""",
            *text_values,
            *title_values,
            owner,
            limit,
        )
        return [Hit(_conversation(r), "" if r["titled"] else around(r["hit"], words)) for r in rows]

    def rename(self, id_: str, title: str) -> None:
        with self.change() as db:
            db.execute(
                "UPDATE conversations SET title = ? WHERE id = ?", (title[:TITLE_LENGTH], id_)
            )

    def name(self, id_: str, title: str) -> None:
        """Give a title to one that has none."""
        with self.change() as db:
            db.execute(
                "UPDATE conversations SET title = ? WHERE id = ? AND title = ''",
                (title[:TITLE_LENGTH], id_),
            )

    def show(self, id_: str, head: str) -> None:
        """Choose the branch that ends in `head`."""
        with self.change() as db:
            db.execute("UPDATE conversations SET head = ? WHERE id = ?", (head, id_))

    def delete(self, id_: str) -> None:
        """With its messages, and the pictures that no other conversation shows."""
        with self.change() as db:
            db.execute("DELETE FROM conversations WHERE id = ?", (id_,))
        with suppress(
            StoreError
        ):  # what was to be deleted is; the files are collected at the next start
            self.collect()

    # messages

    def add(
        self,
        conversation: str,
        parent: str | None,
        role: str,
        text: str,
        *,
        images: Sequence[StoredImage] = (),
        state: str = COMPLETE,
        options: Mapping[str, Any] | None = None,
    ) -> Message:
        """A message under `parent`, which becomes the one shown. Raises StoreError, also where a
        picture was collected meanwhile.
        """
        made = Message(
            uuid.uuid4().hex,
            conversation,
            parent,
            role,
            text,
            state,
            tuple(images),
            dict(options) if options else None,
            None,
            None,
            time.time(),
        )
        with self.change() as db:
            self.insert(db, made)
            db.execute(
                "UPDATE conversations SET head = ?, changed = ? WHERE id = ?",
                (made.id, made.created, conversation),
            )
        return made

    def insert(self, db: sqlite3.Connection, message: Message) -> None:
        """The rows of one message, inside a change."""
        m = message
        db.execute(
            "INSERT INTO messages (id, conversation, parent, role, text, state, options, receipt, "
            "error, created) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                m.id,
                m.conversation,
                m.parent,
                m.role,
                m.text,
                m.state,
                _json(m.options),
                _json(m.receipt),
                m.error,
                m.created,
            ),
        )
        for position, image in enumerate(m.images):
            db.execute(
                "INSERT INTO attachments VALUES (?, ?, ?, ?)",
                (m.id, position, image.sha256, image.name),
            )
            db.execute("UPDATE images SET unused_since = NULL WHERE sha256 = ?", (image.sha256,))
            db.execute(
                "DELETE FROM image_uploads WHERE sha256 = ? "
                "AND owner = (SELECT owner FROM conversations WHERE id = ?)",
                (image.sha256, m.conversation),
            )

    def save_text(self, id_: str, text: str) -> None:
        """What there is of an answer so far; an answer that has ended is left alone."""
        with self.change() as db:
            db.execute(
                "UPDATE messages SET text = ? WHERE id = ? AND state = ?", (text, id_, RUNNING)
            )

    def finish(
        self,
        id_: str,
        text: str,
        state: str,
        receipt: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        with self.change() as db:
            db.execute(
                "UPDATE messages SET text = ?, state = ?, receipt = ?, error = ? WHERE id = ?",
                (text, state, _json(receipt), error, id_),
            )

    def messages(self, conversation: str) -> list[Message]:
        """All branches, in the order they were written: parents before children."""
        with self._lock:
            rows = self._rows(
                "SELECT * FROM messages WHERE conversation = ? ORDER BY place", conversation
            )
            shown = self._rows(
                "SELECT a.message, a.name, i.* FROM attachments a JOIN images i USING (sha256) "
                "JOIN messages m ON m.id = a.message WHERE m.conversation = ? ORDER BY a.message, "
                "a.position",
                conversation,
            )
        images: dict[str, list[StoredImage]] = {}
        for row in shown:
            images.setdefault(row["message"], []).append(_image(row, row["name"]))
        return [_message(r, tuple(images.get(r["id"], ()))) for r in rows]

    def conversation_of(self, message: str) -> str | None:
        rows = self._rows("SELECT conversation FROM messages WHERE id = ?", message)
        return rows[0]["conversation"] if rows else None

    # pictures

    def put_image(
        self, data: bytes, width: int, height: int, name: str = "", owner: str | None = None
    ) -> StoredImage:
        """Keep the file of a picture that was seen to decode. On the disk when this returns.
        `owner`: who brought it, and sees it before it stands in a message.
        """
        with (
            self.change() as db
        ):  # one change, so that no other process collects the file before its row is there
            sha256 = self.files.put(data)
            image = StoredImage(sha256, media_type(data), len(data), width, height, name)
            db.execute(
                "INSERT INTO images VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (sha256) DO UPDATE SET unused_since = excluded.unused_since",
                (sha256, image.kind, len(data), width, height, time.time()),
            )
            if owner is not None:
                db.execute(
                    "INSERT OR REPLACE INTO image_uploads VALUES (?, ?, ?)",
                    (sha256, owner, time.time()),
                )
        if self._collected < time.monotonic() - UNUSED_SECONDS:
            self.collect()
        return image

    def image(self, sha256: str, name: str = "") -> StoredImage | None:
        rows = self._rows("SELECT * FROM images WHERE sha256 = ?", sha256)
        return _image(rows[0], name) if rows else None

    def image_of(self, owner: str, sha256: str, name: str = "") -> StoredImage | None:
        """As `image`, for who brought it lately, or has it in a conversation: None for others."""
        rows = self._rows(
            "SELECT * FROM images i WHERE sha256 = ?1 AND ("
            "EXISTS (SELECT 1 FROM image_uploads u WHERE u.sha256 = ?1 AND u.owner = ?2) OR "
            "EXISTS (SELECT 1 FROM attachments a JOIN messages m ON m.id = a.message "
            "JOIN conversations c ON c.id = m.conversation WHERE a.sha256 = ?1 AND c.owner = ?2))",
            sha256,
            owner,
        )
        return _image(rows[0], name) if rows else None

    def image_bytes(self, sha256: str) -> bytes | None:
        """None also where there is a file, but no row for it: it is about to be collected."""
        with store_errors("read"):
            return self.files.get(sha256) if self.image(sha256) else None

    def collect(self, unused_seconds: float = UNUSED_SECONDS) -> int:
        """Delete pictures that no message shows, except ones that came in within `unused_seconds`;
        how many.
        """
        self._collected = time.monotonic()
        with self.change() as db:
            db.execute(
                "DELETE FROM conversations WHERE head IS NULL AND created < ?",
                (time.time() - unused_seconds,),
            )
            db.execute("DELETE FROM image_uploads WHERE since < ?", (time.time() - unused_seconds,))
            unused = [
                r["sha256"]
                for r in db.execute(
                    "SELECT sha256 FROM images WHERE (unused_since IS NULL OR unused_since < ?) "
                    "AND NOT EXISTS (SELECT 1 FROM attachments a WHERE a.sha256 = images.sha256) "
                    "AND NOT EXISTS (SELECT 1 FROM image_uploads u WHERE u.sha256 = images.sha256)",
                    (time.time() - unused_seconds,),
                )
            ]
            for sha256 in unused:
                self.files.delete(sha256)
                db.execute("DELETE FROM images WHERE sha256 = ?", (sha256,))
            known = {r["sha256"] for r in db.execute("SELECT sha256 FROM images")}
            strays = [name for name in self.files.older_than(unused_seconds) if name not in known]
            for name in strays:
                self.files.delete(name)
        return len(unused) + len(strays)

    # the database

    def _rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, store_errors("read"):
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk at the end."""
        with self._lock, store_errors("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # some failures have rolled back already
                    self._db.execute("ROLLBACK")
                raise


def _connect(database: str) -> sqlite3.Connection:
    """With its tables up to date."""
    db = sqlite3.connect(database, isolation_level=None, check_same_thread=False, timeout=30)
    try:
        db.row_factory = sqlite3.Row
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "temp_store = MEMORY",
            "secure_delete = ON",
        ):
            db.execute(f"PRAGMA {pragma}")
        migrate(db)
    except BaseException:
        db.close()
        raise
    return db


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, separators=(",", ":"))


def _conversation(row: sqlite3.Row) -> Conversation:
    return Conversation(row["id"], row["title"], row["head"], row["created"], row["changed"])


def _image(row: sqlite3.Row, name: str) -> StoredImage:
    return StoredImage(row["sha256"], row["kind"], row["bytes"], row["width"], row["height"], name)


def _message(row: sqlite3.Row, images: tuple[StoredImage, ...]) -> Message:
    options, receipt = (
        json.loads(row[key]) if row[key] else None for key in ("options", "receipt")
    )
    return Message(
        row["id"],
        row["conversation"],
        row["parent"],
        row["role"],
        row["text"],
        row["state"],
        images,
        options,
        receipt,
        row["error"],
        row["created"],
    )
