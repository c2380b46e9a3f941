"""The thread that owns a model's device: takes turns at the work of those who use it, does what
others ask in between, and ends when nobody asks for long.

A model has one, however many services answer from it: two threads inside one runner would write
over each other's values.

It is watched. Where nothing has happened in it for too long, where it has ended by what nobody
caught, or where a user says that the device has failed, that is a fault, and for good: all who wait
are told, and nothing is taken any more.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mtmd.base.errors import DeviceError, MtmdError
from mtmd.base.heartbeat import Heartbeat
from mtmd.base.tracebacks import stack_text, traceback_text
from mtmd.base.turns import turn_released

if TYPE_CHECKING:
    from mtmd.kernels.backends import Backend

HANG_S = 300.0  # a node takes seconds; the first run of one may compile it
TICK_S = 1.0  # between two looks at the thread, at most
IDLE_S = 2.0  # after which it ends
AGAIN = "start the process again"
CLOSED = "the service is closed; start another"
_FORKED = (
    "this process was forked and cannot use the model that its parent has "
    "loaded: {}; load the model in this process, or start processes with "
    "multiprocessing.get_context('spawn')"
)
BUSY_AT_FORK = _FORKED.format("it was answering at that moment")
NOT_FORKED = _FORKED.format("its device, or the processes that share it, belong to the parent")
T = TypeVar("T")
log = logging.getLogger("mtmd.device")
_open: weakref.WeakSet[DeviceThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is inside torch when the interpreter ends takes the process down with it."""
    for thread in list(_open):
        thread.close()


def _begin_anew() -> None:
    """Start anew in a child that was forked, which has none of its parent's threads."""
    for thread in list(_open):
        thread.begin_anew()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_begin_anew)


class DeviceThread:
    """`begin` is the first thing that is done on it."""

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._inbox: list[Callable[[], None]] = []
        self._users: dict[DeviceUser, None] = {}  # in order; those with something posted lately
        # Reentrant: a user posts while it holds it, so that nothing comes after its end.
        self._wake = threading.Condition(threading.RLock())
        self._closed = False
        self._thread: threading.Thread | None = None
        self._requested: set[queue.SimpleQueue[tuple[None, BaseException]]] = set()
        self._heart, self._tick_s = Heartbeat(), TICK_S
        self.fault: DeviceError | None = None
        """Why nothing is done any more."""
        self.on_fault: list[Callable[[DeviceError], None]] = []
        """Called once there is one, from any thread, when those who wait have been told."""
        self.can_fork = True
        """Whether a child of this process could go on with what is worked on: on a CPU, alone."""
        _open.add(self)

    def begin_anew(self) -> None:
        """Start anew in a child that was forked: what was under way is the parent's, and left half
        done here, which is a fault; where nothing was, the next request starts a thread of this
        process.
        """
        idle = not (self._inbox or self._requested) and self._heart.limit_s is None
        idle = idle and all(user.pause() is None for user in self._users)
        self._wake = threading.Condition(threading.RLock())  # another thread may have held it
        self._thread, self._heart = None, Heartbeat()
        self._inbox, self._requested = [], set()
        users, self._users = list(self._users), {}
        if not (idle and self.can_fork) and self.fault is None:
            reported = BUSY_AT_FORK if self.can_fork else NOT_FORKED
            self.fault, self._closed = DeviceError(reported), True
            for user in users:
                user.fail(self.fault)

    @property
    def is_current(self) -> bool:
        """Return whether this is called on it."""
        return threading.current_thread() is self._thread

    def post(self, action: Callable[[], None]) -> None:
        """Post an action to be done soon; `action` raises nothing. Raises MtmdError once the thread
        is closed, DeviceError after a fault.
        """
        with self._wake:
            if self.fault is not None:
                raise again(self.fault)
            if self._closed:
                raise MtmdError(CLOSED)
            self._inbox.append(action)
            self._wake.notify()
            self._start()

    def _start(self) -> None:
        if self._thread is not None:
            return
        ended = threading.Event()
        self._thread = threading.Thread(
            target=self._loop, args=(ended,), name="mtmd device", daemon=True
        )
        watch = threading.Thread(
            target=self._watch, args=(self._thread, ended), name="mtmd device watch", daemon=True
        )
        for thread in (self._thread, watch):
            thread.start()

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while nobody else does, and wait for it, however long it
        takes. Raises what it raises, DeviceError after a fault.
        """
        if self.is_current:
            return work()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        waiting = [work]

        def run() -> None:
            # Taken out, so that this thread holds on to nothing of it when the caller goes on: a
            # model that is let go has to be free before another is loaded.
            try:
                done.put((waiting.pop()(), None))
            except BaseException as error:  # it is raised again where it was asked for
                done.put((None, error))

        del work
        with self._wake:
            self.post(run)
            self._requested.add(done)
        with turn_released():
            value, error = done.get()
        self._requested.discard(done)
        if error is not None:
            raise error
        result: T = value
        return result

    def close(self) -> None:
        """Close it. What was posted before is done first, then all users are ended; what comes
        later is refused.
        """
        with self._wake:
            self._closed, thread = True, self._thread
            self._wake.notify()
        while thread is not None and thread.is_alive() and self.fault is None:
            thread.join(TICK_S)

    def fail(self, fault: DeviceError) -> None:
        """Give everything up, from any thread. `fault` says why, and its cause goes to the log."""
        with self._wake:
            if self.fault is not None:
                return
            self.fault, self._closed = fault, True
            users, requested = list(self._users), list(self._requested)
            self._wake.notify_all()
        for done in requested:
            done.put((None, again(fault)))
        for user in users:
            user.fail(fault)
        for report in self.on_fault:
            report(fault)

    def _loop(self, ended: threading.Event) -> None:
        self._heart.count_this_thread()
        self._begin()
        try:
            self._take_turns()
        except BaseException as error:
            fault = (
                error
                if isinstance(error, DeviceError)
                else DeviceError(
                    f"the device thread has ended by a {type(error).__name__}; {AGAIN}"
                )
            )
            log.error("%s\n%s", fault, traceback_text(error))
            fault.__cause__ = fault.__cause__ or (None if fault is error else error)
            self.fail(fault)
        finally:
            ended.set()

    def _watch(self, thread: threading.Thread, ended: threading.Event) -> None:
        """Until the thread has ended. A look that comes late counts as one that came in time: this
        process was stopped in between, and the thread with it.
        """
        stall, last = Stall(), time.monotonic()
        while not ended.wait(self._tick_s) and self.fault is None:
            now, limit_s = time.monotonic(), self._heart.limit_s
            passed, last = min(now - last, 2 * self._tick_s), now
            still_s = stall.look(None if limit_s is None else self._heart.beats, passed)
            if not thread.is_alive() and not ended.is_set():
                self.give_up("the device thread has ended without a word")
            elif limit_s is not None and still_s >= limit_s + self._heart.more_s:
                self.give_up(
                    f"the device hangs: it has done nothing for {still_s:.3g} s in the midst of a "
                    "step"
                )

    def give_up(self, message: str) -> None:
        """Give it up: whatever it is at, it is not waited for."""
        fault, thread = DeviceError(f"{message}; {AGAIN}"), self._thread
        log.error("%s\n%s", fault, stack_text(thread) if thread else "it has no thread")
        self.fail(fault)

    def _take_turns(self) -> None:
        while self._wait():
            self._do_posted()
            if self.fault is not None:  # it was given up while it hung
                return
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
            if self.fault is not None:
                return False
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
    gets the exception that `turn` or something posted has raised, and raises DeviceError where it
    means that the device has failed; `ended` is called last, when the user is closed. These are
    called on the thread. `given_up` is called in place of `ended` after a fault, on any thread: the
    device's may hang in `turn`.

    `hang_s`: a turn without a beat (`kernels.resources.heartbeat`) for so long is taken for a hang;
    None for any time.
    """

    def __init__(
        self,
        thread: DeviceThread,
        turn: Callable[[], None],
        pause: Callable[[], float | None],
        failed: Callable[[BaseException], None],
        ended: Callable[[], None],
        given_up: Callable[[DeviceError], None] = lambda _: None,
        hang_s: float | None = HANG_S,
    ):
        self.thread, self.pause = thread, pause
        self._turn, self._failed, self._ended, self._given_up = turn, failed, ended, given_up
        self._hang_s = hang_s
        if hang_s is not None:
            thread._tick_s = min(thread._tick_s, hang_s / 4)
        self._closed = False
        self._left = threading.Event()

    def post(self, action: Callable[[], None]) -> None:
        """Post an action to be done soon. Raises MtmdError once this is closed, DeviceError after a
        fault.
        """
        with self.thread._wake:
            if self._closed and self.thread.fault is None:
                raise MtmdError(CLOSED)
            self.thread.post(lambda: self._guarded(action))
            self.thread._users[self] = None

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do what `DeviceThread.exclusively` does, refused once this is closed."""
        if self._closed and self.thread.fault is None and not self.thread.is_current:
            raise MtmdError(CLOSED)
        return self.thread.exclusively(work)

    def turn(self) -> None:
        self._guarded(self._turn)

    def close(self, within_s: float | None = None) -> None:
        """Close it. What was posted before is done first, what comes later is refused. A device
        that does not come to that `within_s` is given up.
        """
        with self.thread._wake:
            self._closed = True
            # after a fault, or where nothing of it is under way
            if self.thread.fault is not None or self not in self.thread._users:
                self._left.set()
            elif not (self.thread._closed or self.thread.is_current):
                self.thread.post(self.end)
        if self.thread.is_current:
            self.end()
        if not self._left.wait(within_s):
            self.thread.give_up(f"the device has not ended what it does in {within_s:.3g} s")

    def end(self) -> None:
        if not self._left.is_set():
            self._closed = True
            self._guarded(self._ended)
            self.thread._users.pop(self, None)
            self._left.set()

    def fail(self, fault: DeviceError) -> None:
        self._closed = True
        self._given_up(fault)
        self._left.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        heart = self.thread._heart
        heart.beats += 1
        heart.limit_s = self._hang_s
        try:
            action()
        except BaseException as error:
            self._failed(error)
        finally:
            heart.limit_s = None


class Stall:
    """Describes how long somebody has stood still, for one who looks at their beats from time to
    time.
    """

    def __init__(self) -> None:
        self._beats: int | None = None
        self._seconds = 0.0

    def look(self, beats: int | None, passed_s: float) -> float:
        """Seconds since the beats have last changed; None for one who has nothing to do."""
        still = beats is not None and beats == self._beats
        self._beats, self._seconds = beats, self._seconds + passed_s if still else 0.0
        return self._seconds


def device_fault(backends: Sequence[Backend], error: BaseException) -> DeviceError | None:
    """Return the fault where `error` is one of the device, for good: all that is asked of it
    afterwards fails as well. None where it goes on.
    """
    try:
        for backend in backends:
            backend.synchronize()
    except Exception as result:
        error.__cause__ = error.__cause__ or result
        fault = DeviceError(
            f"the device {backends[0].name} has failed ({type(error).__name__}), and nothing runs "
            f"on it any more; {AGAIN}"
        )
        fault.__cause__ = error
        return fault
    return None


def again(fault: DeviceError) -> DeviceError:
    """The same for one more who waits: an exception that is raised belongs to one thread."""
    error = DeviceError(str(fault))
    error.__cause__ = fault.__cause__
    return error
