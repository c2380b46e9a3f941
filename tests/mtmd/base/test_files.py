"""Files of a cache that has a limit."""

from __future__ import annotations

import os
from pathlib import Path

from mtmd.base.files import remove_oldest


def test_the_half_that_was_used_last_stays(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.o").write_bytes(b"x")
        os.utime(tmp_path / f"{number}.o", (number, number))
    other = tmp_path / "other.json"
    other.write_bytes(b"")
    remove_oldest(tmp_path, "*.o", 9)
    assert len(list(tmp_path.glob("*.o"))) == 9
    remove_oldest(tmp_path, "*.o", 8)
    assert sorted(file.name for file in tmp_path.glob("*.o")) == ["5.o", "6.o", "7.o", "8.o"]
    assert other.exists()
    remove_oldest(tmp_path / "none", "*.o", 1)
