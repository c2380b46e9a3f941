"""Describes what goes on before the first word of an answer, on a line that goes away."""

from __future__ import annotations

import sys
from typing import Any

from mtmd.base.text import for_terminal, plural
from mtmd.terminal.wrap import width_of


class Status:
    """Describes what the model is busy with: a line on stderr that is overwritten and goes before
    anything else is written. On a terminal only.
    """

    def __init__(self) -> None:
        self.shown = False

    def show(self, event: Any) -> None:
        self.say(
            f"encoded {event.done} of {plural(event.total, 'tile')}"
            if event.stage == "encode"
            else f"reading {plural(event.total, 'token')}"
        )

    def say(self, text: str) -> None:
        """`text` in the line's place."""
        width = width_of(sys.stderr)
        if width is not None:
            shown = for_terminal(text)[: width - 1]
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
            self.shown = True

    def clear(self) -> None:
        """Only if it is there: the answer may stand on the same line of the same terminal."""
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = False
