"""Describes how much of the system's memory is available to this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtmd.base.control_groups import groups, text_of


def system_bytes(proc: Path, cgroup: Path) -> int | None:
    """Bytes available without swapping, as Linux reckons (MemAvailable), or less where a control
    group may not have so many.
    """
    available = _number(proc / "meminfo", "MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *_group_bytes(proc, cgroup, available * 1024)]))


def _group_bytes(proc: Path, cgroup: Path, enough: int) -> Iterator[int]:
    """Yield what each control group that this process is in has left, if less than `enough`."""
    for version, folder in groups(proc, cgroup, "memory"):
        maximum, used, total = (
            ("memory.max", "memory.current", "")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        limit, taken = _number(folder / maximum), _number(folder / used)
        if limit is not None and taken is not None and limit - taken < enough:
            # The files that the group has in memory can be dropped.
            dropped = (
                _number(folder / "memory.stat", f"{total}{kind}") or 0
                for kind in ("inactive_file", "active_file")
            )
            yield limit - taken + sum(dropped)


def _number(file: Path, key: str = "") -> int | None:
    """The number after `key` in the first line that begins with it, without a key the file's only
    one; None where there is none.
    """
    for line in text_of(file).splitlines():
        words = line.split()
        if key and words[:1] == [key]:
            words = words[1:]
        elif key:
            continue
        return int(words[0]) if words and words[0].isdigit() else None
    return None
