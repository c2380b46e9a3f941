"""The tests that docs/security.md names are there, and its links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", GUIDE)))


def test_every_guarantee_has_tests() -> None:
    table = GUIDE.partition("| guarantee | tests |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = table.splitlines()
    assert len(rows) > 20
    assert [row for row in rows if "::test_" not in row.split("|")[2]] == []
    assert table.count("::") == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", table))


@pytest.mark.parametrize("file, name", NAMED, ids=[name for _, name in NAMED])
def test_tests_that_are_named_are_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([\w/.#-]+)\)", GUIDE):
        file, _, heading = target.partition("#")
        text = (ROOT / "docs" / file).read_text()
        headings = {
            h.strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)
        }
        assert not heading or heading in headings, target
