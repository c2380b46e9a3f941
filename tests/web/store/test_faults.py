"""A database that another program holds, a folder that may not be written, a clock that was set
back, a disk that is full at any write.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time

import pytest

from mtmd.commands.serve import _describe
from mtmd.web.store import database, folder
from mtmd.web.store import store as store_module
from mtmd.web.store.errors import StoreBusyError, StoreError
from mtmd.web.store.store import Store

ME = "me"
PICTURE = b"\x89PNG\r\n\x1a\nany bytes"
POSIX = pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def stored(store, tmp_path, monkeypatch):
    """Another program is in the middle of a change of the store's database."""
    conversation = store.create(ME, "a title")
    store.add(conversation.id, None, "user", "some words")
    monkeypatch.setattr(database, "WAIT_S", 0.3)
    monkeypatch.setattr(store_module.Store, "change", lambda s: s.database.change(wait_s=0.3))
    other = sqlite3.connect(tmp_path / "data" / "conversations.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    yield conversation
    other.execute("ROLLBACK")
    other.close()


# held by another


def test_who_reads_does_not_wait_for_who_writes(store, stored):
    for _ in range(20):
        assert [c.id for c in store.conversations(ME)] == [stored.id]
        assert store.messages(stored.id)[0].text == "some words"
        assert store.search(ME, "words") and store.conversation(ME, stored.id) and not store.notice


def test_who_writes_is_told_that_it_is_busy(store, stored):
    with pytest.raises(StoreBusyError, match="another program is using it"):
        store.rename(stored.id, "another")
    assert store.conversation(ME, stored.id).title == "a title"


def test_who_waits_for_this_process_is_told_after_the_same_time(store):
    """Not one after another, each with a wait of its own."""
    with store.change():
        reported = []

        def write():
            try:
                with store.database.change(wait_s=0.01):
                    reported.append(None)
            except StoreBusyError as error:
                reported.append(str(error))

        threads = [threading.Thread(target=write) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # while the change goes on
    assert len(reported) == 12 and all(t and "others have been writing" in t for t in reported)


def test_reads_go_on_while_this_process_writes(store):
    conversation = store.create(ME, "a title")
    store.add(conversation.id, None, "user", "before")
    with store.change() as db:
        db.execute("UPDATE messages SET text = 'after'")
        result = []
        reader = threading.Thread(target=lambda: result.extend(store.messages(conversation.id)))
        reader.start()
        reader.join(timeout=10)
        assert [m.text for m in result] == ["before"]
    assert store.messages(conversation.id)[0].text == "after"


def test_a_second_server_on_a_folder_is_told(store, tmp_path):
    assert not store.shared and not _describe(store)
    second = Store(tmp_path / "data")
    assert second.shared and "another server" in _describe(second)[0]
    second.close()


def test_a_folder_that_another_has_to_itself_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "WAIT_S", 0.0)
    lock = folder.FolderLock(tmp_path)
    with pytest.raises(StoreBusyError, match="is using the data folder"):
        folder.FolderLock(tmp_path, wait_s=0.0)
    lock.close()
    folder.FolderLock(tmp_path).close()


# modes and owners


@POSIX
def test_nothing_in_the_folder_is_open_to_others(tmp_path):
    data = tmp_path / "there before"
    data.mkdir()
    data.chmod(0o755)
    (data / "images").mkdir()
    (data / "images").chmod(0o755)
    (data / "conversations.db").touch(0o644)
    umask = os.umask(0)
    try:
        store = Store(data)
        store.add(store.create(ME).id, None, "user", "x", images=[store.put_image(PICTURE, 1, 1)])
        result = {p.name: stat.S_IMODE(p.stat().st_mode) for p in data.rglob("*")}
        assert result.pop("images") == 0o700
        assert len(result) == 5 and set(result.values()) == {0o600}, result
        assert stat.S_IMODE(data.stat().st_mode) == 0o755, "the folder is its owner's affair"
        store.close()
    finally:
        os.umask(umask)


READ_ONLY = """
import os, sys
from pathlib import Path
from mtmd.web.store.store import Store
from mtmd.web.store.errors import StoreReadOnlyError
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    Store(Path(sys.argv[1]))
except StoreReadOnlyError as error:
    print(error)
"""


@POSIX
@pytest.mark.parametrize("filled", [True, False])
def test_a_folder_that_may_not_be_written_is_named_so(tmp_path, filled):
    data = tmp_path / "data"
    data.mkdir()
    if filled:
        Store(data).close()
    for path in (data / "images", *data.glob("conversations.*")):
        if path.exists():
            path.chmod(0o555 if path.is_dir() else 0o444)
    data.chmod(0o555)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path.name.startswith("pytest-"):
            path.chmod(path.stat().st_mode | 0o011)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(data)], capture_output=True, text=True, check=True
        )
        assert "read-only" in done.stdout and "disk full" not in done.stdout
        assert str(data) not in done.stdout
    finally:
        data.chmod(0o755)
        if filled:
            (data / "images").chmod(0o755)


def test_a_file_in_place_of_the_folder_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="opened"):
        Store(tmp_path / "file")


# the clock


def test_the_list_is_in_order_whatever_the_clock_does(store, monkeypatch):
    now, ids = time.time(), []
    for at in (now, now - 86400, now - 40 * 86400, now + 10, now - 5):
        monkeypatch.setattr(store_module.time, "time", lambda at=at: at)
        conversation = store.create(ME)
        ids.append(conversation.id)
        for text in ("one", "two"):
            store.add(conversation.id, None, "user", text)
        assert [m.text for m in store.messages(conversation.id)] == ["one", "two"]
    assert [c.id for c in store.conversations(ME)] == ids[::-1]


def test_a_draft_of_the_future_does_not_stay_for_ever(store, monkeypatch):
    now = time.time()
    monkeypatch.setattr(store_module.time, "time", lambda: now + 1e9)
    image = store.put_image(PICTURE, 1, 1)
    monkeypatch.setattr(store_module.time, "time", lambda: now)
    assert store.collect() == 0 and store.image(image.sha256)
    monkeypatch.setattr(store_module.time, "time", lambda: now + 7200)
    assert store.collect() == 1 and not store.image(image.sha256)


# a full disk

FILLED = """
import json, os, resource, signal, sys
from pathlib import Path
from mtmd.web.store.store import Store
from mtmd.web.store.errors import StoreFullError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
folder = Path(sys.argv[1])
store = Store(folder)
words = "all the words of a message "
known, refused, doomed = {}, [], None

def limited(done, *arguments, **more):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        return done(*arguments, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)

for round in range(400):
    store.database.write_back()
    limit, step = round * 8240, "create"  # two pages more in the log
    try:
        conversation = limited(store.create, "me", f"title {round}").id
        step = "picture"
        image = limited(store.put_image, b"\\x89PNG\\r\\n\\x1a\\n" + f"{round} ".encode() * 2000, 8, 6)
        step = "message"
        message = limited(
            store.add, conversation, None, "user", f"said {round} " + words * 40, images=[image]
        )
        known[message.id] = ("said", round, image.sha256)
        step = "answer"
        answer = limited(store.add, conversation, message.id, "assistant", "", state="running")
        known[answer.id] = ("", round, None)
        step = "saved"
        limited(store.save_text, answer.id, f"saved {round} " + words * 40)
        known[answer.id] = ("saved", round, None)
        step = "finished"
        limited(store.finish, answer.id, f"finished {round} " + words * 80, "complete")
        known[answer.id] = ("finished", round, None)
        step = "shown"
        limited(store.show, conversation, message.id)
        step = "deleted"
        limited(store.delete, conversation)
        del known[message.id], known[answer.id]
        step = "nothing"
        doomed = round
        break
    except StoreFullError:
        pass
    refused.append(step)
    assert not [p.name for p in (folder / "images").iterdir() if "." in p.name]
store.close()
store = Store(folder)
found = {m.id: m for c in store.conversations("me") for m in store.messages(c.id)}
for id_, (begins, number, sha256) in known.items():
    text = found[id_].text
    assert text.startswith(f"{begins} {number} ") if begins else text == "", text
    if sha256:
        assert found[id_].images[0].sha256 == sha256 and store.image_bytes(sha256)
assert store.database.rows("PRAGMA integrity_check")[0][0] == "ok"
assert store.database.rows("PRAGMA foreign_key_check") == []
with store.change() as db:
    db.execute("INSERT INTO said (said, rank) VALUES ('integrity-check', 1)")
assert store.search("me", "the words") or not known
rows = {row["sha256"] for row in store.database.rows("SELECT sha256 FROM images")}
assert set(store.files.names()) == rows, "no file without a row"
store.close()
left = f"said {doomed} ".encode()
assert not [p for p in folder.rglob("*") if p.is_file() and left in p.read_bytes()]
print(json.dumps(sorted(set(refused))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of files by setrlimit are Linux's")
def test_a_disk_that_is_full_at_any_write_loses_nothing_that_was_acknowledged(tmp_path):
    """The largest size of a file grows step by step, so that each write of a conversation in turn
    is the first that fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", FILLED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = {"create", "picture", "message", "answer", "saved", "finished", "deleted"}
    assert steps <= set(json.loads(done.stdout))
