"""Describes what one worker process may take, kept by the system itself.

| limit | Linux | macOS |
|---|---|---|
| processor time (`RLIMIT_CPU`, whole seconds) | yes | yes |
| memory (`RLIMIT_AS`, beyond what the worker has at first) | yes | not kept by the system |
| open files (`RLIMIT_NOFILE`), core dumps (none) | yes | yes |
| ends with the process that it was forked from | yes | at its next message, unless stopped |
| is the first to go when the machine runs out of memory | yes | – |

Windows has neither `fork` nor `resource`: there nothing can be isolated, and `available` says so.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

_PACKED = struct.Struct("<dQ")
FILES = 32  # that a worker may have open
NICE = 15  # who is being answered goes first, where there are too few cores for all
NICEST = 19
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Limits:
    """Limits of one job. `cpu_s`: processor time. `memory_bytes`: beyond what the worker has at
    first.
    """

    BYTES: ClassVar[int] = 16  # packed
    cpu_s: float
    memory_bytes: int

    def pack(self) -> bytes:
        return _PACKED.pack(self.cpu_s, self.memory_bytes)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Limits:
        return cls(*_PACKED.unpack(data))

    @property
    def wall_s(self) -> float:
        """After which a worker is given up: one that gets little of the processor, as others are
        busy, still gets its time; one that waits for what never comes does not stay.
        """
        return 4 * self.cpu_s + 10


def available() -> bool:
    """Return whether this system can isolate anything."""
    return os.name == "posix"


def enclose() -> None:
    """This process, which has just been forked, for good."""
    import resource

    end_with_parent()
    with suppress(OSError):
        os.nice(NICE)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what was aborted would fill the disk
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def allow(limits: Limits) -> None:
    """Allow this process so much beyond what it has taken so far."""
    allow_memory(limits.memory_bytes)
    allow_time(limits.cpu_s)


def allow_memory(count: int, beyond: int | None = None) -> None:
    """Allow so many bytes beyond what this process has taken so far, or had taken when
    `address_space` was asked.
    """
    import resource

    if sys.platform == "linux":
        maximum = (address_space() if beyond is None else beyond) + count
        with suppress(ValueError):  # less is allowed already
            resource.setrlimit(
                resource.RLIMIT_AS, (maximum, resource.getrlimit(resource.RLIMIT_AS)[1])
            )


def allow_time(cpu_s: float) -> None:
    """Processor time from now on, rounded up to a whole second."""
    import resource

    end = math.ceil(time.process_time() + cpu_s)
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def lower_priority(pid: int) -> None:
    """Lower the priority of a process that has worked for long, so that short work goes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICEST)


def address_space() -> int:
    """Bytes of this process's address space; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def end_with_parent() -> None:
    """Linux ends this process when the thread that has started it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it was asked for
            os._exit(0)
