"""The table of folders in CONTRIBUTING.md is the one that the packages' docstrings make."""

from __future__ import annotations

import room_table


def test_every_package_says_what_it_holds() -> None:
    texts = room_table.described()
    assert [folder for folder, text in texts.items() if not text] == []
    assert [folder for folder, text in texts.items() if not text.endswith(".")] == []


def test_the_guide_has_this_table() -> None:
    guide = room_table.GUIDE.read_text()
    assert room_table.written(guide) == guide, "write it anew: tools/room_table.py"
