"""Free memory: of a GPU as its driver says, of the system within the limits that are set for this
process.
"""

from __future__ import annotations

import time

import torch

from mtmd.base.control_groups import CGROUP, PROC
from mtmd.base.system_memory import system_bytes
from mtmd.kernels.backends.backend import Backend

CACHED_S = 0.05  # an answer may be this old: it is asked for with every batch
_known: dict[torch.device, tuple[float, int | None]] = {}


def free_bytes(backend: Backend) -> int | None:
    """Bytes that can be taken of the backend's memory right now, as of the last `CACHED_S`; None
    where it is not known.
    """
    known = _known.get(backend.device)
    now = time.monotonic()
    if known is None or now - known[0] > CACHED_S:
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
