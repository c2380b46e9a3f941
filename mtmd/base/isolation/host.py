"""The process that workers are forked from. It has loaded what they need, does nothing of their
work, and ends when the process that started it does, however that ends.

What it is told comes as records of one size over a socket: fork a worker (its end of a channel
comes beside the record), end one, say how one ended, lower its priority, stop it, let it go on.
Only the question is answered.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from typing import Any, NoReturn

from mtmd.base.isolation.channel import Channel, ChannelClosed
from mtmd.base.isolation.limits import Limits, allow, enclose, lower_priority

RECORD = struct.Struct("<cQ")
"""What to do, to which worker."""
STATUS = struct.Struct("<i")
FORK, END, ASK, NICE, STOP, GO_ON = b"f", b"e", b"a", b"n", b"s", b"g"
READY = b"ready"
NO_WORKER = 1 << 30  # in place of the status of one that could not be forked
LAST_S = 0.2  # for a worker to end
MEMORY_EXIT, FAILED_EXIT = 3, 4  # how a worker ends that ran out of memory, or failed otherwise


def main(control: int, module: str) -> None:
    """`control`: descriptor of the socket. `module`: has `prepare(setup: bytes) -> Any`, called
    once with the first message, and `serve(channel: Channel, prepared: Any) -> None`, called in
    each worker for each job, when it is to do its work within limits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this
    work = importlib.import_module(module)
    channel = Channel(socket.socket(fileno=control))
    try:
        prepared = work.prepare(bytes(channel.receive()))
        channel.send(READY)
    except ChannelClosed:
        return
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, all that they share
    _Host(channel, work, prepared).run()


class _Host:
    def __init__(self, control: Channel, work: Any, prepared: Any):
        self._control, self._work, self._prepared = control, work, prepared
        self._pids: dict[int, int] = {}
        """Of workers that have not ended."""
        self._ended: dict[int, int] = {}
        """How workers ended that may still be asked for."""
        self._forgotten: set[int] = set()
        """Workers that have been killed and have not ended yet."""
        self._wake, wake = socket.socketpair()
        for end in (self._wake, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._wake_end = wake  # kept open

    def run(self) -> None:
        try:
            while True:
                control, wake = self._control.fileno(), self._wake.fileno()
                ready, _, _ = select.select([control, wake], [], [])
                if wake in ready:
                    with suppress(BlockingIOError):
                        self._wake.recv(4096)
                    self._reap()
                if control in ready:
                    data, fds = self._control.receive_with(1, RECORD.size)
                    what, worker = RECORD.unpack(data)
                    self._do(what, worker, fds)
        except ChannelClosed:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
            self._reap(all_of_them=True)

    def _do(self, what: bytes, worker: int, fds: list[int]) -> None:
        if what == FORK:
            self._fork(worker, fds[0])
        elif what == NICE and worker in self._pids:
            lower_priority(self._pids[worker])
        elif what in (STOP, GO_ON) and worker in self._pids:
            os.kill(self._pids[worker], signal.SIGSTOP if what == STOP else signal.SIGCONT)
        elif what == END:
            if worker in self._pids:
                os.kill(self._pids[worker], signal.SIGKILL)
                self._forgotten.add(worker)
            self._ended.pop(worker, None)
        elif what == ASK:
            self._control.send(STATUS.pack(self._status(worker)))

    def _status(self, worker: int) -> int:
        """Return how a worker ended that has closed its channel, and so is about to end by
        itself.
        """
        end, killed = time.monotonic() + LAST_S, False
        while worker in self._pids:
            self._reap()
            if not killed and time.monotonic() > end:
                os.kill(self._pids[worker], signal.SIGKILL)
                killed = True
            time.sleep(0.0005)
        return self._ended.get(worker, NO_WORKER)

    def _fork(self, worker: int, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError:  # too many processes; the other side sees its channel closed
            os.close(fd)
            self._ended[worker] = NO_WORKER
            return
        if pid == 0:
            self._become_worker(fd)
        os.close(fd)
        self._pids[worker] = pid

    def _become_worker(self, fd: int) -> NoReturn:
        """Become a worker. An error here shows in how the process ends: nothing is to run twice."""
        code = FAILED_EXIT
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            self._wake.close()
            self._wake_end.close()
            enclose()
            channel = Channel(socket.socket(fileno=fd))
            while True:
                allow(Limits.unpack(channel.receive(Limits.BYTES)))
                self._work.serve(channel, self._prepared)
        except ChannelClosed:
            code = 0
        except MemoryError:
            code = MEMORY_EXIT
        finally:
            os._exit(code)

    def _reap(self, all_of_them: bool = False) -> None:
        workers = {pid: worker for worker, pid in self._pids.items()}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, 0 if all_of_them else os.WNOHANG)
                if pid == 0:
                    return
                worker = workers[pid]
                del self._pids[worker]
                if worker in self._forgotten:
                    self._forgotten.discard(worker)
                else:
                    self._ended[worker] = status
