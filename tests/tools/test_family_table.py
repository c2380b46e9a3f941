"""The table of families and the list of their names match the checkpoints that the tests build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import family_table


def test_both_are_up_to_date() -> None:
    """As a script: outside of pytest, which has the tests' folders on its path."""
    command = [sys.executable, "tools/family_table.py", "--check"]
    done = subprocess.run(command, cwd=family_table.ROOT)
    assert done.returncode == 0, "run `python tools/family_table.py`"


def test_another_table_is_found(tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "models.md"
    begin, end = family_table.BEGIN.format("tasks"), family_table.END.format("tasks")
    other.write_text(f"# x\n{begin}\n| nothing |\n{end}\nrest\n")
    regions = [(other, "tasks", lambda: iter(["| models |"]))]
    monkeypatch.setattr(family_table, "REGIONS", regions)
    assert family_table.main(["--check"]) == 1
    assert family_table.main([]) == 0 == family_table.main(["--check"])
    assert other.read_text() == f"# x\n{begin}\n| models |\n{end}\nrest\n"
