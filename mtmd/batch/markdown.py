"""Answers as Markdown files, one for each picture or page."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from mtmd.base.errors import OptionError
from mtmd.batch.output import Row

# A line before the text of a block of a page, that says what and where the block is
_BLOCK = re.compile(
    r"^<\|ref\|>[a-z_]{1,32}<\|/ref\|>[ \t]{0,9}<\|det\|>[^<\n]*<\|/det\|>[ \t]*\n"
    r"(?!<\|ref\|>|\Z)",
    re.M,
)


def check_folder(folder: Path) -> None:
    """Raises OptionError for what is there and is no folder."""
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"markdown {folder}: found a file, expected a folder, which is made")


def markdown_path(folder: Path, name: str) -> Path:
    """Return where the answer of a row of this name belongs: the folders of the picture below
    `folder`, and the number of the page behind its name.
    """
    path, _, page = name.partition("#page=")
    pure = PurePath(path)
    *folders, last = [part for part in pure.parts if part not in (pure.anchor, "..")] or ["answer"]
    return folder.joinpath(*folders, f"{last}{page and f'-{page}'}.md")


def write_markdown(folder: Path, row: Row) -> None:
    """Write the answer of a row; a row with an error has none."""
    if row.text is None:
        return
    path = markdown_path(folder, row.image)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _BLOCK.sub("", row.text)
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
