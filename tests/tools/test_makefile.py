"""The Makefile's paths."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_that_the_makefile_names_are_there() -> None:
    """pytest runs nothing at all where one of its arguments is missing."""
    paths = set(re.findall(r"(?<![\w/])tests/[\w./*-]+", (ROOT / "Makefile").read_text()))
    assert "tests/test_layering.py" in paths
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []
