"""Handlers of a Ctrl-C that comes while a command starts. Libraries in machine code swallow a
KeyboardInterrupt that comes while they are imported, or are left half made by it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_at_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # of a handler
    """End the process. A handler for as long as nothing is open."""
    try:
        os.write(2, b"mtmd: interrupted\n")
    finally:  # stderr may be closed
        os._exit(128 + number)


def end_at_interrupts() -> None:
    """Have a Ctrl-C end the process at once, where nobody else takes it or has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def is_import(frame: FrameType | None) -> bool:
    """Return whether `frame` is called, at any depth, by what is being imported."""
    while frame is not None:
        code = frame.f_code
        is_module = code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if is_module or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
