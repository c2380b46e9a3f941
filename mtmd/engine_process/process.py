"""The process of the engine, as the server's sees it: started anew, without a fork of this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from mtmd.base.errors import OptionError
from mtmd.base.group_signals import held_back
from mtmd.base.isolation.channel import Channel
from mtmd.engine_process.link import Link

ENDS_S = 10.0  # after its link is closed
# What is found here is found there; nothing else of the environment or the current folder has a
# say (-I).
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mtmd.engine_process.boot import main; main(int(sys.argv[2]))"
)


class Process:
    """Linux ends it when the thread that has made this ends; elsewhere it sees its link closed."""

    def __init__(self) -> None:
        """Raises OptionError where processes cannot be given a socket."""
        if os.name != "posix":
            raise OptionError(
                "--engine-process: this system gives no socket to a process that is started; leave "
                "the option out"
            )
        ours, its = socket.socketpair()
        with its, held_back():
            path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, path, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.link = Link(Channel(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_it_ended(self) -> str:
        """In words, of one whose link is closed. One that lives on is ended."""
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
        """One that the system keeps, as a driver in a fault may, is not waited for."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_S)

    def end(self) -> None:
        """It ends by itself once its link is closed, or is ended."""
        self.link.end()
        try:
            self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
