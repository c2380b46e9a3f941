"""Processes that begin with everything imported: forks of one that has imported torch and the
server, which takes two seconds of the processor. For tests of what a command does once it runs;
that it starts on its own is tested elsewhere.

`with warm() as python:` gives the beginning of a command line that stands for `sys.executable`:
`[*python, "-m", "mtmd", ...]` and `[*python, "-c", code, ...]` are processes with standard streams,
signals and an exit status as ever. What is run by Popen is a small process that hands its streams
to the fork, passes signals on, and ends as the fork ends; one that is killed takes the fork along.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST = 1 << 20  # bytes of what a process is asked to run, and its environment


@contextmanager
def warm() -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "forks")
        command = [sys.executable, __file__, "forks", place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdin and parent.stdout
            assert parent.stdout.readline() == b"ready\n"
            try:
                yield [sys.executable, "-I", "-S", __file__, "run", place]
            finally:
                parent.stdin.close()


def run(place: str, *arguments: str) -> NoReturn:
    """The small process: asks for a fork, and becomes what that becomes."""
    mask = os.umask(0)
    asked = {"arguments": arguments, "env": dict(os.environ), "cwd": str(Path.cwd()), "umask": mask}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as forks:
        forks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
        forks.connect(place)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        socket.send_fds(forks, [json.dumps(asked).encode()], [0, 1, 2])
        fork = int(forks.recv(64))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(fork, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for stream in (0, 1, 2):  # they are the fork's now: who reads sees their end with it
            os.close(stream)
        status = int(forks.recv(64))
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


class Forks:
    """The process that has imported everything: one fork for each connection."""

    def __init__(self, place: str):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(place)
        self.listener.listen()
        self.by_pid: dict[int, socket.socket] = {}
        self.woken, self.wakes = socket.socketpair()
        self.wakes.setblocking(False)
        signal.set_wakeup_fd(self.wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        print("ready", flush=True)

    def serve(self) -> tuple[str, ...] | None:
        """What is to be run: it returns in each fork, and None in the end, here."""
        while True:
            ends = {connection: pid for pid, connection in self.by_pid.items()}
            ready, _, _ = select.select([sys.stdin, self.listener, self.woken, *ends], [], [])
            if sys.stdin in ready:  # the tests have ended
                for pid in self.by_pid:
                    os.kill(pid, signal.SIGKILL)
                return None
            for connection in ends.keys() & set(ready):
                os.kill(ends[connection], signal.SIGKILL)  # who asked for it is gone
            if self.woken in ready:
                self.woken.recv(4096)
                self.reap()
            if self.listener in ready:
                found = self.fork(self.listener.accept()[0])
                if found is not None:
                    return found

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                with self.by_pid.pop(pid) as connection, suppress(OSError):
                    connection.send(str(status).encode())

    def fork(self, connection: socket.socket) -> tuple[str, ...] | None:
        data, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            self.by_pid[pid] = connection
            connection.send(str(pid).encode())
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        for one in (connection, self.listener, self.woken, self.wakes, *self.by_pid.values()):
            one.close()
        asked: dict[str, Any] = json.loads(data)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        os.umask(asked["umask"])
        return tuple(asked["arguments"])


def main(place: str) -> None:
    import mtmd.commands.serve
    import mtmd.model
    import mtmd.web.app
    import mtmd.web.server
    import mtmd.web.store.store  # noqa: F401

    asked = Forks(place).serve()
    if asked is None:
        return
    option, what, *arguments = asked
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        names = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(what, "<string>", "exec"), names)


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    (main if kind == "forks" else run)(*given)
