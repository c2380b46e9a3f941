"""Blocks of tests: those that run one after another and share what they build, which is dropped
after the last of them. A block is a file, unless `group` has made another of it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Hashable
from typing import Any, TypeVar

import pytest

Made = TypeVar("Made")
_BLOCK = pytest.StashKey[Hashable]()
_shared: dict[Hashable, Any] = {}


def once(key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what `make` returns, made once in a block for each key."""
    if key not in _shared:
        _shared[key] = make()
    made: Made = _shared[key]
    return made


def group(items: list[pytest.Item], block: Callable[[pytest.Item], Hashable | None]) -> None:
    """Put tests of one block, of whatever file, where the first of them is; None is the file."""
    places: dict[Hashable, int] = {}
    for item in items:
        if (key := block(item)) is not None:
            item.stash[_BLOCK] = key
        places.setdefault(_block(item), len(places))
    items.sort(key=lambda item: places[_block(item)])


def _block(item: pytest.Item) -> Hashable:
    return item.stash.get(_BLOCK, item.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """Drop what a block shares, and look for garbage while nothing of its last test is referred to.
    What is left is no garbage of the next block: without this every full collection takes a second
    in the end, and tests of memory make hundreds of them.

    A device's thread holds its model for two seconds after the last request, and a model has
    reference cycles: frozen meanwhile, it would stay for good. And Python looks through old objects
    once a quarter as many have become old as the last full collection left: after one that left two
    million, dropped models would stay by the dozen. The second one leaves none.
    """
    result = yield
    if nextitem is None or _block(nextitem) != _block(item):
        _shared.clear()
        gc.collect()
        if all(thread.name != "mtmd device" for thread in threading.enumerate()):
            gc.freeze()
            gc.collect()
    return result
