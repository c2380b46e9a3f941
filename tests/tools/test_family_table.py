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
    other.write_text(f"# x\n{family_table.BEGIN}\n| nothing |\n{family_table.END}\nrest\n")
    monkeypatch.setattr(family_table, "FILES", {other: lambda: iter(["| models |"])})
    assert family_table.main(["--check"]) == 1
    assert family_table.main([]) == 0 == family_table.main(["--check"])
    assert other.read_text() == f"# x\n{family_table.BEGIN}\n| models |\n{family_table.END}\nrest\n"
