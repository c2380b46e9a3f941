"""The README's table of families is the one that the tests' checkpoints give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import family_table


def test_the_readme_is_up_to_date() -> None:
    assert family_table.main(["--check"]) == 0, "run `python tools/family_table.py`"


def test_it_runs_as_a_script() -> None:
    """Outside of pytest, which has the tests' folders on its path."""
    code = "import runpy; runpy.run_path('tools/family_table.py'); import table"
    subprocess.run([sys.executable, "-c", code], cwd=family_table.ROOT, check=True)


def test_another_table_is_found(tmp_path: Path, monkeypatch) -> None:
    other = tmp_path / "README.md"
    other.write_text(f"# x\n{family_table.BEGIN}\n| nothing |\n{family_table.END}\nrest\n")
    monkeypatch.setattr(family_table, "README", other)
    monkeypatch.setattr(family_table, "rows", lambda: iter(["| models |"]))
    assert family_table.main(["--check"]) == 1
    assert family_table.main([]) == 0 == family_table.main(["--check"])
    assert other.read_text() == f"# x\n{family_table.BEGIN}\n| models |\n{family_table.END}\nrest\n"
