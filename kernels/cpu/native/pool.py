"""Threads that carry out programs.

The caller is one of them; the others sleep between runs, are woken once a run and call the same
native function, which lets go of the interpreter's lock. A run does not wait for threads to wake
up or to leave: whoever is there does the work (see `program`).
"""

from __future__ import annotations

import atexit
import os
from functools import cache
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mtmd.kernels.cpu.native.program import Frame

SPARE = 3  # plans whose memory is kept


class Pool:
    """`threads` that work together, the caller's among them. One run at a time: a second caller
    works on its own.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._frame: Frame | None = None
        self._busy = Lock()
        self._bells: list[Lock] = []
        self._process = self._closed = self._last = 0
        self._workers: list[Thread] = []
        self._keeping = Lock()
        self._spare: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def run(self, frame: Frame, threads: int | None = None) -> bool:
        """All of a frame's program, by all threads or so many. Whether they were there: not while
        another caller has them.
        """
        threads = min(threads or self.threads, frame.threads)
        if threads == 1 or not self._busy.acquire(blocking=False):
            frame.work(0)
            return threads == 1
        try:
            self._start()
            self._frame, self._last = frame, threads
            for bell in self._bells[: threads - 1]:
                if bell.locked():  # else it has been rung already, and the thread comes anyway
                    bell.release()
            frame.work(0)
            return True
        finally:
            self._frame = None
            self._busy.release()

    def take(self, plan: object) -> Any:
        """The memory of a plan's last run, if it was one of the last and nobody else has it."""
        with self._keeping:
            return self._spare.pop(plan, None)

    def give(self, plan: object, memory: Any) -> None:
        """Keep memory of a run for the next of the same plan; of as many plans as take turns where
        tokens are proposed. It is let go with its plan.
        """
        with self._keeping:
            self._spare[plan] = memory
            for oldest in list(self._spare.keys())[:-SPARE]:
                del self._spare[oldest]

    def _start(self) -> None:
        """The other threads, when they are first needed, and in a child of a process that had
        some.
        """
        if self._process == os.getpid():
            return
        self._process, self._bells, self._workers = os.getpid(), [], []
        for index in range(1, self.threads):
            bell = Lock()
            bell.acquire()
            self._bells.append(bell)
            worker = Thread(
                target=self._work,
                args=(index, bell, self._closed),
                name=f"mtmd-native-{index}",
                daemon=True,
            )
            worker.start()
            self._workers.append(worker)
        atexit.register(self.close)

    def close(self) -> None:
        """Let the other threads end. At exit they have to: one that comes back from native code
        when the interpreter is gone takes the process down with it.
        """
        if self._process != os.getpid():
            return
        with self._busy:
            self._process, bells, self._bells = 0, self._bells, []
            self._frame = None
            self._closed += 1
            for bell in bells:
                if bell.locked():
                    bell.release()
        for worker in self._workers:
            worker.join(1.0)
        atexit.unregister(self.close)

    def _work(self, index: int, bell: Lock, closed: int) -> None:
        while True:
            bell.acquire()
            if self._closed != closed:
                return
            frame = self._frame
            if frame is not None and index < self._last:
                frame.help(index)
            del frame


@cache
def _pool_of(threads: int) -> Pool:
    return Pool(threads)


if hasattr(os, "register_at_fork"):  # a child may find its parent's in the midst of a run
    os.register_at_fork(after_in_child=_pool_of.cache_clear)


def shared_pool() -> Pool:
    """The process's, of as many threads as torch uses."""
    return _pool_of(torch.get_num_threads())
