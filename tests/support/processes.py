"""Processes as /proc has them, without what not every kernel offers."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def families() -> dict[int, list[tuple[int, str]]]:
    """By parent: the number and state ("Z" where nobody has asked how it ended) of each."""
    result: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):  # it has ended meanwhile
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                result[int(parent)].append((int(entry.name), state))
    return result


def children(pid: int) -> list[int]:
    """Those that nobody has asked how they ended are among them."""
    return [number for number, _ in families()[pid]]


def descendants(pid: int) -> list[int]:
    """Processes that live, the one itself first."""
    known = families()
    result = [pid] if Path(f"/proc/{pid}").exists() else []
    for one in result:
        result += [number for number, state in known[one] if state != "Z"]
    return result
