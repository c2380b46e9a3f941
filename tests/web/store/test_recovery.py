"""Damaged, empty and missing databases: what can be read comes back, pictures stay."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mtmd.prompt.load_image import png_bytes
from mtmd.web.store import recovery
from mtmd.web.store.conversation import branch
from mtmd.web.store.errors import StoreDamagedError, StoreError
from mtmd.web.store.image_files import ImageFiles
from mtmd.web.store.store import Store

ME = "me"
PAGE = 4096
TREES = 12


def picture(number: int) -> bytes:
    return png_bytes(np.full((6, 8, 3), number, np.uint8))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    return folder, write_trees(folder)


@pytest.fixture
def made(template, tmp_path):
    """A data folder in `tmp_path`: conversations of six messages, one with a picture; their ids
    with the ids of messages.
    """
    shutil.copytree(template[0], tmp_path, dirs_exist_ok=True)
    return template[1]


def write_trees(folder: Path) -> dict[str, list[str]]:
    store = Store(folder)
    made: dict[str, list[str]] = {}
    for tree in range(TREES):
        conversation = store.create(ME, f"title {tree}")
        image = store.put_image(picture(tree), 8, 6, f"{tree}.png")
        parent, ids = None, []
        for turn in range(6):
            message = store.add(
                conversation.id,
                parent,
                "assistant" if turn % 2 else "user",
                f"tree{tree}turn{turn} " + "some more words " * (300 if turn == 4 else 10),
                images=[image] if turn == 0 else [],
            )
            parent = message.id
            ids.append(parent)
        made[conversation.id] = ids
    store.close()
    age(folder)
    return made


def age(folder: Path) -> None:
    for path in (folder / "images").iterdir():
        os.utime(path, (1, 1))


def pictures(folder: Path) -> set[str]:
    return {p.name for p in (folder / "images").iterdir()}


def overwrite(path: Path, page: int, data: bytes = b"\xa5") -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        file.write((data * PAGE)[:PAGE])


def root_page(path: Path, name: str) -> int:
    db = sqlite3.connect(path)
    page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
    db.close()
    return int(page) - 1


def leaf_pages(path: Path, name: str) -> list[int]:
    """By their number in the file, from 0: table leaves begin with 0x0d."""
    data, root = path.read_bytes(), root_page(path, name)
    start = root * PAGE
    assert data[start] == 5, "the root has pages below it"
    cells = int.from_bytes(data[start + 3 : start + 5], "big")
    pages = []
    for cell in range(cells):
        at = start + int.from_bytes(data[start + 12 + 2 * cell : start + 14 + 2 * cell], "big")
        pages.append(int.from_bytes(data[at : at + 4], "big") - 1)
    return [*pages, int.from_bytes(data[start + 8 : start + 12], "big") - 1]


def assert_sound(store: Store) -> None:
    assert [r[0] for r in store.database.rows("PRAGMA integrity_check")] == ["ok"]
    assert store.database.rows("PRAGMA foreign_key_check") == []
    with store.change() as db:
        db.execute("INSERT INTO said (said, rank) VALUES ('integrity-check', 1)")
    for conversation in store.conversations(ME):
        messages = store.messages(conversation.id)
        seen: set[str] = set()
        for message in messages:
            assert message.parent is None or message.parent in seen
            seen.add(message.id)
        path = branch({m.id: m for m in messages}, conversation.head)
        assert [m.role for m in path] == [("user", "assistant")[i % 2] for i in range(len(path))]


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
@pytest.mark.usefixtures("made")
def test_without_its_database_every_picture_stays(tmp_path, content):
    before = pictures(tmp_path)
    path = tmp_path / "conversations.db"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for _ in range(2):  # at no later start either
        store = Store(tmp_path)
        store.collect(unused_seconds=-1)
        assert pictures(tmp_path) == before
        assert store.notice and f"{TREES} pictures" in store.notice.text
        store.close()


@pytest.mark.usefixtures("made")
def test_what_is_said_is_not_said_for_ever(tmp_path, monkeypatch):
    (tmp_path / "conversations.db").unlink()
    store = Store(tmp_path)
    assert store.notice and float(store.notice.id) <= time.time()
    now = time.time()
    monkeypatch.setattr(recovery.time, "time", lambda: now + 31 * 86400)
    assert store.notice is None
    store.close()


@pytest.mark.usefixtures("made")
def test_an_unknown_picture_that_comes_again_and_cannot_be_noted_stays(tmp_path, monkeypatch):
    (tmp_path / "conversations.db").unlink()
    store = Store(tmp_path)
    before = pictures(tmp_path)

    def full(_data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.files, "put", full)
    with pytest.raises(StoreError, match="disk full"):
        store.put_image(picture(0), 8, 6)
    assert pictures(tmp_path) == before
    store.close()


def test_a_first_start_has_nothing_to_say(tmp_path):
    store = Store(tmp_path / "data")
    assert store.notice is None
    store.close()


@pytest.mark.usefixtures("made")
def test_an_empty_database_beside_its_log_is_set_aside_with_it(tmp_path):
    path = tmp_path / "conversations.db"
    (tmp_path / "conversations.db-wal").write_bytes(path.read_bytes())
    path.write_bytes(b"")
    store = Store(tmp_path)
    (moved,) = tmp_path.glob("damaged-*")
    assert (moved / "conversations.db-wal").stat().st_size > PAGE
    assert store.notice and moved.name in store.notice.text and len(pictures(tmp_path)) == TREES
    store.close()


@pytest.mark.parametrize("log", [False, True], ids=["", "with a log"])
@pytest.mark.parametrize("size", [100, PAGE], ids=["header", "first page"])
def test_without_its_first_page_all_of_a_database_is_read(made, tmp_path, size, log):
    path = tmp_path / "conversations.db"
    if log:  # as after a crash
        store = Store(tmp_path)
        newest = store.add(next(iter(made)), None, "user", "newest").id
        files = [(p, p.read_bytes()) for p in tmp_path.glob("conversations.db*")]
        store.close()
        for file, content in files:
            if not file.name.endswith("-shm"):
                file.write_bytes(content)
    data = path.read_bytes()
    path.write_bytes(b"\0" * size + data[size:])
    store = Store(tmp_path)
    assert_sound(store)
    result = {c: [m.id for m in store.messages(c)] for c in made}
    assert result == {
        c: [*ids, newest] if log and c == next(iter(made)) else ids for c, ids in made.items()
    }
    assert store.notice and "could not" not in store.notice.text
    store.close()
    assert not list(tmp_path.glob("conversations.[mn]*"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of files by setrlimit are Linux's")
@pytest.mark.usefixtures("made")
def test_a_recovery_without_room_replaces_nothing(tmp_path):
    path = tmp_path / "conversations.db"
    overwrite(path, leaf_pages(path, "messages")[3])
    damaged = path.read_bytes()
    code = """
import resource, signal, sys
from pathlib import Path
from mtmd.web.store.store import Store, StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for size in range(20_000, int(sys.argv[2]) - 40_000, 30_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        Store(Path(sys.argv[1])).close()
        print("not full")
    except StoreError as error:
        assert "disk full" in str(error), error
        print("full")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(len(damaged))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) == {"full", ""} and done.stdout.count("full") > 5
    assert path.read_bytes() == damaged and not list(tmp_path.glob("damaged-*"))
    store = Store(tmp_path)
    assert len(store.conversations(ME)) == TREES
    store.close()


@pytest.mark.usefixtures("made")
def test_of_what_cannot_be_read_at_all_everything_is_kept(tmp_path):
    before, path = pictures(tmp_path), tmp_path / "conversations.db"
    path.write_bytes(b"this is no database" * 1000)
    damaged = path.read_bytes()
    store = Store(tmp_path)
    (moved,) = tmp_path.glob("damaged-*")
    assert (moved / "conversations.db").read_bytes() == damaged
    assert store.conversations(ME) == [] and pictures(tmp_path) == before
    assert store.notice and "damaged" in store.notice.text and moved.name in store.notice.text
    assert str(tmp_path) not in store.notice.text
    store.add(store.create(ME).id, None, "user", "it goes on")
    assert_sound(store)
    store.close()
    again = Store(tmp_path)
    assert again.search(ME, "goes on") and pictures(tmp_path) == before and again.notice
    again.close()


def test_a_damaged_page_of_messages_costs_those_messages_alone(made, tmp_path):
    path = tmp_path / "conversations.db"
    overwrite(path, leaf_pages(path, "messages")[3])
    store = Store(tmp_path)
    assert_sound(store)
    assert {c.id for c in store.conversations(ME)} == set(made)
    texts = {m.id: m.text for c in made for m in store.messages(c)}
    assert set(texts) == {i for ids in made.values() for i in ids}, "indexes know the lost ones"
    lost = [i for i, text in texts.items() if text == recovery.UNREADABLE]
    assert 1 <= len(lost) <= 30
    assert store.notice and f"{len(lost)} message" in store.notice.text
    for conversation, ids in made.items():
        messages = store.messages(conversation)
        assert [m.id for m in messages] == ids
        assert [m.parent for m in messages] == [None, *ids[:-1]]
        saved = [m for m in messages if m.id not in lost]
        assert all(m.text.startswith("tree") for m in saved)
        assert len(messages[0].images) == 1 and store.image_bytes(messages[0].images[0].sha256)
    assert len(pictures(tmp_path)) == TREES
    saved_turns = {text.split()[0] for i, text in texts.items() if i not in lost}
    for tree in range(TREES):
        for turn in range(6):
            result = store.search(ME, f"tree{tree}turn{turn} ")
            assert bool(result) == (f"tree{tree}turn{turn}" in saved_turns)
    store.close()


@pytest.mark.parametrize("table", ["conversations", "images", "attachments"])
def test_a_damaged_table_is_made_anew_from_its_indexes_and_files(made, tmp_path, table):
    path = tmp_path / "conversations.db"
    overwrite(path, root_page(path, table))
    store = Store(tmp_path)
    assert_sound(store)
    assert {c.id for c in store.conversations(ME)} == set(made)
    for tree, (conversation, ids) in enumerate(made.items()):
        messages = store.messages(conversation)
        assert [m.id for m in messages] == ids and store.conversation(ME, conversation).head == ids[
            -1
        ]
        (image,) = messages[0].images
        assert (image.kind, image.width, image.height) == ("image/png", 8, 6)
        assert store.image_bytes(image.sha256) == picture(tree)
    store.collect(unused_seconds=-1)
    assert len(pictures(tmp_path)) == TREES
    store.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("made")
def test_whatever_is_damaged_no_picture_is_lost_and_the_store_works(tmp_path, seed):
    before, path, chance = pictures(tmp_path), tmp_path / "conversations.db", random.Random(seed)
    pages = path.stat().st_size // PAGE
    for _ in range(chance.randrange(1, 8)):
        overwrite(
            path,
            chance.randrange(pages),
            chance.choice([b"\0", b"\xff", b"\x0d\x05", chance.randbytes(PAGE)]),
        )
    content = bytearray(path.read_bytes())
    for _ in range(chance.randrange(40)):  # also in texts, which are no UTF-8 any more
        content[chance.randrange(100, len(content))] = chance.randrange(256)
    path.write_bytes(content)
    if chance.random() < 0.3:
        with path.open("r+b") as file:
            file.truncate(chance.randrange(1, pages) * PAGE + chance.randrange(PAGE))
    store = Store(tmp_path)
    store.collect(unused_seconds=-1)
    assert_sound(store)
    conversation = store.create(ME)
    message = store.add(conversation.id, None, "user", "new words")
    assert pictures(tmp_path) == before and store.search(ME, "new words")
    store.close()
    again = Store(tmp_path)
    assert [m.id for m in again.messages(conversation.id)] == [message.id]
    again.close()


def test_a_row_without_its_picture_says_so(made, tmp_path):
    path = tmp_path / "conversations.db"
    overwrite(path, root_page(path, "images"))
    gone = hashlib.sha256(picture(0)).hexdigest()
    (tmp_path / "images" / gone).unlink()
    store = Store(tmp_path)
    assert_sound(store)
    assert store.messages(next(iter(made)))[0].images == ()
    assert store.notice and "1 picture could not be found" in store.notice.text
    store.close()


@pytest.mark.parametrize("step", ["set_aside", "_drop", "finish_replacing", "replace_database"])
def test_a_crash_in_a_recovery_loses_nothing(made, tmp_path, monkeypatch, step):
    path = tmp_path / "conversations.db"
    overwrite(path, leaf_pages(path, "messages")[3])

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step == "finish_replacing":  # called at the start, too
            calls = []
            real = recovery.finish_replacing
            patch.setattr(
                recovery, step, lambda f: crash() if calls else (calls.append(f), real(f))
            )
        else:
            patch.setattr(recovery, step, crash)
        with pytest.raises(KeyboardInterrupt):
            Store(tmp_path)
    store = Store(tmp_path)
    assert_sound(store)
    assert {c.id for c in store.conversations(ME)} == set(made)
    assert store.notice and len(pictures(tmp_path)) == TREES
    store.close()


@pytest.mark.usefixtures("made")
def test_a_damaged_database_that_another_server_has_open_is_left_to_it(tmp_path):
    other = Store(tmp_path)
    path = tmp_path / "conversations.db"
    overwrite(path, leaf_pages(path, "messages")[3])
    damaged = path.read_bytes()
    with pytest.raises(StoreDamagedError, match="damaged") as caught:
        Store(tmp_path)
    assert str(tmp_path) not in str(caught.value) and path.read_bytes() == damaged
    other.close()


def test_damage_that_is_met_while_serving_is_told_with_what_to_do(made, tmp_path):
    store = Store(tmp_path)
    path = tmp_path / "conversations.db"
    for page in leaf_pages(path, "messages"):
        overwrite(path, page)
    with pytest.raises(StoreDamagedError, match="start the server again"):
        for conversation in made:
            store.messages(conversation)
    with pytest.raises(StoreError):
        store.close()
        Store(tmp_path / "conversations.db")  # a file is no folder
    again = Store(tmp_path)
    assert len(pictures(tmp_path)) == TREES and again.notice
    again.close()


@pytest.mark.parametrize("blocks", ["id > 10", "id = 10"], ids=["its words", "all of it"])
@pytest.mark.usefixtures("made")
def test_a_search_index_that_is_damaged_is_made_anew(tmp_path, blocks):
    store = Store(tmp_path)
    with store.change() as db:
        db.execute(f"UPDATE said_data SET block = randomblob(length(block)) WHERE {blocks}")
    assert len(store.search(ME, "tree3turn2")) == 1
    assert_sound(store)
    store.close()


def test_pictures_of_an_unknown_database_come_back_with_it(made, tmp_path):
    """What our advice was before: to move a damaged database away."""
    path = tmp_path / "conversations.db"
    path.rename(tmp_path / "away.db")
    Store(tmp_path).close()
    path.unlink()
    (tmp_path / "away.db").rename(path)
    store = Store(tmp_path)
    for conversation in made:
        (image,) = store.messages(conversation)[0].images
        assert store.image_bytes(image.sha256)
    assert set(ImageFiles(tmp_path / "images").names()) == pictures(tmp_path)
    store.close()
