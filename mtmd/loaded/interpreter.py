"""Settings of the interpreter for a process of many threads, of which one drives the device."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.00005
NEVER = 2**30  # by the interpreter itself
LOOK_S = 0.25
FULL_EVERY = 5  # collections of what is not new, of 7,000 objects each, for one of all there is
MOST = 20_000  # objects; to look through so many stops every thread for some 3 ms
COUNT_EVERY = 16  # times that objects were left out, as to count them takes long, too
GROWN = 1_000_000  # objects by which what is left out may grow: some 100 MiB, or a large model


@contextmanager
def shared_out_promptly() -> Iterator[None]:
    """For the whole process meanwhile, once what it needs has been loaded.

    A thread that computes in Python gives way to others after a twentieth of a millisecond, not
    after 5: the thread of the device asks for the interpreter many times a token, and each time
    waits that long for everyone who computes. And garbage is collected in short pauses (`Pauses`).
    """
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    pauses, over = Pauses(), threading.Event()
    thread = threading.Thread(target=pauses.keep, args=(over,), name="mtmd garbage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else libraries find at the end what nobody has let go, and say so
        sys.setswitchinterval(before)


class Pauses:
    """Full garbage collections that are short, as all threads stand still in them.

    What one has found in use is left out of the next where it is much: plans above all, which live
    long and are in no cycle, so that they are free as soon as nobody holds them. What was left out
    and has become garbage in cycles since waits until all that is left out has grown by `GROWN`.

    They have a thread of their own. For the interpreter, whichever thread made the last of many
    objects would do it, and may have stepped back behind others (`kernels.resources.priority`):
    all would wait until it gets a core.
    """

    def __init__(self) -> None:
        self._left_out, self._most = 0, gc.get_freeze_count() + GROWN

    def keep(self, over: threading.Event) -> None:
        while not over.wait(LOOK_S):
            if gc.get_count()[2] >= FULL_EVERY:
                self.collect()

    def collect(self) -> None:
        counted = self._left_out == COUNT_EVERY
        thorough = counted and gc.get_freeze_count() > self._most
        if thorough:
            gc.unfreeze()
        gc.collect()
        if counted:
            self._left_out = 0
        if len(gc.get_objects(2)) > MOST:
            self._left_out += 1
            gc.freeze()
        if thorough:
            self._most = gc.get_freeze_count() + GROWN
