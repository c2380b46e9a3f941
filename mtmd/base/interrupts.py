"""Handlers of a Ctrl-C that comes while a command starts. Libraries in machine code swallow a
KeyboardInterrupt that comes while they are imported, or are left half made by it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def end_at_once(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # of a handler
    """End the process, without what its `finally` blocks would do: a handler for as long as the
    command itself is imported, and for who does not wait for the end of another import.
    """
    try:
        os.write(2, b"mtmd: interrupted\n")
    finally:  # stderr may be closed
        os._exit(128 + number)


def end_at_interrupts() -> None:
    """Have a Ctrl-C end the process at once, where nobody else takes it or has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, end_at_once)
        except ValueError:  # a thread of another program calls the command, which keeps its handler
            return


def is_import(frame: FrameType | None) -> bool:
    """Return whether `frame` is called, at any depth, by what is being imported."""
    while frame is not None:
        if _is_of_import(frame):
            return True
        frame = frame.f_back
    return False


def raise_after_import(frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once all imports that `frame` is called by are left."""
    caller = None
    while frame is not None:
        if _is_of_import(frame):
            caller = frame.f_back
        frame = frame.f_back
    if caller is None:
        raise KeyboardInterrupt

    def interrupt(*_: object) -> NoReturn:
        sys.settrace(None)
        raise KeyboardInterrupt

    caller.f_trace = interrupt  # called before its next line, and when an error or it leaves it
    sys.settrace(lambda *_: None)


def raise_in_main() -> bool:
    """Have KeyboardInterrupt raised in the main greenlet where threads are gevent's and one of
    these runs now: raised there, it would end that thread alone. Return whether that is so.
    """
    gevent, monkey = sys.modules.get("gevent"), sys.modules.get("gevent.monkey")
    if gevent is None or monkey is None or not monkey.is_module_patched("threading"):
        return False
    hub = gevent.get_hub()
    if gevent.getcurrent() in (hub, hub.parent):
        return False
    hub.loop.run_callback(hub.parent.throw, KeyboardInterrupt)
    return True


def _is_of_import(frame: FrameType) -> bool:
    code = frame.f_code
    is_module = code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
    return is_module or code.co_filename.startswith("<frozen importlib")
