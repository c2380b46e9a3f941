"""The first code that runs in an engine's process. It imports little: what torch reads of the
environment has to be set before torch is imported.
"""

from __future__ import annotations

import faulthandler
import socket
import sys

from mtmd.base.group_signals import outlive
from mtmd.base.isolation.limits import end_with_parent
from mtmd.environment import tokenize_in_own_thread
from mtmd.loaded.allocator import return_freed_memory
from mtmd.openmp import wait_shortly


def main(control: int) -> None:
    """`control`: the descriptor of this process's end of the link; -1 where it comes by stdin."""
    outlive()
    end_with_parent()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # as in the server: a crash shows where it was
    return_freed_memory()
    tokenize_in_own_thread()
    wait_shortly()
    from mtmd.engine_process.engine import EngineProcess
    from mtmd.engine_process.link import Link

    EngineProcess(Link(_socket(control))).run()


def _socket(control: int) -> socket.socket:
    if control >= 0:
        return socket.socket(fileno=control)
    shared: socket.socket = socket.fromshare(sys.stdin.buffer.read())  # type: ignore[attr-defined]
    return shared
