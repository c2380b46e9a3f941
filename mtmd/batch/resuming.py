"""Describes which pictures a batch has to ask about where rows are there already."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmd.batch.earlier_question import EarlierRun, location_of, real_folder
from mtmd.batch.inputs import Input
from mtmd.batch.output import Before

CLOCKS_S = 60.0  # by which clocks of file systems may be apart
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Left:
    """`inputs` are to be asked about; rows of names in `old` go, among them the error of a whole
    file of which pages or parts are asked about. `known`: rows of other inputs, of which `failed`
    have an error; `changed` and `retried` are counts of `old`.
    """

    inputs: tuple[Input, ...]
    old: frozenset[str]
    known: int
    failed: tuple[tuple[str, str], ...]
    changed: int
    retried: int

    @property
    def reported(self) -> str:
        """Return what is asked about again, "" for nothing."""
        parts = []
        if self.changed:
            verb = "has" if self.changed == 1 else "have"
            parts.append(f"{self.changed} of before {verb} changed")
        if self.retried:
            parts.append(f"{self.retried} of before failed")
        return f"asked again: {', '.join(parts)}" if parts else ""


def what_is_left(
    inputs: Sequence[Input], rows: Mapping[str, Before], before: EarlierRun, retry: bool
) -> Left:
    """`rows` are there. With `retry` those with an error are asked about again; a picture whose
    file has another digest always is.
    """
    known = {location_of(name, before.folder): name for name in rows}
    away = str(Path.cwd()) != before.folder
    left: dict[str, Input] = {}
    old, failed, saved = set[str](), list[tuple[str, str]](), 0
    changed = retried = 0
    seen = set[str]()
    for one in inputs:
        location = _location(one)
        if location in seen:
            continue  # two spellings
        seen.add(location)
        name = known.get(location)
        if name is None:
            left[location] = _in_full(one) if away else one
            whole = known.get(_location(replace(one, page=None, start=None, end=None)))
            is_left = retry and whole not in old
            if is_left and whole is not None and rows[whole].error is not None:
                old.add(whole)  # what kept it from being read in pages or parts is mended
                retried += 1
            continue
        row = rows[name]
        has_changed = _has_changed(one.path, row, before.began)
        if has_changed or (retry and row.error is not None):
            left[location] = _in_full(one) if away else one
            old.add(name)
            changed, retried = changed + has_changed, retried + (not has_changed)
            continue
        saved += 1
        if row.error is not None:
            failed.append((name, row.error))
    return Left(tuple(left.values()), frozenset(old), saved, tuple(failed), changed, retried)


def _location(one: Input) -> str:
    """Return the location by its row's name."""
    if one.is_url:
        return one.name
    folder, _ = os.path.split(one.path)
    real = real_folder(os.path.join(Path.cwd(), folder))  # noqa: PTH118  # ".." after links
    _, name = os.path.split(one.name)
    return location_of(name, os.fsencode(real).decode("utf-8", "backslashreplace"))


def _in_full(one: Input) -> Input:
    if one.is_url:
        return one
    return replace(one, path=os.path.abspath(one.path))  # noqa: PTH100  # links stay


def _has_changed(path: str, row: Before, began: float) -> bool:
    """Since the row was written. Files that are older than the first row are not read."""
    try:
        status = Path(path).stat()
        newest = max(status.st_mtime, status.st_ctime)
        if row.sha256 is None:  # there was no file to be read
            return row.error is not None and 0 < began <= newest
        return newest >= began - CLOCKS_S and _digest(path) != row.sha256
    except (OSError, ValueError):
        return False  # it is gone; its row stays


def _digest(path: str) -> bytes:
    result = hashlib.sha256()
    with Path(path).open("rb") as file:
        while data := file.read(READ_BYTES):
            result.update(data)
    return result.digest()
