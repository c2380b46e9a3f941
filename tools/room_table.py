"""Write the table of folders in CONTRIBUTING.md: each package with the first paragraph of its
docstring.

    .venv/bin/python tools/room_table.py > guide.md && mv guide.md CONTRIBUTING.md
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
ROOMS = ("kernels", "clip", "llm", "mtmd", "web")
HEAD = "| folder | what it holds |\n|---|---|\n"
OTHERS = {
    "web/static/": "Scripts, styles and pictures of the chat page and the diagnostics page.",
    "web/templates/": "HTML of these pages.",
}
"""Folders that are no packages."""


def described() -> dict[str, str]:
    """Return the first paragraph of each package's docstring, "" where it has none."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("__init__.py")]
    texts = {}
    for file in files:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        folder = f"{file.parent.relative_to(ROOT).as_posix()}/"
        texts[folder] = " ".join(text.partition("\n\n")[0].split())
    return texts | OTHERS


def order(folder: str) -> tuple[int, str]:
    return ROOMS.index(folder.partition("/")[0]), folder


def table() -> str:
    """Return the table in Markdown."""
    texts = described()
    return HEAD + "".join(f"| `{name}` | {texts[name]} |\n" for name in sorted(texts, key=order))


def written(guide: str) -> str:
    """Return a guide with the table in place of the one that it has."""
    before, head, rest = guide.partition(HEAD)
    if not head:
        raise SystemExit(f"{GUIDE.name} has no table that begins with {HEAD.splitlines()[0]!r}")
    lines = rest.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return before + table() + "".join(lines[end:])


if __name__ == "__main__":
    print(written(GUIDE.read_text()), end="")
