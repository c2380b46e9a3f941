"""Work that may end badly, in processes that may: what a library outside our control does with
hostile input can take all memory, run for ever, or abort, and takes no more along than one worker.

A fork server (`host.py`) has loaded the library once; workers are forked from it, in one to three
milliseconds, and each job has limits of its own that the system keeps (`limits.py`). A worker whose
job went well does others, `JOBS` at most; one whose did not, for whatever reason, does no more. The
fork server itself touches nothing from outside, so it is safe to fork from, and is started anew
should it be killed. Workers get their input over a channel (`channel.py`), without pickles.

Jobs that take long do not keep short ones waiting: after `PATIENCE_S` a job is run at low priority
and beside the others, or stopped while others go first: `worker_slots.py` has the rule.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from typing import TypeVar

from mtmd.base.cancellation import LOOKED_S, check_cancelled, may_be_left, wait
from mtmd.base.cores import on_all_cores
from mtmd.base.errors import BusyError, MtmdError
from mtmd.base.isolation import host
from mtmd.base.isolation.channel import LONGEST, Channel, ChannelClosed, ChannelTimeout
from mtmd.base.isolation.limits import Limits
from mtmd.base.isolation.worker_slots import LONG_JOBS, PATIENCE_S, STOPPED_JOBS, Job, WorkerSlots
from mtmd.base.turns import current_owner, turn_released

T = TypeVar("T")
_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
JOBS = 32  # of one worker
SAVED_BYTES = 512 << 20  # a worker that was allowed more gives its memory back by ending
# What a worker computes with numpy is computed by one thread, as others share its cores.
THREADS = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",  # Accelerate, which numpy uses on macOS
)
START_S = 60.0  # for a fork server to be ready: a machine may be very busy
ENDING_S = 5.0
# The parent's own path, so that what is found there is found here; nothing else of its environment
# or of the current folder has a say (-I).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mtmd.base.isolation.host import main; main(int(sys.argv[2]), sys.argv[3])"
)


class Reason(Enum):
    TIME = "took too long"
    MEMORY = "took too much memory"
    CRASH = "crashed"


class WorkerFailed(Exception):
    """A worker ended before its work was done, or was ended. Whoever asked for it turns this into
    an error that says of what.
    """

    def __init__(self, reason: Reason, limits: Limits):
        super().__init__(reason.value)
        self.reason, self.limits = reason, limits

    @property
    def needs(self) -> str:
        """Return what the work would have needed, in words."""
        if self.reason is Reason.TIME:
            return f"more than {self.limits.cpu_s:g} s of processor time"
        if self.reason is Reason.MEMORY:
            return f"more than {self.limits.memory_bytes >> 20:,} MiB of memory"
        return "more than the library that reads it can do: it crashed"


class Worker:
    """One process, from when it is forked to `end`. Not thread-safe."""

    def __init__(self, server: ForkServer, number: int, channel: Channel, limits: Limits):
        self._server, self._number, self._channel, self.limits = server, number, channel, limits
        self.jobs = 0
        self._end = weakref.finalize(self, _end_worker, server._orders, number, channel)
        self.look: Callable[[], float] | None = None
        """Called now and then while it works: seconds for which it stood still meanwhile."""

    def begin(self, limits: Limits) -> None:
        """A job within `limits`. Raises WorkerFailed."""
        self.jobs, self.limits = self.jobs + 1, limits
        self.send(limits.pack())

    def send(self, *parts: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """One message, the `parts` together; it gets copies of `fds`. Raises WorkerFailed, and
        BusyError where the fork server was ended, LeftError where nobody wants it any more.
        """
        check_cancelled()
        try:
            with turn_released():
                self._channel.send(*parts, fds=fds, limit_s=self.limits.wall_s)
        except ChannelTimeout:
            raise self._failed(Reason.TIME) from None
        except ChannelClosed:
            raise self._failed() from None

    def receive(self, maximum: int = LONGEST) -> bytearray:
        """The next message, of `maximum` bytes. Raises as `send`."""
        return self._received(lambda: self._channel.receive(maximum, self.limits.wall_s))

    def receive_into(self, room: memoryview) -> int:
        """The next message, at the beginning of `room`: its length. Raises as `send`."""
        return self._received(lambda: self._channel.receive_into(room, self.limits.wall_s))

    def _received(self, receive: Callable[[], T]) -> T:
        check_cancelled()
        try:
            with turn_released():
                self._wait()
                return receive()
        except ChannelTimeout:
            raise self._failed(Reason.TIME) from None
        except ChannelClosed:
            raise self._failed() from None

    def _wait(self) -> None:
        """Until it says something, where somebody looks at the time or may leave meanwhile."""
        began = time.monotonic()
        while self.look is not None or may_be_left():
            if self.look is not None:
                began += self.look()
            if self._channel.ready(min(LOOKED_S, PATIENCE_S)):
                return
            check_cancelled()
            if time.monotonic() - began > self.limits.wall_s:
                raise ChannelTimeout

    def ready(self, wait_s: float = 0) -> bool:
        """Return whether it has said something, or ended, after `wait_s` at the latest."""
        return self._channel.ready(wait_s)

    def lower_priority(self) -> None:
        """Soon. Waits for nobody."""
        self._order(host.NICE)

    def stop(self) -> None:
        """Until it is to `go_on`. Soon; waits for nobody."""
        self._order(host.STOP)

    def go_on(self) -> None:
        """Soon. Waits for nobody."""
        self._order(host.GO_ON)

    def end(self) -> None:
        """End it at once, whatever it does. Waits for nobody."""
        self._end()
        self._server._give_orders()

    def _order(self, what: bytes) -> None:
        self._server._orders.append((what, self._number))
        self._server._give_orders()

    def _failed(self, reason: Reason | None = None) -> WorkerFailed | BusyError:
        status = self._server._status(self._number) if self._end.alive and not reason else 0
        self.end()
        if status == host.NO_WORKER:
            return _no_process("the fork server ended")
        return WorkerFailed(reason or _reason(status), self.limits)


class ForkServer:
    """`module`: of `host.main`; `setup`: gives the message that it prepares itself with. `at_once`:
    jobs of one owner that may run at a time, those that take long aside. `jobs`: that one worker
    does, one after another. Starts when it is first needed, or by `start`. Thread-safe; closed when
    let go, and when the interpreter ends.
    """

    def __init__(
        self,
        module: str,
        setup: Callable[[], bytes] = bytes,
        at_once: int = 2,
        jobs: int | None = None,
    ):
        self._module, self._setup, self._jobs = module, setup, jobs
        self._at_once = at_once
        self._slots = WorkerSlots(at_once, LONG_JOBS, STOPPED_JOBS, PATIENCE_S)
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._idle: deque[Worker] = deque()
        self._orders: deque[tuple[bytes, int]] = deque()
        """That need no answer. A worker may be let go wherever its last reference is, also inside
        of what is done here, so ending it cannot wait for the lock."""
        self._last = 0
        self._is_closed = False
        _servers.add(self)

    def begin_anew(self) -> None:
        """Start anew in a child of this process that was forked: the fork server and its workers
        are the parent's, which goes on speaking with them.
        """
        self._lock = threading.Lock()  # another thread may have held it
        self._slots = WorkerSlots(self._at_once, LONG_JOBS, STOPPED_JOBS, PATIENCE_S)
        self._running = None
        self._idle.clear()
        self._orders = deque()  # those for the parent's workers with it

    def start(self) -> None:
        """Begin to start, without waiting for it."""
        with suppress(RuntimeError):  # no thread to be had: it starts when needed
            threading.Thread(target=self._start_quietly, name="mtmd workers", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Return the pid of the fork server, while it runs."""
        running = self._running
        return running.process.pid if running else None

    @contextmanager
    def job(self, limits: Limits) -> Iterator[Worker]:
        """A worker for one job, once fewer than `at_once` are at work and it is its owner's turn;
        one that raises is ended. Raises BusyError where no process can be started, or too many
        that take long are at work; LeftError.
        """
        job = self._slots.request(current_owner())
        try:
            with turn_released():
                wait(job.goes_on)
                worker = self._worker(limits)
            self._slots.begin(job)
            worker.look = partial(self._look, job, worker)
            try:
                yield worker
            except BaseException:
                worker.end()
                raise
            finally:
                worker.look = None  # which holds the worker
            self._keep(worker, job.is_long)
        finally:
            self._slots.release(job)

    def _look(self, job: Job, worker: Worker) -> float:
        was_long, began = job.is_long, time.monotonic()
        goes_on = self._slots.check(job)
        if job.is_long and not was_long:
            worker.lower_priority()
        if goes_on:
            return 0.0
        worker.stop()
        wait(job.goes_on)
        job.check()
        worker.go_on()
        return time.monotonic() - began

    def _worker(self, limits: Limits) -> Worker:
        """One that waits for work, or a new one."""
        with suppress(
            IndexError, WorkerFailed, BusyError
        ):  # the system may have ended it for its memory
            worker = self._idle.popleft()
            worker.begin(limits)
            return worker
        return self.open(limits)

    def _keep(self, worker: Worker, was_long: bool) -> None:
        if (
            was_long
            or worker.jobs >= (self._jobs or JOBS)
            or worker.limits.memory_bytes > SAVED_BYTES
        ):
            worker.end()
        else:
            self._idle.append(worker)

    def open(self, limits: Limits) -> Worker:
        """A worker for as long as it is wanted, whatever others do. Raises BusyError where no
        process can be started.
        """
        ours, its = socket.socketpair()
        with its:
            channel = Channel(ours)
            with self._control():
                self._last += 1
                number = self._last
                record = host.RECORD.pack(host.FORK, number)
                for again in (True, False):
                    running = self._started()
                    try:
                        running.control.send(record, fds=[its.fileno()])
                        break
                    except ChannelClosed as error:  # it was killed, perhaps for memory
                        self._stop()
                        if not again:
                            raise _no_process(type(error).__name__) from error
        worker = Worker(self, number, channel, limits)
        try:
            worker.begin(limits)
        except WorkerFailed as error:
            raise _no_process(type(error).__name__) from error
        return worker

    def close(self) -> None:
        """End all workers; no more can be opened."""
        with self._control():
            self._is_closed = True
            self._stop()

    def _start_quietly(self) -> None:
        with suppress(MtmdError), self._control():  # who needs a worker is told
            self._started()

    def _started(self) -> _Running:
        """Needs the lock."""
        if self._is_closed:
            raise MtmdError("the worker processes have been closed")
        if self._running is not None and self._running.process.poll() is not None:
            self._stop()
        if self._running is None:
            running = _Running(self._module)
            try:
                running.control.send(self._setup(), limit_s=START_S)
                running.control.receive(len(host.READY), START_S)
            except (ChannelClosed, ChannelTimeout) as error:
                running.close()
                raise _no_process(type(error).__name__) from error
            except BaseException:
                running.close()
                raise
            self._running = running
        return self._running

    def _stop(self) -> None:
        self._idle.clear()
        running, self._running = self._running, None
        if running is not None:
            running.close()

    @contextmanager
    def _control(self) -> Iterator[None]:
        """While nobody else speaks with the fork server."""
        with self._lock:
            yield
        self._give_orders()

    def _give_orders(self) -> None:
        """Send commands, unless another thread does so."""
        while self._orders and self._lock.acquire(blocking=False):
            try:
                while self._orders:
                    order = self._orders.popleft()
                    if self._running is not None:
                        with suppress(ChannelClosed):
                            self._running.control.send(host.RECORD.pack(*order))
            finally:
                self._lock.release()

    def _status(self, number: int) -> int:
        """Return how a worker ended."""
        with self._control(), suppress(ChannelClosed, ChannelTimeout):
            if self._running is not None:
                self._running.control.send(host.RECORD.pack(host.ASK, number))
                data = self._running.control.receive(host.STATUS.size, START_S)
                return int(host.STATUS.unpack(data)[0])
        return host.NO_WORKER


def _begin_anew() -> None:
    for server in list(_servers):
        server.begin_anew()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_begin_anew)


class _Running:
    """A fork server's process and the way to it. Ends when let go."""

    def __init__(self, module: str):
        ours, its = socket.socketpair()
        path = [p or os.getcwd() for p in sys.path]  # noqa: PTH109  # text, as sys.path has it
        with its:
            self.control = Channel(ours)
            try:
                self.process = on_all_cores(
                    lambda: _started(json.dumps(path), its.fileno(), module)
                )
            except OSError as error:
                raise _no_process(type(error).__name__) from error
        self.close = weakref.finalize(self, _end_process, self.process, self.control)


def _started(path: str, control: int, module: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, path, str(control), module],
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | dict.fromkeys(THREADS, "1"),
    )


def _end_process(process: subprocess.Popen[bytes], control: Channel) -> None:
    control.close()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_worker(orders: deque[tuple[bytes, int]], number: int, channel: Channel) -> None:
    channel.close()
    orders.append((host.END, number))


def _reason(status: int) -> Reason:
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by == signal.SIGXCPU:
            return Reason.TIME
        # Killed by nobody of ours: the system had no memory left. What a Rust library does when it
        # gets none is to abort.
        return Reason.MEMORY if ended_by in (signal.SIGKILL, signal.SIGABRT) else Reason.CRASH
    return Reason.MEMORY if os.WEXITSTATUS(status) == host.MEMORY_EXIT else Reason.CRASH


def _no_process(why: str) -> BusyError:
    return BusyError(
        f"no worker process could be had ({why}), perhaps for lack of memory; try again later"
    )
