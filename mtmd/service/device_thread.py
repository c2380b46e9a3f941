"""The thread that owns the device: takes turns at its work, does what others ask in between, and
ends when nobody asks for long.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from mtmd.kernels.errors import MtmdError

IDLE_S = 2.0  # after which it ends
T = TypeVar("T")
_open: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside torch when the interpreter ends takes the process down with it."""
    for thread in list(_open):
        thread.close()


class DeviceThread:
    """`turn` does some work; `pause` says in how many seconds it is to be called again, 0 at once,
    None when there is nothing to do. `failed` hears of an exception in either or in what was
    posted; `ended` is called last, when it is closed.
    """

    def __init__(
        self,
        turn: Callable[[], None],
        pause: Callable[[], float | None],
        failed: Callable[[BaseException], None],
        ended: Callable[[], None],
    ):
        self._turn, self._pause, self._failed, self._ended = turn, pause, failed, ended
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        _open.add(self)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def post(self, action: Callable[[], None]) -> None:
        """To be done soon. Raises MtmdError once it is closed."""
        with self._wake:
            if self._closed:
                raise MtmdError("the service is closed; start another")
            self._inbox.append(action)
            self._wake.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mtmd device", daemon=True)
                self._thread.start()

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while nobody else does, and wait for it. Raises what it
        raises.
        """
        if threading.current_thread() is self._thread:
            return work()
        done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((work(), None))
            except BaseException as error:  # it is raised again where it was asked for
                done.put((None, error))

        self.post(run)
        value, error = done.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """What was asked for before is done first, what comes later is refused."""
        with self._wake:
            self._closed, thread = True, self._thread
            self._wake.notify()
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        closed = False
        while not closed:
            with self._wake:
                if not (self._inbox or self._closed):
                    pause = self._pause()
                    if (
                        pause is None
                        and not self._wake.wait(IDLE_S)
                        and not (self._inbox or self._closed)
                    ):
                        # so that a model nobody holds any more can go; the next request starts
                        # another
                        self._thread = None
                        return
                    if pause:
                        self._wake.wait(pause)
                inbox, self._inbox, closed = self._inbox, [], self._closed
            for action in inbox:
                self._guarded(action)
            if not closed:
                self._guarded(self._turn)
        self._guarded(self._ended)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._failed(error)
