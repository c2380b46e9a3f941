"""Which thread of this process the system lets run first, where there are too few cores for all."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

BEHIND = 10  # a tenth of a processor that a thread wants that has not stepped back
NICEST = 19


def step_back(steps: int = BEHIND) -> None:
    """This thread lets those go first that have the priority of the process, from now on, and so do
    threads that it starts: only a privileged process could take it back. Linux knows priorities of
    threads; elsewhere nothing changes.
    """
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with suppress(OSError):
        wanted = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + steps, NICEST)
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
