"""What one worker process may take, kept by the system itself.

| limit | Linux | macOS |
|---|---|---|
| processor time (`RLIMIT_CPU`, whole seconds) | yes | yes |
| memory (`RLIMIT_AS`, beyond what a process has at first) | yes | not kept by the system |
| open files (`RLIMIT_NOFILE`), core dumps (none) | yes | yes |
| ends with the process that it was forked from | yes | when it next waits for a message |
| is the first to go when the machine runs out of memory | yes | – |

Windows has neither `fork` nor `resource`: there nothing can be isolated, and `available` says so.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILES = 32  # that a worker may have open
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Limits:
    """`cpu_s`: processor time, in whole seconds. `memory_bytes`: beyond what a new worker has."""

    cpu_s: float
    memory_bytes: int

    @property
    def wall_s(self) -> float:
        """After which a worker is given up: one that gets little of the processor, as others are
        busy, still gets its time; one that waits for what never comes does not stay.
        """
        return 4 * self.cpu_s + 10


def available() -> bool:
    """Whether this system can isolate anything."""
    return os.name == "posix"


def apply(limits: Limits) -> None:
    """To this process, which has just been forked."""
    import resource

    _end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what was aborted would fill the disk
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        most = _address_space() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    more_time(limits.cpu_s)


def more_time(cpu_s: float) -> None:
    """This process may use so much processor time from now on, rounded up to a whole second."""
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    end = math.ceil(time.process_time() + cpu_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with suppress(ValueError):  # less than that is left by whoever started us
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))


def lower_priority(pid: int) -> None:
    """Of a process that has worked for long, so that short work goes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 15)


def _address_space() -> int:
    """Bytes of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it was asked for
            os._exit(0)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
