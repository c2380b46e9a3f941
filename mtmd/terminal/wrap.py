"""Text that a person reads on a terminal: lines end between words, not in the midst of one. What
goes into a pipe or a file is left as it is.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from typing import TextIO

from mtmd.base.text import for_terminal

TAB = 8
BOLD, DIM = "1", "2"  # of ECMA-48's SGR


def columns(text: str) -> int:
    """Return how wide a terminal draws `text`: East Asian characters take two columns, marks
    none.
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


class Wrapper:
    """Breaks a text that comes in pieces into lines of `width` columns, at blanks, which are left
    out there. A word that is longer than a line is not broken: the terminal does that.

    With `erases` the beginning of a word is given out at once, for people to see, and taken back by
    the terminal's own means (ECMA-48, CUB and EL) where the word turns out to be too long for its
    line; else it is held back.
    """

    def __init__(self, width: int, erases: bool = False) -> None:
        self.width, self._erases = max(width - erases, 1), erases  # not at a line's last column
        self._column = 0  # behind the last word that has ended
        self._space = self._word = ""
        self._shown = 0  # characters of the word, and of the blanks before it, given out already

    def push(self, text: str) -> str:
        """Return what can be printed by now."""
        done: list[str] = []
        for char in text:
            if char == "\n":
                done += [self._ended(), "\n"]
                self._column, self._space = 0, ""
            elif char in " \t":
                done.append(self._ended())
                self._space += char
            elif columns(char) == 2:  # lines may end before and after each of these
                done.append(self._ended())
                self._word = char
                done.append(self._ended())
            else:
                self._word += char
                if self._shown or (self._erases and columns(self._word) > self.width):
                    done.append(self._begun())
        if self._erases:
            done.append(self._begun())
        return "".join(done)

    def finish(self) -> str:
        """Return what was held back."""
        return self._ended()

    def _begun(self) -> str:
        """The word as far as it has come, in a line of its own where the last has no room."""
        if not self._word:
            return ""
        made, self._column, self._space = self._located(), self._before(), ""
        self._shown = len(self._word)
        return made

    def _ended(self) -> str:
        """The same of a word that is whole."""
        if not self._word:
            return ""
        made = self._begun()
        self._column = self._column + columns(self._word)
        while self._column > self.width:
            self._column -= self.width
        self._word, self._shown = "", 0
        return made

    def _before(self) -> int:
        """The column at which the word begins."""
        return 0 if self._breaks() else self._after_space()

    def _after_space(self) -> int:
        at = self._column
        for char in self._space:
            at += TAB - at % TAB if char == "\t" else 1
        return at

    def _breaks(self) -> bool:
        at = self._after_space()
        return at > 0 and at + columns(self._word) > self.width

    def _located(self) -> str:
        rest = self._word[self._shown :]
        if not self._breaks():
            return f"{self._space}{rest}"
        wide = columns(self._word[: self._shown])
        back = f"\x1b[{wide}D\x1b[K" if wide else ""
        return f"{back}\n{self._word}"


class StreamedText:
    """An answer on its way to stdout, wrapped where that is a terminal; with `is_thought`, what the
    model thinks before it, dimmed on its way to stderr. `begun`: something was printed whose line
    is not ended.
    """

    def __init__(self, is_thought: bool = False) -> None:
        self._file, self._style = (sys.stderr, DIM) if is_thought else (sys.stdout, "")
        self._between = "\n" if is_thought else ""  # an empty line
        width = width_of(self._file)
        self._wrapper = None if width is None else Wrapper(width, erases=True)
        self.begun = False

    def write(self, text: str) -> None:
        self.begun = True
        text = for_terminal(text)
        self._print(self._wrapper.push(text) if self._wrapper else text)

    def end(self) -> None:
        """Write what was held back, and the end of its line."""
        self.begun = False
        self._print(self._wrapper.finish() if self._wrapper else "", f"\n{self._between}")

    def _print(self, text: str, end: str = "") -> None:
        shown = styled(text, self._style, self._file) if self._style else text
        print(shown, end=end, file=self._file, flush=True)


def width_of(file: TextIO) -> int | None:
    """The columns of the terminal that `file` is, None where it is none. Of that file: stdout may
    go elsewhere, by which `shutil` goes.
    """
    if not file.isatty():
        return None
    try:
        result = os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):
        result = 0
    return result or shutil.get_terminal_size().columns


def wrapped(text: str, file: TextIO | None = None, indent: str = "") -> str:
    """`text` as it is printed to `file` (default: stdout), harmless for a terminal. The lines that
    a line goes on in begin with `indent`.
    """
    text, width = for_terminal(text), width_of(file or sys.stdout)
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        first, *others = _lines(line, width)
        rest = " ".join(others)
        lines.append(first)
        lines += [indent + one for one in _lines(rest, width - len(indent))] if rest else []
    return "\n".join(lines)


def _lines(text: str, width: int) -> list[str]:
    wrapper = Wrapper(width)
    return f"{wrapper.push(text)}{wrapper.finish()}".split("\n")


def styled(text: str, style: str, file: TextIO) -> str:
    """`text` in bold or dim letters, where `file` is a terminal that has them and the user has not
    requested none (NO_COLOR).
    """
    from mtmd.environment import needs_style  # here: what writes no style has no use for options

    if not (text and file.isatty() and needs_style()):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"
