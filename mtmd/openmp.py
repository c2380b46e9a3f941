"""Describes how torch's threads wait for each other, which has to be said before torch is
loaded.
"""

from __future__ import annotations

import os
import sys

# Turns of a loop, 5 to 10 microseconds in all, before a thread that waits goes to sleep. By itself
# GNU's OpenMP turns 300,000 times. Where another process wants the core that is waited on, that is
# its core taken away from the thread waited for, at each of the thousand waits of a prompt: 512
# tokens took 7 to 13 s beside three busy processes, 0.8 s with this.
SPINS = "1000"
# Of weights. Below this, products are too small to share between threads: on a busy machine waiting
# for each other takes most of the time.
ONE_THREAD_BYTES = 64 << 20
STATED = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # by whoever started this process


def wait_shortly() -> None:
    """Shorten the waits of OpenMP's threads. Call it before torch is imported; later it changes
    nothing.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in STATED):
        os.environ["GOMP_SPINCOUNT"] = SPINS
