"""Conversations in SQLite, their pictures as files beside it.

What a method acknowledges by returning is on the disk: the database is in WAL mode with a sync at
every commit, and a picture's file is written and synced before the row that names it. Pictures that
no message shows any more are collected.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmd.web.store.conversation import (
    COMPLETE,
    RUNNING,
    Conversation,
    Hit,
    Message,
    PictureTotals,
    StoredImage,
)
from mtmd.web.store.database import Database
from mtmd.web.store.errors import NewerTurnError, StoreDamagedError, StoreError, store_errors
from mtmd.web.store.folder import FolderLock, make_private
from mtmd.web.store.image_files import ImageFiles, media_type
from mtmd.web.store.recovery import Notice, open_or_recover, read_notice
from mtmd.web.store.search import around, condition, words_of

# a picture attached to a message not sent yet is in nobody's way for so long
UNUSED_SECONDS = 3600.0
TITLE_LENGTH = 200
DELETING = "deleting"  # the fact that deleted text may still be in some file
log = logging.getLogger("mtmd.web")


class Store:
    """Safe to use from several threads, and the folder from several processes. `folder` None keeps
    everything in memory only.

    `shared`: another process had the folder open when this one came. `notice` is what people are to
    know of their history, such as that it was recovered. Raises StoreError.
    """

    def __init__(self, folder: Path | None) -> None:
        self.keeps, self.shared = folder is not None, False
        self.before_close: list[
            Callable[[], None]
        ] = []  # of those who still have something to write
        self._folder_lock: FolderLock | None = None
        with store_errors("opened"):
            if folder:
                self._folder_lock = FolderLock(make_private(folder))
                self.shared = not self._folder_lock.alone
        try:
            with store_errors("opened"):
                self.files = ImageFiles(folder / "images" if folder else None)
                self.database = (
                    open_or_recover(folder, self.files, alone=not self.shared)
                    if folder
                    else Database(None)
                )
        except BaseException:
            self._close_lock()
            raise
        if self._folder_lock:
            self._folder_lock.share()
        self._try_to_collect()

    def close(self) -> None:
        for end in self.before_close:
            end()
        with suppress(StoreError):
            if self._deletion_is_open():
                self._finish_deletion()
        self.database.close()
        self._close_lock()

    def _close_lock(self) -> None:
        if self._folder_lock:
            self._folder_lock.close()

    @property
    def notice(self) -> Notice | None:
        try:
            return read_notice(self.database)
        except StoreError as error:
            return Notice(str(int(time.time())), str(error))

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
        """Insert its row only, inside a change. One that comes from elsewhere stands in the list
        where its time puts it, at the latest now.
        """
        latest = min(made.changed, _latest(db, time.time()))
        db.execute(
            "INSERT INTO conversations (id, owner, title, head, created, changed, latest) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (made.id, owner, made.title, made.head, made.created, made.changed, latest),
        )

    def conversation(self, owner: str, id_: str) -> Conversation | None:
        rows = self._rows("SELECT * FROM conversations WHERE id = ? AND owner = ?", id_, owner)
        return _conversation(rows[0]) if rows else None

    def conversations(self, owner: str, limit: int = -1) -> list[Conversation]:
        """Return those that have a message: the pinned ones, then the others, of each the latest
        first.
        """
        rows = self._rows(
            "SELECT * FROM conversations WHERE owner = ? AND head IS NOT NULL "
            "ORDER BY pinned DESC, latest DESC LIMIT ?",
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
        values = (*text_values, *title_values, owner, limit)
        statement = f"""WITH hits AS (
                    SELECT m.conversation AS id, m.id AS message, m.text AS text, MIN(m.place)
                    FROM said JOIN messages m ON m.place = said.rowid
                    WHERE {in_texts} GROUP BY m.conversation)
                SELECT c.*, hits.text AS hit, hits.message AS message, {in_titles} AS titled
                FROM conversations c LEFT JOIN hits ON hits.id = c.id
                WHERE c.owner = ? AND (titled OR hits.text IS NOT NULL)
                ORDER BY c.latest DESC LIMIT ?"""
        try:
            rows = self._rows(statement, *values)
        except (StoreDamagedError, MemoryError):  # damaged sizes: more than there is, SQLite says
            log.error("the search index is damaged; making it anew from the messages")
            self.database.index_again()
            rows = self._rows(statement, *values)
        return [
            Hit(_conversation(r), "")
            if r["titled"]
            else Hit(_conversation(r), around(r["hit"], words), r["message"])
            for r in rows
        ]

    def first_pictures(self, owner: str) -> dict[str, str]:
        """Conversation -> SHA-256 of the first picture or video in it, for those that have one."""
        rows = self._rows(
            "SELECT m.conversation AS id, a.sha256 AS sha256, MIN(m.place * 1000 + a.position) "
            "FROM attachments a JOIN messages m ON m.id = a.message "
            "JOIN conversations c ON c.id = m.conversation JOIN images i ON i.sha256 = a.sha256 "
            "WHERE c.owner = ? AND i.kind NOT LIKE 'audio/%' "
            "GROUP BY m.conversation",
            owner,
        )
        return {row["id"]: row["sha256"] for row in rows}

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

    def pin(self, id_: str, pinned: bool) -> None:
        with self.change() as db:
            db.execute("UPDATE conversations SET pinned = ? WHERE id = ?", (pinned, id_))

    def show(self, id_: str, head: str) -> None:
        """Choose the branch that ends in `head`."""
        with self.change() as db:
            db.execute("UPDATE conversations SET head = ? WHERE id = ?", (head, id_))

    def delete(self, id_: str) -> None:
        """Delete it with its messages, and the pictures that no other conversation shows. When this
        returns their bytes are in none of our files any more, unless another process is just
        reading them: then they go with the next deletion, the next picture, or the end of the
        server.
        """
        with self.change() as db:
            shown = [
                row["sha256"]
                for row in db.execute(
                    "SELECT DISTINCT a.sha256 FROM attachments a JOIN messages m ON m.id = "
                    "a.message WHERE m.conversation = ?",
                    (id_,),
                )
            ]
            db.execute("DELETE FROM conversations WHERE id = ?", (id_,))
            _drop_unused(db, shown, time.time() - UNUSED_SECONDS)
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, '1')", (DELETING,))
        try:
            self._finish_deletion()
        except StoreError as error:  # it is deleted for whoever asks the store
            log.warning("what was deleted is not overwritten on the disk yet: %s", error)

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
        newest: bool = False,
    ) -> Message:
        """A message under `parent`, which becomes the one shown. Raises StoreError, also where a
        picture was collected meanwhile, and NewerTurnError where it is to be the `newest` and there
        is another under `parent`.
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
            if newest and _has_reply(db, conversation, parent):
                raise NewerTurnError(
                    "another window has continued this conversation; read the "
                    "new messages, then send again"
                )
            self.insert(db, made)
            db.execute(
                "UPDATE conversations SET head = ?, changed = ?, latest = ? WHERE id = ?",
                (made.id, made.created, _latest(db, made.created), conversation),
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
                "INSERT INTO attachments (message, position, sha256, name, start, until) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (m.id, position, image.sha256, image.name, image.start, image.end),
            )
            db.execute("UPDATE images SET unused_since = NULL WHERE sha256 = ?", (image.sha256,))
            db.execute(
                "DELETE FROM image_uploads WHERE sha256 = ? "
                "AND owner = (SELECT owner FROM conversations WHERE id = ?)",
                (image.sha256, m.conversation),
            )

    def save_text(self, id_: str, text: str) -> None:
        """Save what there is of an answer so far; an answer that has ended is left alone."""
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

    def messages(
        self, conversation: str, requested: Collection[str] | None = None
    ) -> list[Message]:
        """All branches, in the order they were written: parents before children. Or those of them
        that are `requested`, by id.
        """
        if requested is None:
            return self._messages(conversation, "*")
        marks = ",".join("?" * len(requested))
        return self._messages(conversation, "*", f"AND id IN ({marks})", *requested)

    def outline(self, conversation: str) -> list[Message]:
        """Do what `messages` does, without texts, receipts and errors."""
        fields = "id, conversation, parent, role, state, options, created"
        return self._messages(conversation, f"{fields}, '' AS text, NULL AS receipt, NULL AS error")

    def role_of(self, conversation: str, message: str) -> str | None:
        """None where the conversation has no such message."""
        rows = self._rows(
            "SELECT role FROM messages WHERE id = ? AND conversation = ?", message, conversation
        )
        return rows[0]["role"] if rows else None

    def _messages(
        self, conversation: str, fields: str, which: str = "", *values: str
    ) -> list[Message]:
        with self.database.reading() as db:
            rows = db.execute(
                f"SELECT {fields} FROM messages WHERE conversation = ? {which} ORDER BY place",
                (conversation, *values),
            ).fetchall()
            shown = db.execute(
                "SELECT a.message, a.name, a.start, a.until, i.* "
                "FROM attachments a JOIN images i USING (sha256) "
                "JOIN messages m ON m.id = a.message WHERE m.conversation = ? ORDER BY a.message, "
                "a.position",
                (conversation,),
            ).fetchall()
        images: dict[str, list[StoredImage]] = {}
        for row in shown:
            images.setdefault(row["message"], []).append(
                replace(_image(row, row["name"]), start=row["start"], end=row["until"])
            )
        return [_message(r, tuple(images.get(r["id"], ()))) for r in rows]

    def last_receipts(self, owner: str, count: int) -> list[tuple[str, float, dict[str, Any]]]:
        """(conversation, when its answer was begun, receipt) of the latest answers, the last one
        first.
        """
        rows = self._rows(
            "SELECT m.conversation, m.created, m.receipt FROM messages m "
            "JOIN conversations c ON c.id = m.conversation "
            "WHERE c.owner = ? AND m.receipt IS NOT NULL ORDER BY m.place DESC LIMIT ?",
            owner,
            count,
        )
        return [(r["conversation"], r["created"], json.loads(r["receipt"])) for r in rows]

    def conversation_of(self, message: str) -> str | None:
        rows = self._rows("SELECT conversation FROM messages WHERE id = ?", message)
        return rows[0]["conversation"] if rows else None

    # pictures

    def put_image(
        self,
        data: bytes,
        width: int,
        height: int,
        name: str = "",
        owner: str | None = None,
        seconds: float | None = None,
    ) -> StoredImage:
        """Keep the file of a picture, or a video of so many `seconds`, that was seen to decode. On
        the disk when this returns. `owner`: who brought it, and sees it before it stands in a
        message.
        """
        sha256 = self.files.name_of(data)
        image = StoredImage(sha256, media_type(data), len(data), width, height, name, seconds)
        was_there = False
        try:
            # one change, so that no other process collects the file before its row is there
            with self.change() as db:
                was_there = self.files.has(sha256)
                self.files.put(data)
                db.execute(
                    "INSERT INTO images "
                    "(sha256, kind, bytes, width, height, unused_since, seconds) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?) "
                    "ON CONFLICT (sha256) DO UPDATE SET unused_since = excluded.unused_since",
                    (sha256, image.kind, len(data), width, height, time.time(), seconds),
                )
                db.execute("DELETE FROM deleted_images WHERE sha256 = ?", (sha256,))
                if owner is not None:
                    db.execute(
                        "INSERT OR REPLACE INTO image_uploads VALUES (?, ?, ?)",
                        (sha256, owner, time.time()),
                    )
        except StoreError:
            if not was_there:
                self._delete_without_row(sha256)
            raise
        if self._collected < time.monotonic() - UNUSED_SECONDS:
            self._try_to_collect()
        return image

    def _delete_without_row(self, sha256: str) -> None:
        """The file of a picture whose row could not be written, as on a full disk."""
        with suppress(StoreError), self.change() as db:
            if not db.execute("SELECT 1 FROM images WHERE sha256 = ?", (sha256,)).fetchone():
                self.files.delete(sha256)

    def image(self, sha256: str, name: str = "") -> StoredImage | None:
        rows = self._rows("SELECT * FROM images WHERE sha256 = ?", sha256)
        return _image(rows[0], name) if rows else None

    def image_of(self, owner: str, sha256: str, name: str = "") -> StoredImage | None:
        """Do what `image` does, for who brought it lately, or has it in a conversation: None for
        others.
        """
        rows = self._rows(
            "SELECT * FROM images i WHERE sha256 = ?1 AND ("
            "EXISTS (SELECT 1 FROM image_uploads u WHERE u.sha256 = ?1 AND u.owner = ?2) OR "
            "EXISTS (SELECT 1 FROM attachments a JOIN messages m ON m.id = a.message "
            "JOIN conversations c ON c.id = m.conversation WHERE a.sha256 = ?1 AND c.owner = ?2))",
            sha256,
            owner,
        )
        return _image(rows[0], name) if rows else None

    def picture_totals(self) -> PictureTotals:
        (row,) = self._rows(
            "SELECT COUNT(*), COALESCE(SUM(bytes), 0), COUNT(unused_since), "
            "COALESCE(SUM(bytes) FILTER (WHERE unused_since IS NOT NULL), 0) FROM images"
        )
        return PictureTotals(*row)

    def image_bytes(self, sha256: str) -> bytes | None:
        """None also where there is a file, but no row for it: it is about to be collected."""
        with store_errors("read"):
            return self.files.get(sha256) if self.image(sha256) else None

    def _try_to_collect(self) -> None:
        try:
            self.collect()
        except StoreError as error:
            log.warning("unused pictures are not deleted yet: %s", error)

    def collect(self, unused_seconds: float = UNUSED_SECONDS) -> int:
        """Delete pictures that no message shows, except ones that came in within `unused_seconds`;
        how many. A file that the database does not know stays: it may be of a database that was
        lost. Raises StoreError.
        """
        self._collected, now = time.monotonic(), time.time()
        with self.change() as db:
            # a clock that was set back must not keep them for ever
            db.execute("UPDATE images SET unused_since = ? WHERE unused_since > ?", (now, now))
            db.execute(
                "DELETE FROM conversations WHERE head IS NULL AND created < ?",
                (now - unused_seconds,),
            )
            db.execute("UPDATE image_uploads SET since = ? WHERE since > ?", (now, now))
            db.execute("DELETE FROM image_uploads WHERE since < ?", (now - unused_seconds,))
            names = [
                row["sha256"]
                for row in db.execute(
                    "SELECT sha256 FROM images WHERE sha256 NOT IN (SELECT sha256 FROM attachments)"
                )
            ]
            dropped = _drop_unused(db, names, now - unused_seconds)
        for name in self.files.unfinished(unused_seconds):
            with store_errors("written"):
                self.files.delete(name)
        if dropped or self._deletion_is_open():
            self._finish_deletion()
        return dropped

    def _deletion_is_open(self) -> bool:
        """Return whether something was deleted whose bytes are still there."""
        return bool(
            self._rows(
                "SELECT 1 FROM facts WHERE name = ? UNION SELECT 1 FROM deleted_images", DELETING
            )
        )

    def _finish_deletion(self) -> None:
        """Files go once the deletion of their rows is on the disk: a crash in between leaves a
        list of them, never a message without its picture.
        """
        with self.change() as db:  # nobody can put one of these pictures meanwhile
            names = [r["sha256"] for r in db.execute("SELECT sha256 FROM deleted_images")]
            for name in names:
                self.files.delete(name)
            if names:
                self.files.sync()
            db.execute("DELETE FROM deleted_images")
        if not self._rows("SELECT 1 FROM facts WHERE name = ?", DELETING):
            return
        if not self.database.erase():
            log.info("what was deleted is still in the log of the database: another reads there")
            return
        with self.change() as db:
            db.execute("DELETE FROM facts WHERE name = ?", (DELETING,))

    # the database

    def _rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        return self.database.rows(statement, *values)

    def change(self) -> AbstractContextManager[sqlite3.Connection]:
        """All or nothing, and on the disk at the end."""
        return self.database.change()


def _drop_unused(db: sqlite3.Connection, names: Sequence[str], before: float) -> int:
    """The rows of those that no message shows and that came in `before`; how many. Their files are
    noted, to go afterwards.
    """
    dropped = 0
    for sha256 in names:
        gone = db.execute(
            "DELETE FROM images WHERE sha256 = ? AND (unused_since IS NULL OR unused_since < ?) "
            "AND NOT EXISTS (SELECT 1 FROM attachments a WHERE a.sha256 = images.sha256) "
            "AND NOT EXISTS (SELECT 1 FROM image_uploads u WHERE u.sha256 = images.sha256)",
            (sha256, before),
        )
        if gone.rowcount:
            db.execute("INSERT OR IGNORE INTO deleted_images VALUES (?)", (sha256,))
            dropped += 1
    return dropped


def _has_reply(db: sqlite3.Connection, conversation: str, parent: str | None) -> bool:
    """Return whether a message stands under `parent`, None for the conversation itself."""
    query = "SELECT 1 FROM messages WHERE conversation = ? AND parent IS ? LIMIT 1"
    return db.execute(query, (conversation, parent)).fetchone() is not None


def _latest(db: sqlite3.Connection, now: float) -> float:
    """The place in the list of what was changed last: after all others, also where the clock was
    set back.
    """
    highest = db.execute("SELECT MAX(latest) FROM conversations").fetchone()[0] or 0.0
    return max(now, highest + 1e-3)


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, separators=(",", ":"), allow_nan=False)


def _conversation(row: sqlite3.Row) -> Conversation:
    return Conversation(
        row["id"], row["title"], row["head"], row["created"], row["changed"], bool(row["pinned"])
    )


def _image(row: sqlite3.Row, name: str) -> StoredImage:
    return StoredImage(
        row["sha256"], row["kind"], row["bytes"], row["width"], row["height"], name, row["seconds"]
    )


def _message(row: sqlite3.Row, images: tuple[StoredImage, ...]) -> Message:
    options, receipt = (
        # NaN, which earlier versions took from imported files, is no JSON for a browser
        json.loads(row[key], parse_constant=lambda _: None) if row[key] else None
        for key in ("options", "receipt")
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
