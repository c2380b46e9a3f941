"""Settings of the interpreter for a process of many threads, of which one drives the device."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SWITCH_S = 0.0003
LOOK_S = 0.25
FULL_EVERY = 35_000  # objects made and not let go, as the collections of new ones count them
NET = 1000  # collections of what is not new after which the interpreter would do it, not our thread
LONG_S = 0.003  # for a collection, of its thread's time: what it has found in use is left out then
COUNT_EVERY = 16  # times that objects were left out, as to count them takes long, too
GROWN = 1_000_000  # objects by which what is left out may grow, or a large model
TRIES = 1000  # a millisecond apart
_one_at_a_time = threading.RLock()
log = logging.getLogger("mtmd")


def collects_in_parts(version: tuple[int, ...]) -> bool:
    """Return whether a collection looks at a part of the old objects each time: CPython's from
    3.14.0 to 3.14.4 do; 3.14.5 and 3.15 have the collector of before again (their What's New).
    """
    return (3, 14) <= version < (3, 14, 5)


@contextmanager
def shared_out_promptly() -> Iterator[None]:
    """Share the interpreter promptly in the whole process meanwhile, once what it needs has been
    loaded.

    A thread that computes in Python gives way to others after a third of a millisecond, not after
    5: the thread of the device asks for the interpreter some times a token, and each time waits
    that long for everyone who computes. Nor much sooner: each thread that waits wakes up so often
    to ask, and with a few of them one core does nothing else, on which the thread that has the
    interpreter would run. And garbage is collected in short pauses (`Pauses`).
    """
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_S)
    leave_out()
    pauses, over = Pauses(), threading.Event()
    thread = threading.Thread(target=pauses.keep, args=(over,), name="mtmd garbage", daemon=True)
    if not collects_in_parts(sys.version_info[:3]):
        gc.set_threshold(*thresholds[:2], NET)
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.is_alive():
            thread.join()
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else libraries find at the end what nobody has let go, and say so
        sys.setswitchinterval(before)


def leave_out(collected: bool = False) -> None:
    """Leave what is in use now out of garbage collections: to look through all that a model and its
    libraries have made stops every thread for a tenth of a second. `collected`: that has just been
    done.
    """
    with _one_at_a_time:
        if not collected:
            _collect()
        gc.freeze()


def collect_all() -> None:
    """All garbage, also what was left out, which is left in from now on."""
    with _one_at_a_time:
        gc.unfreeze()
        _collect()


def _collect() -> None:
    """A full collection. `gc.collect` returns at once where a thread is in a collection already, by
    itself, and lets others run there.
    """
    begun: list[bool] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2 and threading.get_ident() == here:
            begun.append(True)

    here = threading.get_ident()
    gc.callbacks.append(note)
    try:
        for _ in range(TRIES):
            gc.collect()
            if begun:
                return
            time.sleep(0.001)
    finally:
        gc.callbacks.remove(note)


class Pauses:
    """Full garbage collections that are short, as all threads stand still in them.

    What one has found in use is left out of the next where it is much: plans above all, which live
    long and are in no cycle, so that they are free as soon as nobody holds them. What was left out
    and has become garbage in cycles since waits until all that is left out has grown by `GROWN`:
    a pause of a second or so, and rare.

    They have a thread of their own. For the interpreter, whichever thread made the last of many
    objects would do it, and may have stepped back behind others (`kernels.resources.priority`):
    all would wait until it gets a core.
    """

    def __init__(self) -> None:
        self._left_out, self._maximum = 0, gc.get_freeze_count() + GROWN

    def keep(self, over: threading.Event) -> None:
        new, young, _ = gc.get_threshold()
        every = max(1, FULL_EVERY // (new * young))
        while not over.wait(LOOK_S):
            try:
                if gc.get_count()[2] >= every:
                    self.collect()
            except Exception:  # no memory for it, say: there may be some the next time
                log.exception("garbage could not be collected")

    def collect(self) -> None:
        with _one_at_a_time:
            counted = self._left_out == COUNT_EVERY
            thorough = counted and gc.get_freeze_count() > self._maximum
            if thorough:
                gc.unfreeze()
            begun = time.thread_time()
            _collect()
            took = time.thread_time() - begun
            if counted:
                self._left_out = 0
            # Not by `gc.get_objects`: a tuple that another thread is making must not be held.
            if took > LONG_S:
                self._left_out += 1
                gc.freeze()
            if thorough:
                self._maximum = gc.get_freeze_count() + GROWN
