"""Settings of the interpreter for a process of many threads, of which one drives the device."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.00005
FULL_EVERY = 200  # collections of what is not new, of 7,000 objects each, for one of all there is


@contextmanager
def shared_out_promptly() -> Iterator[None]:
    """For the whole process meanwhile, once what it needs has been loaded.

    A thread that computes in Python gives way to others after a twentieth of a millisecond, not
    after 5: the thread of the device asks for the interpreter many times a token, and each time
    waits that long for everyone who computes. What has been made so far is left out of garbage
    collection: to look through all of it stops every thread for a tenth of a second. So does a
    collection of all that has been made since, plans above all, which the interpreter would do
    whenever a large request comes in; it is done after a million objects more.
    """
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], FULL_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else libraries find at the end what nobody has let go, and say so
        sys.setswitchinterval(before)
