"""The folders of the compute floor: what is more general imports nothing that is more special."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kernels"
# Each imports from those before it; files that lie in kernels/ itself count by their names.
ORDER = (
    ("errors", "dtype"),
    ("options", "graph", "quantization", "text"),
    ("checkpoint", "kernel"),
    ("ops",),
    ("layers", "cpu", "gpu"),
    ("backends",),
    ("plan",),
    ("report",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Folders, or files beside them, that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtmd.kernels"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.startswith("mtmd.kernels.")]
        else:
            continue
        yield from (name.split(".")[2] for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_run_down(path):
    own = part_of(path)
    upward = {name for name in imported(path) if name != own and LEVEL[name] >= LEVEL[own]}
    assert not upward, f"{own} imports {', '.join(upward)}"
