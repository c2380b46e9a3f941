"""Free memory: of a GPU as its driver says, of the system within the limits that are set for this
process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mtmd.base.control_groups import CGROUP, PROC, groups, text_of
from mtmd.kernels.backends.backend import Backend

KEPT_S = 0.05  # an answer may be this old: it is asked for with every batch
_known: dict[torch.device, tuple[float, int | None]] = {}


def free_bytes(backend: Backend) -> int | None:
    """Bytes that can be taken of the backend's memory right now, as of the last `KEPT_S`; None
    where it is not known.
    """
    known = _known.get(backend.device)
    now = time.monotonic()
    if known is None or now - known[0] > KEPT_S:
        known = _known[backend.device] = now, _measure(backend.device)
    return known[1]


def look_again() -> None:
    """Much was given back: what was measured before that is told nobody."""
    _known.clear()


def _measure(device: torch.device) -> int | None:
    if device.type == "cpu":
        return system_bytes(PROC, CGROUP)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps what it has let go, to hand it out again.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":  # the CPU's memory, less what others have of it
        own = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
        everyones = system_bytes(PROC, CGROUP)
        return max(0, own if everyones is None else min(own, everyones))
    if device.type == "xpu":
        free, _ = torch.xpu.mem_get_info(device)
        return free + torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    return None


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
        most, used, total = (
            ("memory.max", "memory.current", "")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        limit, taken = _number(folder / most), _number(folder / used)
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
