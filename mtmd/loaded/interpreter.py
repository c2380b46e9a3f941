"""Settings of the interpreter for a process of many threads, of which one drives the device."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0002


@contextmanager
def shared_out_promptly() -> Iterator[None]:
    """For the whole process meanwhile, once what it needs has been loaded.

    A thread that computes in Python gives way to others after a fifth of a millisecond, not after
    5: the thread of the device asks for the interpreter many times a token, and each time waits
    that long for everyone who computes. What has been made so far is left out of garbage
    collection: to look through all of it stops every thread for a tenth of a second.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # else libraries find at the end what nobody has let go, and say so
        sys.setswitchinterval(before)
