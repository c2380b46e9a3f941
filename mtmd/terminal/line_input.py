"""Lines from a person at a terminal, or from a pipe: editing, history, texts of several lines,
paths that were dropped on the window.
"""

from __future__ import annotations

import io
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from mtmd.terminal.wrap import BOLD, styled

HISTORY = 1000  # lines kept
BLOCK = '"""'

# A word as shells write it: quoted, or with its blanks escaped.
_WORD = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|((?:\\.|[^\s\\'"])+))(?=\s|$)""")
_NO_WORD = re.compile(r"\s*(\S*)")


def is_interactive() -> bool:
    return sys.stdin.isatty()


def texts(prompt: str, interactive: bool) -> Iterator[str]:
    """Yield what is entered, until the end of input. A line that ends with a backslash goes on in
    the next, three quotation marks in a row begin and end a text of several lines. Ctrl-C takes
    back what was begun.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # names of files may be no UTF-8
    while True:
        try:
            yield _text(lambda more: _line("... " if more else prompt, interactive))
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
        except EOFError:
            if interactive:
                print()
            return


def _line(prompt: str, interactive: bool) -> str:
    if interactive:
        return input(_bold(prompt))
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _bold(prompt: str) -> str:
    """Between marks that tell GNU's readline which characters take no room; others count them."""
    readline, bold = _readline(), styled(prompt, BOLD, sys.stdout)
    if bold == prompt or readline is None or "libedit" in (readline.__doc__ or ""):
        return prompt
    before, after = bold.split(prompt)
    return f"\001{before}\002{prompt}\001{after}\002"


def _text(read: Callable[[bool], str]) -> str:
    line = read(False)
    if line.lstrip().startswith(BLOCK):
        parts = [line.lstrip()[len(BLOCK) :]]
        while not parts[-1].rstrip().endswith(BLOCK):
            try:
                parts.append(read(True))
            except EOFError:  # a pipe that ends inside: what there is
                return "\n".join(parts).strip("\n")
        return "\n".join(parts).rstrip()[: -len(BLOCK)].strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(True))
    return "\n".join(lines)


@contextmanager
def history(file: Path | None, words: Sequence[str]) -> Iterator[None]:
    """Line editing where the system has it: `words` and paths are completed by Tab, what was
    entered is kept in `file` for next time.
    """
    readline = _readline()
    if readline is None:
        yield
        return
    readline.set_completer(lambda start, n: _completion(start, n, words))
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind(
        "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
    )
    if file is not None:
        with suppress(OSError):
            readline.read_history_file(file)
    readline.set_history_length(HISTORY)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):  # a home that cannot be written is no reason to fail
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                readline.write_history_file(file)


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # Windows
        return None
    return readline


def _completion(start: str, n: int, words: Sequence[str]) -> str | None:
    """The `n`th way to go on from `start`."""
    result = (
        [f"{word} " for word in words if word.startswith(start)] if start.startswith("/") else []
    )
    if start and not result:
        path = Path(start).expanduser()
        folder, begun = (path, "") if start.endswith("/") else (path.parent, path.name)
        with suppress(OSError):
            shown = start[: len(start) - len(begun)] if begun else start
            result = sorted(
                shown + p.name + ("/" if p.is_dir() else " ")
                for p in folder.iterdir()
                if p.name.startswith(begun)
            )
    return result[n] if n < len(result) else None


class Interrupt:
    """Ctrl-C while something is done that can be ended: the first asks for its end, the second does
    not wait for that.
    """

    def __init__(self) -> None:
        self._pressed = False
        self._end: Callable[[], None] | None = None

    def calls(self, end: Callable[[], None]) -> None:
        self._end = end
        if self._pressed:
            end()

    def __call__(self, *_: object) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
        if self._end is not None:
            self._end()


@contextmanager
def interruptible(interactive: bool) -> Iterator[Interrupt]:
    """Ctrl-C, where a person may press it, calls what the `Interrupt` is told to."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt) if interactive else None
    try:
        yield interrupt
    finally:
        if interactive:
            signal.signal(signal.SIGINT, before)


@contextmanager
def without_echo_of_keys() -> Iterator[None]:
    """While an answer is written, Ctrl-C does not leave its ^C in it."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (AttributeError, OSError, ValueError, termios.error):  # no terminal
        yield
        return
    changed = [*before]
    changed[3] &= ~termios.ECHOCTL
    termios.tcsetattr(terminal, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def words_of(text: str) -> list[str]:
    """Words as a shell would cut them, but a quotation mark that is not closed is a character like
    others.
    """
    result, at, end = [], 0, len(text.rstrip())
    while at < end:
        word, at = _next_word(text, at)
        result.append(word)
    return result


def leading_paths(text: str, suffixes: tuple[str, ...]) -> tuple[list[Path], str]:
    """Files that a text begins with, as a terminal writes what is dropped on it: full paths or
    file: addresses, quoted or escaped.

    Returns them and the rest of the text.
    """
    paths: list[Path] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        word, after = _next_word(text, at)
        path = path_of(word)
        try:
            if not (path.is_absolute() and path.name.lower().endswith(suffixes) and path.is_file()):
                break
        except (OSError, ValueError):
            break
        paths.append(path)
        at = after
    return paths, text[at:].strip()


def path_of(word: str) -> Path:
    if word.startswith("file://"):
        return Path(unquote(urlsplit(word).path))
    with suppress(RuntimeError):  # "~somebody" who is not known
        return Path(word).expanduser()
    return Path(word)


def _next_word(text: str, at: int) -> tuple[str, int]:
    """The word that begins there, after blanks, and where it ends."""
    match = _WORD.match(text, at)
    if match is None:
        match = _NO_WORD.match(text, at)
        assert match is not None
        return match[1], match.end()
    single, double, bare = match.groups()
    word = (
        single
        if single is not None
        else double
        if double is not None
        else re.sub(r"\\(.)", r"\1", bare)
    )
    return word, match.end()
