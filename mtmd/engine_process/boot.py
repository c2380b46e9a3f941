"""The first that is done in the engine's process. It is light: what torch reads of the environment
has to be said before torch is imported.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
from typing import Any

from mtmd.base.group_signals import outlive
from mtmd.base.isolation.limits import end_with_parent
from mtmd.environment import tokenize_in_own_thread
from mtmd.loaded.allocator import return_freed_memory
from mtmd.openmp import wait_shortly


def main(control: int) -> None:
    """`control`: the descriptor of this process's end of the link."""
    outlive()
    end_with_parent()
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # as in the server: a crash tells where it was
    return_freed_memory()
    tokenize_in_own_thread()
    wait_shortly()
    from mtmd.base.isolation.channel import Channel
    from mtmd.engine_process.engine import EngineProcess
    from mtmd.engine_process.link import Link

    EngineProcess(Link(Channel(socket.socket(fileno=control))), _load).run()


def _load(name: str | None, options: dict[str, Any]) -> Any:
    from mtmd.loading import load

    return load(name, progress=sys.stderr.isatty(), **options)
