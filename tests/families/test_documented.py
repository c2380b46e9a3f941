"""Every variant is as docs/models.md says of it: its files of the code, its tasks. What share of it
decodes as machine code is tested in test_native.py, where its plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from common import Oracle
from family_table import ALSO, documented, file_of
from table import CASES, ROWS

from mtmd.checkpoint.open import open_checkpoint
from mtmd.clip.tasks import tasks_of

Build = Callable[[str, str], Oracle]
MADE = "run `python tools/family_table.py`"


@cache
def files() -> dict[str, tuple[list[str], list[str]]]:
    """Of pictures and of text, by the name of a row."""
    lines = documented("families")
    return {name: (seen.split(", "), text.split(", ")) for name, seen, text, *_ in lines}


@cache
def tasks() -> dict[str, list[str]]:
    """By the name of a row, or of those of its variants that are alike."""
    lines = documented("tasks")
    return {
        name: given.replace("`", "").split(", ")
        for models, given, _ in lines
        for name in (models, *models.split("; "))
    }


@pytest.mark.parametrize(("row", "variant"), CASES)
def test_files_and_tasks(build: Build, row: str, variant: str) -> None:
    checkpoint = open_checkpoint(build(row, variant).folder)
    name, vision = ROWS[row].name, checkpoint.vision
    of_pictures, of_text = files()[name]
    assert file_of(checkpoint.text) in of_text, MADE
    assert (file_of(vision) in of_pictures) if vision else not tasks_of(vision), MADE
    expected = tasks().get(name) or tasks().get(variant, [])
    assert list(tasks_of(vision)) == expected, MADE
    if variant == next(iter(ROWS[row].variants)):
        for other, changes in ALSO.get(name, {}).items():
            assert vision is not None
            assert list(tasks_of(replace(vision, **changes))) == tasks()[other], MADE  # type: ignore[type-var]
