"""Copies of a data folder, and what a check finds in one."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from pathlib import Path

import pytest

from mtmd.web.store import backup as backup_module
from mtmd.web.store import recovery
from mtmd.web.store.backup import backup, recover_folder, restore
from mtmd.web.store.check import check, remove_unknown
from mtmd.web.store.errors import StoreBusyError, StoreError
from mtmd.web.store.store import Store

ME = "me"


def picture(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + number.to_bytes(4, "big") * 500


def talk(store: Store, number: int) -> str:
    conversation = store.create(ME, f"title {number}")
    image = store.put_image(picture(number), 8, 6, "a.png")
    requested = store.add(conversation.id, None, "user", f"question {number}", images=[image])
    store.add(conversation.id, requested.id, "assistant", f"answer {number}")
    return conversation.id


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    store = Store(folder)
    for number in range(3):
        talk(store, number)
    store.close()
    return folder


def reported(store: Store) -> dict[str, list[str]]:
    result = {}
    for conversation in store.conversations(ME):
        messages = store.messages(conversation.id)
        for image in messages[0].images:
            assert store.image_bytes(image.sha256)
        result[conversation.title] = [m.text for m in messages]
    return result


def reopened(folder: Path) -> dict[str, list[str]]:
    store = Store(folder)
    result = reported(store)
    store.close()
    return result


def problems(folder: Path) -> str:
    return "\n".join(check(folder).problems)


# backup and restore


@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_backup_is_whole_closed_to_others_and_can_be_served(data, tmp_path, monkeypatch, links):
    if not links:

        def other_disk(*_):
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(Path, "hardlink_to", other_disk)
    target = tmp_path / "backups" / "monday"
    copied = backup(data, target)
    assert (copied.conversations, copied.messages, copied.pictures, copied.missing) == (3, 6, 3, 0)
    assert {p.name for p in target.iterdir()} == {"conversations.db", "images"}
    if os.name == "posix":
        modes = {stat.S_IMODE(p.stat().st_mode) for p in target.rglob("*") if p.is_file()}
        assert modes == {0o600} and stat.S_IMODE(target.stat().st_mode) == 0o700
    assert check(target).problems == check(data).problems == ()
    assert [p.name for p in (tmp_path / "backups").iterdir()] == ["monday"]
    assert reopened(target) == reopened(data)


def test_a_backup_of_what_a_server_writes_is_of_one_moment(data, tmp_path):
    store, going, made = Store(data), threading.Event(), []

    def write():
        number = 100
        while not going.is_set():
            made.append(talk(store, number))
            if number % 3 == 0:
                store.delete(made.pop(0))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for index in range(4):
            target = tmp_path / f"backup{index}"
            copied = backup(data, target)
            assert copied.missing == 0 and check(target).problems == (), check(target)
            assert check(data).problems == ()
            names = {p.name for p in (target / "images").iterdir()}
            assert len(names) == copied.pictures
            for texts in reopened(target).values():
                assert texts and texts[0].startswith("question")
    finally:
        going.set()
        thread.join()
        store.close()


def test_a_backup_keeps_what_is_deleted_afterwards(data, tmp_path):
    before = reopened(data)
    backup(data, tmp_path / "backup")
    store = Store(data)
    for conversation in store.conversations(ME):
        store.delete(conversation.id)
    store.close()
    assert list((data / "images").iterdir()) == []
    assert check(tmp_path / "backup").problems == () and reopened(tmp_path / "backup") == before


def test_what_is_at_the_place_of_a_backup_stays(data, tmp_path):
    target = tmp_path / "backup"
    target.mkdir()
    backup(data, target)  # an empty folder will do
    with pytest.raises(StoreError, match="give another name"):
        backup(data, target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="give another name"):
        backup(data, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_backup_that_fails_leaves_nothing(data, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(backup_module, "_copy_database", full)
    with pytest.raises(StoreError, match="disk full"):
        backup(data, tmp_path / "backup")
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_what_is_no_data_folder_is_named(tmp_path):
    for call in (
        lambda: backup(tmp_path, tmp_path / "x"),
        lambda: restore(tmp_path, tmp_path / "x"),
    ):
        with pytest.raises(StoreError, match="found no conversations"):
            call()


@pytest.mark.parametrize("there", ["nothing", "other", "damaged", "empty"])
def test_a_backup_is_restored(data, tmp_path, there):
    before = reopened(data)
    backup(data, tmp_path / "backup")
    target = tmp_path / "new" if there == "nothing" else data
    if there == "other":
        store = Store(data)
        for conversation in store.conversations(ME):
            store.delete(conversation.id)
        talk(store, 7)
        store.close()
    elif there == "damaged":
        (data / "conversations.db").write_bytes(b"no database " * 1000)
    elif there == "empty":
        (data / "conversations.db").write_bytes(b"")
    copied = restore(tmp_path / "backup", target)
    assert (copied.conversations, copied.pictures, copied.missing) == (3, 3, 0)
    assert reopened(target) == before and check(target).problems == ()
    moved = [p for p in target.iterdir() if p.name.startswith("replaced-")]
    assert [p.name for p in moved] == ([copied.set_aside] if there in ("other", "damaged") else [])
    if there == "other":  # and back again: its picture is still there
        restore(moved[0], data)
        assert reopened(data) == {"title 7": ["question 7", "answer 7"]}


def test_nothing_is_replaced_under_a_server(data, tmp_path):
    backup(data, tmp_path / "backup")
    store = Store(data)
    for call in (lambda: restore(tmp_path / "backup", data), lambda: recover_folder(data)):
        with pytest.raises(StoreBusyError, match="stop it first"):
            call()
    talk(store, 9)
    store.close()
    recovered = recover_folder(data)
    assert (recovered.conversations, recovered.messages, recovered.unreadable) == (4, 8, 0)
    assert len(reopened(data)) == 4


def test_a_damaged_or_newer_backup_replaces_nothing(data, tmp_path):
    before = reopened(data)
    backup(data, tmp_path / "backup")
    path = tmp_path / "backup" / "conversations.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="version 99"):
        restore(tmp_path / "backup", data)
    path.write_bytes(path.read_bytes()[:5000] + b"\xa5" * 30000)
    with pytest.raises(StoreError, match="damaged"):
        restore(tmp_path / "backup", data)
    assert reopened(data) == before and not list(data.glob("replaced-*"))


def test_a_restore_that_is_cut_off_leaves_one_of_both(data, tmp_path, monkeypatch):
    before = reopened(data)
    backup(data, tmp_path / "backup")
    store = Store(data)
    talk(store, 7)
    store.close()

    def crash(*_):
        raise KeyboardInterrupt

    for step, after in (
        ("set_aside", {**before, "title 7": ["question 7", "answer 7"]}),
        ("_drop", before),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(recovery, step, crash)
            with pytest.raises(KeyboardInterrupt):
                restore(tmp_path / "backup", data)
        assert reopened(data) == after


# check


def test_a_sound_folder_has_no_problems(data):
    result = check(data)
    assert (result.conversations, result.messages, result.pictures) == (3, 6, 3)
    assert result.problems == () and result.notes == () and result.unknown == 0
    assert result.picture_bytes == 3 * len(picture(0))


def test_each_kind_of_damage_is_told(data):
    first, second, _ = sorted((data / "images").iterdir())
    first.unlink()
    second.write_bytes(b"other bytes")
    assert "1 of 3 pictures are missing" in problems(data)
    assert "1 of 3 pictures are damaged" in problems(data) and second.name in problems(data)
    db = sqlite3.connect(data / "conversations.db", isolation_level=None)
    db.execute("UPDATE messages SET parent = 'nothing' WHERE parent IS NOT NULL")
    db.execute("UPDATE conversations SET head = 'nothing'")
    assert "6 rows refer to rows that are not there" in problems(data)
    db.execute("UPDATE said_data SET block = zeroblob(length(block)) WHERE id > 10")
    db.close()
    assert "search index" in problems(data)
    recover_folder(data)
    assert "rows" not in problems(data) and "index" not in problems(data)
    path = data / "conversations.db"
    db = sqlite3.connect(path)
    (page,) = db.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'messages_by_parent'"
    ).fetchone()
    db.close()
    content, empty = path.read_bytes(), b"\x0a\0\0\0\0\x10\0\0".ljust(4096, b"\0")
    path.write_bytes(content[: 4096 * (page - 1)] + empty + content[4096 * page :])
    assert "the database is damaged: wrong # of entries in index" in problems(data)
    recover_folder(data)
    assert "the database" not in problems(data)
    path.write_bytes(b"no database " * 1000)
    assert "cannot be read" in problems(data)
    path.write_bytes(b"")
    assert "no database" in problems(data)


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_what_others_may_read_is_told(data):
    (data / "conversations.db").chmod(0o644)
    assert "may read conversations.db" in problems(data)
    Store(data).close()
    assert problems(data) == ""


def test_unknown_pictures_are_told_and_removed_on_request_alone(data):
    known = {p.name for p in (data / "images").iterdir()}
    old, new = data / "images" / ("0" * 64), data / "images" / ("1" * 64)
    for path in (old, new):
        path.write_bytes(b"12345")
        path.chmod(0o600)
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    result = check(data)
    assert (result.unknown, result.unknown_bytes, result.problems) == (1, 5, ())
    assert "--remove-unknown" in result.notes[0] and old.exists()
    assert remove_unknown(data) == 1
    assert {p.name for p in (data / "images").iterdir()} == known | {new.name}


def test_a_check_changes_nothing(data):
    (data / "images" / "x.part").touch()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in data.rglob("*") if p.is_file()}
    check(data)
    after = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in data.rglob("*") if p.is_file()}
    assert {p: s for p, s in after.items() if p.suffix not in (".db-wal", ".db-shm")} == before
