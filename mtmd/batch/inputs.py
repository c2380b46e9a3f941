"""Which pictures a batch is about: files, folders, patterns and lists, as people name them."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmd.config import IMAGE_SUFFIXES
from mtmd.kernels.errors import OptionError


@dataclass(frozen=True)
class Input:
    """A picture: where it is, and its name in the output, which is that as valid text."""

    path: str

    @property
    def name(self) -> str:
        return os.fsencode(self.path).decode("utf-8", "backslashreplace")


def find_inputs(words: Iterable[str], lists: Sequence[str] = ()) -> list[Input]:
    """Pictures in the order named, each once. `lists` are files with a path on each line, "-" for
    stdin.

    Whether a file that is named exists is found out when it is its turn. Raises OptionError where a
    folder, pattern or list has none.
    """
    named = [path for word in words for path in _expand(word)]
    named += [path for file in lists for path in _read_list(file)]
    if not named:
        raise OptionError(
            "no picture was named; give files, folders, patterns like 'photos/*.jpg', or --list "
            "FILE"
        )
    return [Input(path) for path in dict.fromkeys(named)]


def _expand(word: str) -> list[str]:
    if Path(word).is_dir():
        result = sorted(_pictures_in(Path(word)))
        if not result:
            raise OptionError(
                f"{word}: found a folder without pictures, expected files ending in "
                f"{', '.join(IMAGE_SUFFIXES)}"
            )
        return result
    if glob.has_magic(word) and not Path(word).exists():
        result = sorted(path for path in glob.glob(word, recursive=True) if Path(path).is_file())  # noqa: PTH207  # Path.glob takes no absolute one
        if not result:
            raise OptionError(
                f"{word}: found no file that fits the pattern; check it, ** stands for folders at "
                "any depth"
            )
        return result
    return [word]


def _pictures_in(folder: Path) -> Iterator[str]:
    """At any depth; what is hidden is left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            str(Path(place) / name)
            for name in files
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
        )


def _read_list(file: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise OptionError(
            f"list {file}: cannot be read ({error.strerror}), expected a file with a path on each "
            "line"
        ) from error
    result = [os.fsdecode(line) for line in data.splitlines() if line.strip()]
    if not result:
        raise OptionError(f"list {file}: found no path in it, expected one on each line")
    return result
