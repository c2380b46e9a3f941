"""Tracebacks for logs: with what caused an error, and lines so short that no picture is in them."""

from __future__ import annotations

import sys
import threading
import traceback

LINE = 400  # characters: a message may hold a prompt, or a picture in base64
LINES = 200


def traceback_text(error: BaseException) -> str:
    """Return the traceback text of an error and its causes."""
    return _short("".join(traceback.format_exception(error)))


def stack_text(thread: threading.Thread) -> str:
    """Return where a thread is now, as far as Python knows; empty for one that has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else _short("".join(traceback.format_stack(frame)))


def _short(text: str) -> str:
    lines = [line if len(line) <= LINE else f"{line[:LINE]}..." for line in text.splitlines()]
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], "...", *lines[-LINES // 2 :]]
    return "\n".join(lines)
