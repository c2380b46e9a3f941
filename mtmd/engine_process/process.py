"""An engine's process, as the server sees it: a new interpreter, no fork of the server's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from mtmd.base.cores import on_all_cores
from mtmd.base.group_signals import blocked_signals
from mtmd.engine_process.link import Link

ENDS_S = 10.0  # after its link is closed
# It imports from where this process does; the environment and the current folder have no influence
# (-I).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mtmd.engine_process.boot import main; main(int(sys.argv[2]))"
)


class Process:
    """Linux ends it together with the thread that has made this; elsewhere it ends when its link
    is closed.
    """

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        is_posix = os.name == "posix"
        path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
        with its, blocked_signals():
            self._process = on_all_cores(
                lambda: subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-c",
                        _BOOT,
                        path,
                        str(its.fileno() if is_posix else -1),
                    ],
                    pass_fds=[its.fileno()] if is_posix else (),
                    stdin=subprocess.DEVNULL if is_posix else subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                )
            )
            if not is_posix:  # Windows gives a socket to a process that is there already
                assert self._process.stdin is not None
                with self._process.stdin as pipe:
                    pipe.write(its.share(self._process.pid))  # type: ignore[attr-defined]
        self.link = Link(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        """Return it in words. One that still runs is killed."""
        try:
            code = self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its link, and did not end"
        if code < 0:
            names = {int(s): s.name for s in signal.Signals}
            return f"by {names.get(-code, f'signal {-code}')}"
        return f"with exit code {code}"

    def kill(self) -> None:
        """One that the system holds on to, as a failing driver may make it, is not waited for."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_S)

    def end(self) -> None:
        """Close its link, which ends it; kill it where it does not end."""
        self.link.end()
        try:
            self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
