"""Locks on files, of handles that do not know of each other."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.file_lock import lock


def test_one_has_it_alone_or_several_share_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("r+b") as first, path.open("r+b") as second:
        assert lock(first) is True
        assert lock(second) is False and lock(second, shared=True) is False
        assert lock(first, shared=True) is True
        assert lock(second, shared=True) is True
        assert lock(second) is False
        first.close()
        assert lock(second) is True


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.EAGAIN, False), (errno.EACCES, False), (errno.ENOLCK, None)]
)
def test_what_a_file_system_says(
    number: int, expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(number, "")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with (tmp_path / "lock").open("wb") as file:
        assert lock(file) is expected
