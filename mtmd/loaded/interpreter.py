"""Settings of the interpreter for a process of many threads, of which one drives the device."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.00005
FULL_EVERY = 20  # collections of what is not new, of 7,000 objects each, for one of all there is
# Objects to look through take 0.2 us each on a core of their own, and several times that on one
# that is shared: so many stop every thread for about as long as a step of decoding takes.
MOST = 50_000
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
    gc.set_threshold(*thresholds[:2], FULL_EVERY)
    pauses = Pauses()
    gc.callbacks.append(pauses)
    try:
        yield
    finally:
        gc.callbacks.remove(pauses)
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else libraries find at the end what nobody has let go, and say so
        sys.setswitchinterval(before)


class Pauses:
    """A callback of the garbage collector that keeps its full collections short: all threads stand
    still in them.

    What one has found in use is left out of the next where it is much: plans above all, which live
    long and are in no cycle, so that they are free as soon as nobody holds them. What was left out
    and has become garbage in cycles since waits until all that is left out has grown by `GROWN`.
    """

    def __init__(self) -> None:
        self.most, self.thorough = gc.get_freeze_count() + GROWN, False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self.thorough = gc.get_freeze_count() > self.most
            if self.thorough:
                gc.unfreeze()
            return
        if len(gc.get_objects(2)) > MOST:
            gc.freeze()
        if self.thorough:
            self.most = gc.get_freeze_count() + GROWN
