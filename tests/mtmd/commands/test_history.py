"""`mtmd history`: from a backup to a restored folder, and what it says of damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtmd.web.store.store import Store


@pytest.fixture
def data(tmp_path: Path) -> Path:
    store = Store(tmp_path / "data")
    conversation = store.create("me", "a title")
    image = store.put_image(b"\x89PNG\r\n\x1a\nany bytes", 8, 6)
    store.add(conversation.id, None, "user", "a question", images=[image])
    store.close()
    return tmp_path / "data"


def test_a_backup_is_made_checked_and_restored(mtmd: Any, data: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    done = mtmd("history", "backup", target, "--data", data)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"saved to {target}: 1 conversation, 1 message, 1 picture\n"
    checked = mtmd("history", "check", "--data", target)
    assert checked.code == 0 and checked.out.endswith("nothing is wrong\n")
    (data / "conversations.db").write_bytes(b"no database" * 999)
    result = mtmd("history", "check", "--data", data)
    assert result.code == 1 and "PROBLEM: " in result.out and "history recover" in result.out
    restored = mtmd("history", "restore", target, "--data", data)
    assert restored.code == 0 and "what was there before is in" in restored.out
    assert "1 conversation, 1 message, 1 picture" in restored.out
    result = mtmd("history", "check", "--json", "--data", data)
    assert json.loads(result.out)["problems"] == []


def test_a_damaged_database_is_recovered(mtmd: Any, data: Path) -> None:
    (data / "conversations.db").write_bytes(b"no database" * 999)
    done = mtmd("history", "recover", "--data", data)
    assert done.code == 0 and "every picture is kept" in done.out
    checked = mtmd("history", "check", "--data", data)
    assert checked.code == 0 and "old databases" in checked.out
    assert len(list((data / "images").iterdir())) == 1


def test_unknown_pictures_are_removed_where_nothing_else_is_wrong(mtmd: Any, data: Path) -> None:
    unknown = data / "images" / ("0" * 64)
    unknown.touch(mode=0o600)
    os.utime(unknown, (1, 1))
    content = (data / "conversations.db").read_bytes()
    (data / "conversations.db").write_bytes(b"")
    assert mtmd("history", "check", "--remove-unknown", "--data", data).code == 1
    assert unknown.exists()
    (data / "conversations.db").write_bytes(content)
    done = mtmd("history", "check", "--remove-unknown", "--data", data)
    assert done.code == 0 and "removed 1 picture of" in done.out
    assert not unknown.exists() and len(list((data / "images").iterdir())) == 1


def test_mistakes_are_one_line(mtmd: Any, data: Path, tmp_path: Path) -> None:
    assert (
        "found no conversations"
        in mtmd("history", "backup", tmp_path / "x", "--data", tmp_path).refused()
    )
    assert "give another name" in mtmd("history", "backup", data, "--data", data).refused()
    assert "found no folder" in mtmd("history", "check", "--data", tmp_path / "x").refused()
    store = Store(data)
    assert "stop it first" in mtmd("history", "recover", "--data", data).refused()
    store.close()
    assert "TASK" in mtmd("history").refused()
