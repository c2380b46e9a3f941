"""Tests of one block follow each other, and what they share ends with the last of them."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blocks
import pytest


class Shared:
    """As a model, it refers to itself."""

    def __init__(self) -> None:
        self.me = self


def item(file: str, key: str | None = None) -> Any:
    return SimpleNamespace(path=Path(file), stash=pytest.Stash(), key=key)


def run(test: Any, following: Any) -> weakref.ref[Shared]:
    """What a test makes for its block."""
    around = blocks.pytest_runtest_protocol(test, following)
    next(around)
    made = weakref.ref(blocks.once("shared", Shared))
    assert made() is blocks.once("shared", Shared)
    with pytest.raises(StopIteration):
        around.send(None)
    return made


def test_a_block_is_together_where_its_first_test_is() -> None:
    items = [item("a", "x"), item("a"), item("a", "y"), item("b", "x"), item("b"), item("b", "y")]
    blocks.group(items, lambda one: one.key)  # type: ignore[attr-defined]
    assert [(one.path.name, one.key) for one in items] == [
        ("a", "x"),
        ("b", "x"),
        ("a", None),
        ("a", "y"),
        ("b", "y"),
        ("b", None),
    ]


def test_what_a_block_shares_is_dropped_after_its_last_test() -> None:
    one, other = item("a"), item("b")
    assert run(one, item("a"))() is not None
    assert run(one, other)() is None
    assert run(other, None)() is None


def test_what_a_devices_thread_holds_is_collected_later() -> None:
    ending, held = threading.Event(), list[Shared]()

    def hold() -> None:
        ending.wait()
        held.clear()

    thread = threading.Thread(target=hold, name="mtmd device")
    thread.start()
    try:
        made = weakref.ref(blocks.once("shared", Shared))
        held.append(blocks.once("shared", Shared))
        assert run(item("a"), item("b"))() is not None
    finally:
        ending.set()
        thread.join()
    run(item("b"), item("c"))
    assert made() is None
