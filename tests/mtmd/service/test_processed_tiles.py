"""What the model saw of pictures, as it is kept for those who asked about them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtmd.service import processed_tiles
from mtmd.service.processed_tiles import ProcessedTiles

EACH = 3 * 4 * 4


def picture(name: str, tiles: int = 1) -> Any:
    plan = SimpleNamespace(tiles=(np.full((3, 4, 4), len(name), np.uint8),) * tiles)
    return SimpleNamespace(key=(name, None, ""), plan=plan)


def test_the_latest_stay_and_one_that_is_encoded_anew_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processed_tiles, "SAVED_BYTES", 4 * EACH)
    saved = ProcessedTiles()
    saved.add([picture("a"), picture("b", 2), picture("a")], "me")
    assert saved.stored == 3 * EACH
    saved.add([picture("b", 3)], "me")
    assert saved.stored == 4 * EACH and saved.get("a", "", "me") is not None
    saved.add([picture("c", 9)], "me")
    assert saved.stored == 9 * EACH  # alone, and larger than all that may stay
    assert saved.get("a", "", "me") is None and saved.get("b", "", "me") is None


def test_so_many_pictures_stay_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processed_tiles, "PICTURES", 2)
    saved = ProcessedTiles()
    saved.add([picture("a"), picture("b"), picture("c")], "me")
    assert [saved.get(name, "", "me") is not None for name in "abc"] == [False, True, True]
    assert saved.stored == 2 * EACH


def test_a_tenant_sees_what_it_has_asked_about() -> None:
    saved = ProcessedTiles()
    saved.add([picture("a")], "me")
    assert saved.get("a", "", "you") is None
    saved.add([picture("a", 0)], "you")  # encoded before: it comes without tiles
    (tile,) = saved.get("a", "", "you") or ()
    assert tile.shape == (4, 4, 3) and saved.stored == EACH
