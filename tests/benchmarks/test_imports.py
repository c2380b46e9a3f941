"""What benchmarks and tools take from the package is there: most of them are run seldom."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]


def taken(file: Path) -> set[tuple[str, str]]:
    """(module, name) of every import from the package, wherever in the file it stands."""
    tree = ast.parse(file.read_text())
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
        if node.module.partition(".")[0] == "mtmd"
    }


def is_there(module: str, name: str) -> bool:
    try:
        if hasattr(import_module(module), name):
            return True
        import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_what_is_imported_from_the_package_is_there() -> None:
    files = [file for folder in ("benchmarks", "tools") for file in (ROOT / folder).rglob("*.py")]
    requested = {names: file for file in files for names in taken(file)}
    assert len(requested) > 100
    missing = [f"{requested[names]}: {names}" for names in requested if not is_there(*names)]
    assert missing == []
