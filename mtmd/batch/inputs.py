"""Describes which pictures, videos and recordings a batch is about: files, folders, patterns and
lists, as people name them.
"""

from __future__ import annotations

import codecs
import glob
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from mtmd.base.errors import MtmdError, OptionError, VideoError
from mtmd.base.text import printable
from mtmd.prompt.picture_paths import (
    AUDIO_SUFFIXES,
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    check_path,
    user_path,
)
from mtmd.prompt.url_kinds import is_address, is_url, url_identity

SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
PARTS_MAX = 100_000  # of one video
SHOWN = 4  # endings of skipped files that are named


@dataclass(frozen=True)
class Input:
    """A picture, a video or audio: where it is, a path, a data URL or an address of the web, and
    its name in the output, which is that as valid text, of URLs without secrets; of a part of a
    video, from `start` to `end` seconds, with these behind it (W3C, Media Fragments URI 1.0); of a
    `page` of a PDF, from 1 on, with that (RFC 8118). `data`: what came from a pipe.
    """

    path: str
    start: float | None = None
    end: float | None = None
    data: bytes | None = field(default=None, repr=False)
    page: int | None = None

    @property
    def is_url(self) -> bool:
        return is_url(self.path)

    @property
    def name(self) -> str:
        if self.is_url:
            return url_identity(self.path)
        name = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        if self.page is not None:
            return f"{name}#page={self.page}"
        return name if self.end is None else f"{name}#t={self.start or 0:g},{self.end:g}"


@dataclass(frozen=True)
class Inputs:
    """The pictures, each once, in the order named. `skipped` counts, by their ending, the files of
    folders that were not taken for pictures.
    """

    inputs: tuple[Input, ...]
    skipped: Mapping[str, int]

    @property
    def reported(self) -> str:
        """Return what was skipped, "" for nothing."""
        return describe(self.skipped)


def describe(skipped: Mapping[str, int]) -> str:
    """Files of folders that were skipped, in words, "" for none."""
    count = sum(skipped.values())
    if not count:
        return ""
    by_number = sorted(skipped.items(), key=lambda kind: (-kind[1], kind[0]))
    kinds = ", ".join(f"{n} {kind or 'without an ending'}" for kind, n in by_number[:SHOWN])
    more = ", and others" if len(by_number) > SHOWN else ""
    what = f"{count} files whose names do" if count > 1 else "a file whose name does"
    return f"skipped {what} not end like a picture's: {kinds}{more}"


def find_inputs(
    words: Iterable[str],
    lists: Sequence[str] = (),
    endings: tuple[str, ...] = SUFFIXES,
    piped: bytes | None = None,
    audio: bool = False,
) -> Inputs:
    """Return what `words` (files, folders, patterns, URLs) and `lists` name; the latter are files
    with a path or URL on each line, "-" for stdin. Of folders, files with one of `endings` are
    taken, and, with `audio`, recordings of those that have none of them. The word "-" is `piped`,
    where something was.

    Whether a file that is named exists is found out when it is its turn. Raises OptionError where a
    folder, pattern or list has none.
    """
    skipped: Counter[str] = Counter()
    kinds = (endings, AUDIO_SUFFIXES) if audio else (endings,)
    named: list[Input] = []
    for word in words:
        if word == "-" and piped is not None:
            named.append(Input("standard input", data=piped))
        else:
            named += map(Input, _expand(_plain(word), skipped, kinds))
    named += [Input(_plain(path)) for file in lists for path in _read_list(file)]
    if not named:
        raise OptionError(
            "no picture was named; give files, folders, patterns like 'photos/*.jpg', or --list "
            "FILE"
        )
    return Inputs(tuple(dict.fromkeys(named)), skipped)


def check_urls(inputs: Iterable[Input], remote: bool) -> None:
    """Raises ImageError for an address of the web, unless `remote` ones are fetched."""
    for one in inputs:
        if is_address(one.path) and not remote:
            check_path(one.path)


def in_parts(inputs: Iterable[Input], every: float, isolate: bool = False) -> list[Input]:
    """Each video in parts of `every` seconds, of which the last may be shorter; pictures, and what
    cannot be read, as they are. Raises OptionError for more parts than `PARTS_MAX` of one video.
    """
    from mtmd.clip.video.footage import VideoFile
    from mtmd.prompt.video_input import is_video

    result: list[Input] = []
    for one in inputs:
        seconds = 0.0
        if is_video(one.path):
            with (
                suppress(VideoError, OSError),
                VideoFile(one.path, isolate=isolate).opened() as reader,
            ):
                seconds = reader.facts.seconds
        count = ceil(seconds / every - 1e-6)
        if count > PARTS_MAX:
            raise OptionError(
                f"every: found {every:g} s, {count:,} parts of {printable(one.path)}, expected at "
                f"most {PARTS_MAX:,}; make it longer"
            )
        ends = [min((i + 1) * every, seconds) for i in range(count)]
        result += [Input(one.path, i * every, end) for i, end in enumerate(ends)] or [one]
    return result


def in_pages(inputs: Iterable[Input], isolate: bool = False) -> list[Input]:
    """Each PDF page by page; others, and what cannot be read, as they are. Raises OptionError for
    a PDF where the library that reads them is not installed.
    """
    from mtmd.clip.image.formats import missing
    from mtmd.prompt.load_image import load_image, load_isolated

    load, result = load_isolated if isolate else load_image, []
    lacking = missing("PDF")
    for one in inputs:
        count = 0
        if _is_pdf(one):
            if lacking:
                raise OptionError(f"pages: {printable(one.name)} is a PDF; {lacking}")
            with suppress(MtmdError, OSError):
                count = load(one.path).pages
        pages = range(1, count + 1)
        result += [replace(one, page=page) for page in pages] or [one]
    return result


def only_first_pages(inputs: Iterable[Input]) -> str:
    """Return that only the first page of PDFs is read, "" without PDFs."""
    count = sum(_is_pdf(one) and one.page is None for one in inputs)
    if not count:
        return ""
    which = "the PDF" if count == 1 else f"each of {count:,} PDFs"
    return f"only the first page of {which} is read; 'mtmd batch --pages' reads every page"


def _is_pdf(one: Input) -> bool:
    return not one.is_url and Path(one.path).suffix.lower() == ".pdf"


def _plain(word: str) -> str:
    """Return the plain of file:// the path, by which rows are known."""
    return user_path(word) if word[:7].lower() == "file://" else word


def _expand(word: str, skipped: Counter[str], kinds: tuple[tuple[str, ...], ...]) -> list[str]:
    """`kinds`: endings of the files of a folder, the second ones where none has the first."""
    if is_url(word):
        return [word]
    if Path(word).is_dir():
        for kind in kinds:
            others: Counter[str] = Counter()
            if result := sorted(_files_in(Path(word), others, kind)):
                skipped.update(others)
                return result
        raise OptionError(
            f"{word}: found a folder without pictures, expected files ending in "
            f"{', '.join(ending for kind in kinds for ending in kind)}"
        )
    if glob.has_magic(word) and not Path(word).exists():
        result = sorted(path for path in glob.glob(word, recursive=True) if Path(path).is_file())  # noqa: PTH207  # Path.glob takes no absolute one
        if not result:
            raise OptionError(
                f"{word}: found no file that fits the pattern; check it, ** stands for folders at "
                "any depth"
            )
        return result
    return [word]


def _files_in(folder: Path, skipped: Counter[str], endings: tuple[str, ...]) -> Iterator[str]:
    """Yield it at any depth; what is hidden is left out."""
    for location, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.startswith("."):
                continue
            if name.lower().endswith(endings):
                yield str(Path(location) / name)
            else:
                skipped[printable(Path(name).suffix.lower())] += 1


def _read_list(file: str) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    except OSError as error:
        raise OptionError(
            f"list {file}: cannot be read ({error.strerror}), expected a file with a path on each "
            "line"
        ) from error
    lines = data.removeprefix(codecs.BOM_UTF8).splitlines()  # as editors of Windows put first
    result = [os.fsdecode(line) for line in lines if line.strip()]
    if not result:
        raise OptionError(f"list {file}: found no path in it, expected one on each line")
    return result
