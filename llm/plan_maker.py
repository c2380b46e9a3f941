"""Plans made by a thread of their own, beside the one that runs batches: who waits for the next
token does not wait for the plan of somebody else's prompt.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

from mtmd.base.heartbeat import Heartbeat, beat
from mtmd.base.priority import step_back
from mtmd.llm.batch import BatchShape

IDLE_S = 2.0  # after which the thread ends
LOOK_S = 0.25  # between two looks at it, by who waits for it
END_S = 10.0  # that it is waited for at the end of the process
PATIENCE_S = 1.0  # that parts of prompts wait for a plan, beyond what plans take
PLANS_WAITED_FOR = 2  # one after the other, as a batch may have another shape by then
log = logging.getLogger("mtmd.plans")
_all: weakref.WeakSet[PlanMaker] = weakref.WeakSet()
_forking = threading.Lock()
_held: list[PlanMaker] = []


class PlanMaker:
    """`make(shape)` makes the plan of one; `begin` is the first thing done on the thread. `failed`
    gets, on it, what `make` has raised for a shape that was foreseen, after which no more of those
    are made. Of one that was asked for, the error is left to the batch that needs the plan: it is
    made again there, and raised there.
    """

    def __init__(
        self,
        make: Callable[[BatchShape], object],
        begin: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda _: None,
    ):
        self._make, self._begin, self._failed = make, begin, failed
        self._asked: deque[BatchShape] = deque()
        self._foreseen: deque[BatchShape] = deque()
        self._at: BatchShape | None = None
        self._idle = self._closed = False
        self._wake = threading.Condition()
        self._working = threading.RLock()
        """Held while a plan is made, and by who forks the process: not in the midst of one."""
        self._thread: threading.Thread | None = None
        self._heart = Heartbeat()
        self.made = 0
        self.slowest_s = 0.0
        """Of a processor's time, that a plan has taken."""
        _all.add(self)

    def ask(self, shape: BatchShape) -> None:
        """Before what is foreseen."""
        with self._wake:
            if not self._closed and shape not in self._asked:
                self._asked.append(shape)
                self._start()

    def foresee(self, shapes: Iterable[BatchShape]) -> None:
        """To be made one by one, while there is nothing else to do: see `set_idle`."""
        with self._wake:
            if not self._closed:
                self._foreseen.extend(shapes)
                self._start()

    def set_idle(self, idle: bool) -> None:
        """Whether there is nothing else to do."""
        if idle != self._idle:
            with self._wake:
                self._idle = idle
                self._wake.notify_all()

    @property
    def foreseen(self) -> int:
        """How many are still to be made."""
        return len(self._foreseen)

    def is_asked(self, shape: BatchShape) -> bool:
        """Whether the plan is being made, or will be next."""
        with self._wake:
            return shape == self._at or shape in self._asked

    def take(self, shape: BatchShape) -> None:
        """For who makes this plan now: it is not begun here any more, and where it has been, this
        waits for its end. The thread's signs of life are taken for the caller's meanwhile.
        """
        with self._wake:
            if shape in self._asked:
                self._asked.remove(shape)
            beats = self._heart.beats
            while shape == self._at and self._thread is not None:
                self._wake.wait(LOOK_S)
                if beats != self._heart.beats:
                    beats = self._heart.beats
                    beat(self._heart.at)

    def close(self) -> None:
        """What was not begun is left; a plan that is being made is made to its end, and not waited
        for.
        """
        with self._wake:
            self._closed = True
            self._asked.clear()
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
            except RuntimeError as error:  # no thread can be had: who needs a plan makes it
                log.debug("no plans are made beside: %s", error)
                self._asked.clear()
                return
            self._thread = thread
        self._wake.notify_all()

    def _work(self) -> None:
        try:
            step_back()
            self._heart.count_this_thread()
            self._begin()
            while (found := self._next()) is not None:
                shape, foreseen = found
                with self._working:
                    self._make_one(shape, foreseen)
        finally:
            with self._wake:
                if self._thread is threading.current_thread():  # not another's, begun since
                    self._thread = self._at = None
                    self._asked.clear()  # it has failed: who needs these plans makes them
                self._wake.notify_all()

    def _next(self) -> tuple[BatchShape, bool] | None:
        """And whether it was foreseen; None where nothing comes for long."""
        with self._wake:
            self._at = None
            self._wake.notify_all()
            while not self._closed:
                if self._asked:
                    self._at = self._asked.popleft()
                    return self._at, False
                if self._foreseen and self._idle:
                    self._at = self._foreseen.popleft()
                    return self._at, True
                came = self._wake.wait(None if self._foreseen else IDLE_S)
                if not came and not (self._asked or self._foreseen):
                    break
            self._thread = None
            return None

    def _make_one(self, shape: BatchShape, foreseen: bool) -> None:
        begun = time.thread_time()
        try:
            self._make(shape)
            self.made += 1
        except Exception as error:
            if foreseen:
                with self._wake:
                    self._foreseen.clear()
                self._failed(error)
            else:
                log.debug("no plan of %s was made beside: %s", shape, error)
        self.slowest_s = max(self.slowest_s, time.thread_time() - begun)

    def _hold(self) -> None:
        self._working.acquire()
        self._wake.acquire()

    def _let_go(self, in_child: bool) -> None:
        if in_child:  # which has the lists, and not the thread
            self._thread = self._at = None
            self._asked.clear()
            self._foreseen.clear()
        self._wake.release()
        self._working.release()


class Deferral:
    """Of the batches of one engine: how long parts of prompts wait for their plan, while those who
    wait for their next token go on. For one plan, and for one more, as the batch may have another
    shape by then; and no longer than `PATIENCE_S` beyond what plans have taken. Then the plan is
    made as where nobody waits.
    """

    def __init__(self, plans: PlanMaker):
        self._plans = plans
        self._shapes: list[BatchShape] = []
        self._begun = 0.0

    @property
    def lasts(self) -> bool:
        """Whether the plan is being made."""
        return self._has_time and self._plans.is_asked(self._shapes[-1])

    def begin(self, shape: BatchShape) -> bool:
        """Have a plan made that is missing; False where it is not to be waited for, any more."""
        if not self._shapes:
            self._begun = time.monotonic()
        elif shape in self._shapes or len(self._shapes) == PLANS_WAITED_FOR or not self._has_time:
            return False
        self._shapes.append(shape)
        self._plans.ask(shape)
        return True

    def end(self) -> None:
        """The parts have been run, or nobody waits for them to be."""
        self._shapes.clear()

    @property
    def _has_time(self) -> bool:
        plans = len(self._shapes)
        most_s = PATIENCE_S + plans * self._plans.slowest_s
        return bool(plans) and time.monotonic() - self._begun < most_s


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
    _held.extend(_all)
    for maker in _held:
        maker._hold()


def _let_go_all(in_child: bool) -> None:
    for maker in _held:
        maker._let_go(in_child)
    _held.clear()
    _forking.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_hold_all,
        after_in_parent=lambda: _let_go_all(False),
        after_in_child=lambda: _let_go_all(True),
    )
