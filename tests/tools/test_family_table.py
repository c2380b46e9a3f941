"""The table of families and the list of their names: what needs no checkpoint. That a variant is as
its line says is tested where its checkpoint is built, in tests/families/test_documented.py.
"""

from __future__ import annotations

from pathlib import Path

import family_table
import pytest
from table import ROWS


def test_the_list_of_names_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_table, "REGIONS", family_table.REGIONS[-1:])
    assert family_table.main(["--check"]) == 0, "run `python tools/family_table.py`"


def test_each_row_has_a_line_with_its_notes() -> None:
    lines = family_table.documented("families")
    expected = [(row.name, row.notes, str(len(row.variants))) for row in ROWS.values()]
    assert [(name, notes, count) for name, _, _, notes, count, _ in lines] == expected
    assert family_table.gguf_line() in family_table.MODELS.read_text().splitlines()


def test_tasks_are_of_rows_or_variants_and_have_their_names_on_the_hub() -> None:
    lines = family_table.documented("tasks")
    variants = [name for row in ROWS.values() for name in (row.name, *row.variants)]
    variants += [name for others in family_table.ALSO.values() for name in others]
    assert len({models for models, *_ in lines}) == len(lines)
    for models, _, hub in lines:
        assert models in variants or set(models.split("; ")) <= set(variants)
        assert hub.strip("`") == family_table.HUB.get(models, "")
    assert set(family_table.HUB) <= {models for models, *_ in lines}


def test_another_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "models.md"
    begin, end = family_table.BEGIN.format("tasks"), family_table.END.format("tasks")
    other.write_text(f"# x\n{begin}\n| nothing |\n{end}\nrest\n")
    regions = [(other, "tasks", lambda: iter(["| models |"]))]
    monkeypatch.setattr(family_table, "REGIONS", regions)
    assert family_table.main(["--check"]) == 1
    assert family_table.main([]) == 0 == family_table.main(["--check"])
    assert other.read_text() == f"# x\n{begin}\n| models |\n{end}\nrest\n"
