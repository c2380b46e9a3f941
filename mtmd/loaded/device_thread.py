"""The thread that owns a model's device: takes turns at the work of those who use it, does what
others ask in between, and ends when nobody asks for long.

A model has one, however many services answer from it: two threads inside one runner would write
over each other's values.
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
CLOSED = "the service is closed; start another"
T = TypeVar("T")
_open: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside torch when the interpreter ends takes the process down with it."""
    for thread in list(_open):
        thread.close()


class DeviceThread:
    def __init__(self) -> None:
        self._inbox: list[Callable[[], None]] = []
        self._users: dict[DeviceUser, None] = {}  # in order; those with something posted lately
        # Reentrant: a user posts while it holds it, so that nothing comes after its end.
        self._wake = threading.Condition(threading.RLock())
        self._closed = False
        self._thread: threading.Thread | None = None
        _open.add(self)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether this is called on it."""
        return threading.current_thread() is self._thread

    def post(self, action: Callable[[], None]) -> None:
        """To be done soon; `action` raises nothing. Raises MtmdError once the thread is closed."""
        with self._wake:
            if self._closed:
                raise MtmdError(CLOSED)
            self._inbox.append(action)
            self._wake.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mtmd device", daemon=True)
                self._thread.start()

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while nobody else does, and wait for it. Raises what it
        raises.
        """
        if self.is_current:
            return work()
        done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        waiting = [work]

        def run() -> None:
            # Taken out, so that this thread holds on to nothing of it when the caller goes on: a
            # model that is let go has to be free before another is loaded.
            try:
                done.put((waiting.pop()(), None))
            except BaseException as error:  # it is raised again where it was asked for
                done.put((None, error))

        del work
        self.post(run)
        value, error = done.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """What was asked for before is done first, then all users are ended; what comes later is
        refused.
        """
        with self._wake:
            self._closed, thread = True, self._thread
            self._wake.notify()
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        while self._wait():
            self._do_posted()
            with self._wake:
                is_over = self._closed and not self._inbox
            for user in list(self._users):
                if is_over:
                    user.end()
                elif user in self._users:  # what was posted, or an earlier user, may have ended it
                    user.turn()
                del user  # not to hold on to it while this thread waits
            if is_over:
                return

    def _wait(self) -> bool:
        """Until there is something to do. False where nobody has come for long, or all have left:
        the thread ends, so that a model nobody holds any more can go; the next request starts
        another.
        """
        with self._wake:
            if self._inbox or self._closed:
                return True
            pauses = [p for p in (user.pause() for user in self._users) if p is not None]
            pause: float | None = min(pauses, default=None)
            if pause:
                self._wake.wait(pause)
            elif pause is None and not (self._users and self._wake.wait(IDLE_S)):
                if self._inbox or self._closed:
                    return True
                # Nobody has anything under way, or nobody is left: a model that was closed has to
                # be free before another is loaded.
                self._users.clear()
                self._thread = None
                return False
            return True

    def _do_posted(self) -> None:
        with self._wake:
            inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()


class DeviceUser:
    """Somebody with work on a device thread, turn by turn. `turn` does some of it; `pause` says in
    how many seconds it is to be called again, 0 at once, None when there is nothing to do. `failed`
    gets the exception that `turn` or something posted has raised; `ended` is called last, when the
    user is closed. All four are called on the thread.
    """

    def __init__(
        self,
        thread: DeviceThread,
        turn: Callable[[], None],
        pause: Callable[[], float | None],
        failed: Callable[[BaseException], None],
        ended: Callable[[], None],
    ):
        self.thread, self.pause = thread, pause
        self._turn, self._failed, self._ended = turn, failed, ended
        self._closed = False
        self._left = threading.Event()

    def post(self, action: Callable[[], None]) -> None:
        """To be done soon. Raises MtmdError once this is closed."""
        with self.thread._wake:
            if self._closed:
                raise MtmdError(CLOSED)
            self.thread.post(lambda: self._guarded(action))
            self.thread._users[self] = None

    def exclusively(self, work: Callable[[], T]) -> T:
        """As `DeviceThread.exclusively`, refused once this is closed."""
        if self._closed and not self.thread.is_current:
            raise MtmdError(CLOSED)
        return self.thread.exclusively(work)

    def turn(self) -> None:
        self._guarded(self._turn)

    def close(self) -> None:
        """What was posted before is done first, what comes later is refused."""
        with self.thread._wake:
            self._closed = True
            if self not in self.thread._users:  # nothing of it is under way
                self._left.set()
            elif not (self.thread._closed or self.thread.is_current):
                self.thread.post(self.end)
        if self.thread.is_current:
            self.end()
        self._left.wait()

    def end(self) -> None:
        if not self._left.is_set():
            self._closed = True
            self._guarded(self._ended)
            self.thread._users.pop(self, None)
            self._left.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._failed(error)
