"""Settings of the interpreter for a process of several threads, of which one must not wait long."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0003
OLD_COLLECTED_EVERY = 100  # collections of younger objects; the interpreter's own number is 10


@contextmanager
def shared_promptly() -> Iterator[None]:
    """Share the interpreter promptly in the context, which begins once everything is loaded.

    A thread that computes in Python gives way to others after a third of a millisecond, not after
    5: the thread of the device asks for the interpreter some times a token. What exists now is left
    out of garbage collections, in which all threads stand still: to look through a model and its
    libraries takes a tenth of a second. What comes later is collected, old objects rarely.
    """
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], OLD_COLLECTED_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else libraries report at the end what nobody has released
        sys.setswitchinterval(interval)
