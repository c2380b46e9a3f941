"""A table whose rows are printed as they come: in columns on a terminal, with tabs elsewhere."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from mtmd.base.text import for_terminal, one_line
from mtmd.terminal.wrap import width_of

MINIMUM, GAP = 16, 2  # characters of a column, and between two


class Table:
    """Two columns under `heads`; `firsts` are the first column's cells, whose width is known so."""

    def __init__(self, heads: tuple[str, str], firsts: Sequence[str]):
        width = width_of(sys.stdout)
        self.on_terminal = width is not None
        width = width or 80
        self.first = min(max(map(len, (heads[0], *firsts))), max(width // 3, MINIMUM))
        self.last = max(width - self.first - GAP, MINIMUM)
        if self.on_terminal:
            self.add(*heads)

    def add(self, first: str, last: str) -> None:
        """A row. Its first cell is cut at the front, where paths are alike; its last goes on in
        lines of its own.
        """
        first, last = one_line(for_terminal(first)), one_line(for_terminal(last))
        if not self.on_terminal:
            print(f"{first}\t{last}", flush=True)
            return
        shown = first if len(first) <= self.first else f"…{first[1 - self.first :]}"
        lines = textwrap.wrap(last, self.last) or [""]
        print(f"{shown:<{self.first}}{' ' * GAP}{lines[0]}".rstrip(), flush=True)
        for line in lines[1:]:
            print(" " * (self.first + GAP) + line, flush=True)
