"""What is deleted is in no file of the data folder any more."""

from __future__ import annotations

import random
import sqlite3
import threading
from pathlib import Path

import pytest

from mtmd.web.store import store as store_module
from mtmd.web.store.conversation import RUNNING
from mtmd.web.store.errors import StoreError
from mtmd.web.store.store import Store

ME = "me"
# Three letters are one entry of the search index; these are in no other text, and share no bytes.
SIGN = "\U0001f9ff\u0e50\U00013051"
PARTS = [SIGN.encode(), SIGN[1:].encode(), SIGN[:2].encode()]


def picture(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + random.Random(number).randbytes(3000)


def holding(folder: Path, *requested: bytes) -> list[str]:
    """Files that have one of these bytes in them."""
    return sorted(
        p.name
        for p in folder.rglob("*")
        if p.is_file() and any(w in p.read_bytes() for w in requested)
    )


def talk(store: Store, words: str, image: bytes | None = None) -> str:
    conversation = store.create(ME, f"about {words}")
    images = [store.put_image(image, 8, 6, f"{words}.png")] if image else []
    first = store.add(conversation.id, None, "user", f"say {words} " * 20, images=images)
    answer = store.add(
        conversation.id, first.id, "assistant", "", state=RUNNING, options={"system": words}
    )
    for part in range(1, 30, 7):
        store.save_text(answer.id, f"{words} it is {words} " * part)
    store.finish(answer.id, f"{words} to the end", "complete", error=words)
    return conversation.id


def test_what_is_deleted_is_in_no_file(tmp_path):
    store = Store(tmp_path)
    saved = talk(store, "others", picture(1))
    id_ = talk(store, SIGN, picture(2))
    talk(store, "more", picture(3))
    assert len(holding(tmp_path, *PARTS)) >= 1 and len(holding(tmp_path, picture(2))) == 1
    store.delete(id_)
    assert holding(tmp_path, *PARTS, picture(2)[100:140]) == []
    assert len(list((tmp_path / "images").iterdir())) == 2
    assert store.search(ME, "others to")[0].conversation.id == saved
    store.close()
    assert holding(tmp_path, *PARTS, picture(2)[100:140]) == []
    assert len(holding(tmp_path, picture(1), picture(3))) == 2


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_written_before_and_after(tmp_path, seed):
    """Pages split, move and are used again: of none a copy is left."""
    chance, store = random.Random(seed), Store(tmp_path)
    ids: dict[int, str] = {}
    for number in range(40):
        words = f"{chr(0x13000 + 2 * number)}{chr(0x1F300 + 2 * number)}{chr(0x4E00 + 3 * number)}"
        conversation = store.create(ME, words)
        for _ in range(chance.randrange(1, 4)):
            store.add(conversation.id, None, "user", f"{words} x " * chance.randrange(1, 400))
        ids[number] = conversation.id
        if chance.random() < 0.4:
            gone = chance.choice(list(ids))
            store.delete(ids.pop(gone))
            deleted = chr(0x1F300 + 2 * gone) + chr(0x4E00 + 3 * gone)
            assert holding(tmp_path, deleted.encode()) == []
    for number in ids:
        words = f"{chr(0x13000 + 2 * number)}{chr(0x1F300 + 2 * number)}{chr(0x4E00 + 3 * number)}"
        assert [h.conversation.id for h in store.search(ME, words)] == [ids[number]]
    store.close()


def test_a_picture_that_another_conversation_shows_stays(tmp_path):
    store = Store(tmp_path)
    first, second = talk(store, "one", picture(1)), talk(store, "two", picture(1))
    store.delete(first)
    assert len(holding(tmp_path, picture(1))) == 1
    store.delete(second)
    assert holding(tmp_path, picture(1)) == []
    store.close()


def test_a_reader_in_the_way_puts_it_off_and_not_out(tmp_path):
    store = Store(tmp_path)
    id_ = talk(store, SIGN, picture(1))
    reader = sqlite3.connect(tmp_path / "conversations.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM messages").fetchone()
    store.delete(id_)
    assert store.conversation(ME, id_) is None and not store.search(ME, SIGN)
    reader.execute("COMMIT")
    reader.close()
    store.put_image(picture(2), 8, 6)
    store.collect()
    assert holding(tmp_path, *PARTS) == []
    store.close()


@pytest.mark.parametrize("step", ["files", "erase"])
def test_a_crash_after_a_deletion_is_made_good_by_the_next_start(tmp_path, monkeypatch, step):
    store = Store(tmp_path)
    id_ = talk(store, SIGN, picture(1))

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step == "files":
            patch.setattr(store.files, "delete", crash)
        else:
            patch.setattr(store.database, "erase", crash)
        with pytest.raises(KeyboardInterrupt):
            store.delete(id_)
    store.database.close()
    store._close_lock()
    again = Store(tmp_path)
    assert again.conversation(ME, id_) is None
    assert holding(tmp_path, *PARTS, picture(1)[100:140]) == []
    again.close()


def test_a_deletion_that_cannot_be_written_loses_no_picture(tmp_path, monkeypatch):
    store = Store(tmp_path)
    id_ = talk(store, "words", picture(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_drop_unused", full)
        with pytest.raises(StoreError, match="disk full"):
            store.delete(id_)
    (image,) = store.messages(id_)[0].images
    assert store.image_bytes(image.sha256) == picture(1)
    with monkeypatch.context() as patch:
        patch.setattr(store.files, "delete", full)
        store.delete(id_)  # for whoever asks the store it is gone
    assert store.messages(id_) == [] and store.image_bytes(image.sha256) is None
    store.collect()
    assert list((tmp_path / "images").iterdir()) == []
    store.close()


def test_a_picture_that_comes_again_while_it_is_deleted_is_there(tmp_path, monkeypatch):
    """Between the deletion of the rows and that of the files."""
    store = Store(tmp_path)
    id_ = talk(store, "words", picture(1))
    finish = store._finish_deletion

    def meanwhile():
        thread = threading.Thread(target=store.put_image, args=(picture(1), 8, 6))
        thread.start()
        thread.join()
        finish()

    monkeypatch.setattr(store, "_finish_deletion", meanwhile)
    store.delete(id_)
    assert len(holding(tmp_path, picture(1))) == 1
    store.close()
