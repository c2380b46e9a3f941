"""The memory of this process, as /proc tells it."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc/self")


def resident_bytes() -> int | None:
    """None where the system does not tell."""
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int | None:
    """A field of /proc/self/status that is in KiB there. None where the system does not tell."""
    try:
        lines = (PROC / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
