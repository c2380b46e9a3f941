"""Plans of batches that are likely to come, made by a thread of their own while nothing else runs:
else the first batch of each shape would wait for its plan.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from mtmd.base.heartbeat import Heartbeat, beat
from mtmd.llm.batch import BatchShape

IDLE_S = 2.0  # after which the thread ends
LOOK_S = 0.25  # between two looks at it, by who waits for it
END_S = 10.0  # that it is waited for at the end of the process
log = logging.getLogger("mtmd.plans")
_all: weakref.WeakSet[PlanMaker] = weakref.WeakSet()
_forking = threading.Lock()
_stored: list[PlanMaker] = []


class PlanMaker:
    """`make(shape)` makes the plan of one; `begin` is the first thing done on the thread. `failed`
    gets, on it, what `make` has raised, after which no more plans are made.
    """

    def __init__(
        self,
        make: Callable[[BatchShape], object],
        begin: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda _: None,
    ):
        self._make, self._begin, self._failed = make, begin, failed
        self._foreseen: deque[BatchShape] = deque()
        self._at: BatchShape | None = None
        self._idle = self._closed = False
        self._wake = threading.Condition()
        self._working = threading.RLock()
        """Held while a plan is made, and by who forks the process: not in the midst of one."""
        self._thread: threading.Thread | None = None
        self._heart = Heartbeat()
        self.made = 0
        _all.add(self)

    def foresee(self, shapes: Iterable[BatchShape]) -> None:
        """Make these plans one by one, while there is nothing else to do: see `set_idle`."""
        with self._wake:
            if not self._closed:
                self._foreseen.extend(shapes)
                self._start()

    def set_idle(self, idle: bool) -> None:
        """Set whether there is nothing else to do."""
        if idle != self._idle:
            with self._wake:
                self._idle = idle
                self._wake.notify_all()

    @property
    def foreseen(self) -> int:
        """Return how many are still to be made."""
        return len(self._foreseen)

    def take(self, shape: BatchShape) -> None:
        """Wait for the end of this plan if it is being made; the caller makes it otherwise. The
        thread's signs of life are taken for the caller's meanwhile.
        """
        with self._wake:
            beats = self._heart.beats
            while shape == self._at and self._thread is not None:
                self._wake.wait(LOOK_S)
                if beats != self._heart.beats:
                    beats = self._heart.beats
                    beat(self._heart.at)

    def close(self) -> None:
        """Drop the plans that were not begun; one that is being made is finished, and not waited
        for.
        """
        with self._wake:
            self._closed = True
            self._foreseen.clear()
            self._wake.notify_all()

    def join(self, within_s: float | None = None) -> None:
        """Wait for the thread to end, after `close`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(within_s)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="mtmd plans", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread can be had: batches make their own plans
                log.debug("no plans are made ahead: %s", error)
                self._foreseen.clear()
                return
            self._thread = thread
        self._wake.notify_all()

    def _work(self) -> None:
        try:
            self._heart.count_this_thread()
            self._begin()
            while (shape := self._next()) is not None:
                with self._working:
                    self._make_one(shape)
        finally:
            with self._wake:
                if self._thread is threading.current_thread():  # not another's, begun since
                    self._thread = self._at = None
                self._wake.notify_all()

    def _next(self) -> BatchShape | None:
        """Wait for a shape; None if nothing comes for long."""
        with self._wake:
            self._at = None
            self._wake.notify_all()
            while not self._closed:
                if self._foreseen and self._idle:
                    self._at = self._foreseen.popleft()
                    return self._at
                came = self._wake.wait(None if self._foreseen else IDLE_S)
                if not came and not self._foreseen:
                    break
            self._thread = None
            return None

    def _make_one(self, shape: BatchShape) -> None:
        try:
            self._make(shape)
            self.made += 1
        except Exception as error:
            with self._wake:
                self._foreseen.clear()
            self._failed(error)

    def _hold(self) -> None:
        self._working.acquire()
        self._wake.acquire()

    def _let_go(self, in_child: bool) -> None:
        if in_child:  # which has the lists, and not the thread
            self._thread = self._at = None
            self._foreseen.clear()
        self._wake.release()
        self._working.release()


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch or LLVM when the interpreter ends takes the process down with
    it.
    """
    for maker in list(_all):
        maker.close()
    for maker in list(_all):
        maker.join(END_S)


def _hold_all() -> None:
    """Before a fork: what the thread has locked would be locked in the child for good."""
    _forking.acquire()
    _stored.extend(_all)
    for maker in _stored:
        maker._hold()


def _let_go_all(in_child: bool) -> None:
    for maker in _stored:
        maker._let_go(in_child)
    _stored.clear()
    _forking.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_hold_all,
        after_in_parent=lambda: _let_go_all(False),
        after_in_child=lambda: _let_go_all(True),
    )
