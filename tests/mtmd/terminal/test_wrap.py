"""Lines that end between words on a terminal, and text that is left alone elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import random
import re
import struct
import sys
import termios

import pytest

from mtmd.terminal.wrap import StreamedText, Wrapper, columns, styled, width_of, wrapped

TEXT = (
    "The last rose of the season leans on the window, and nobody  looks.\n\n  def f():\n\treturn 1"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def in_pieces(text: str, width: int, seed: int | None = None) -> str:
    wrapper, draw, made = Wrapper(width), random.Random(seed), ""
    while text:
        size = len(text) if seed is None else draw.randrange(1, 5)
        made, text = made + wrapper.push(text[:size]), text[size:]
    return made + wrapper.finish()


def test_lines_end_between_words() -> None:
    assert in_pieces(TEXT, 20) == (
        "The last rose of the\nseason leans on the\nwindow, and nobody\nlooks.\n\n"
        "  def f():\n\treturn 1"
    )


@pytest.mark.parametrize("width", [1, 7, 20, 44, 80, 1000])
@pytest.mark.parametrize("seed", [1, 2])
def test_pieces_do_not_matter_and_no_word_is_lost(width: int, seed: int) -> None:
    whole = in_pieces(TEXT, width)
    assert in_pieces(TEXT, width, seed) == whole
    assert whole.split() == TEXT.split() or width < 8, "a word is longer than a line"
    assert "".join(whole.split()) == "".join(TEXT.split())
    if width > 8:
        assert max(columns(line.replace("\t", " " * 8)) for line in whole.split("\n")) <= width


def test_wide_characters_take_two_columns_and_break_anywhere() -> None:
    assert columns("寒い夜e\u0301") == 7
    assert in_pieces("寒い夜に月が出る", 6) == "寒い夜\nに月が\n出る"


def test_a_word_longer_than_a_line_is_whole() -> None:
    """So that an address can be copied."""
    assert in_pieces("see http://example.com/ now", 10) == "see\nhttp://example.com/\nnow"


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_beginning_of_a_word_is_seen_at_once_and_moves_to_its_line(seed: int | None) -> None:
    wrapper = Wrapper(21, erases=True)
    assert wrapper.push("One.") == "One."
    assert screen(Wrapper(21, erases=True), TEXT, seed) == in_pieces(TEXT, 20)


def screen(wrapper: Wrapper, text: str, seed: int | None) -> str:
    """What a terminal shows, that obeys what is written to it."""
    draw, lines = random.Random(seed), [""]
    while text:
        size = len(text) if seed is None else draw.randrange(1, 5)
        for word in re.split(r"(\x1b\[\d+D\x1b\[K|\n)", wrapper.push(text[:size])):
            if word.startswith("\x1b"):
                lines[-1] = lines[-1][: -int(word[2:].partition("D")[0])]
            elif word == "\n":
                lines[-1] = lines[-1].rstrip()
                lines.append("")
            else:
                lines[-1] += word
        text = text[size:]
    return "\n".join(lines) + wrapper.finish()


def test_only_a_terminal_gets_other_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)  # pytest's own comes back between fixture and test
    assert wrapped("word " * 6, plain) == "word " * 6
    assert wrapped("word " * 6, indent="  ") == "word word word word\n  word word"
    assert wrapped("\x1b[31mred\x1b[0m " * 2, plain).count("\x1b") == 0
    text = StreamedText()
    for piece in ("one two thr", "ee four five", " six\nse", "ven"):
        text.write(piece)
    assert text.begun
    text.end()
    assert "four\nfive six\nseven\n" in terminal.getvalue() and not text.begun


def test_styles_are_for_terminals_that_have_them(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert styled("> ", "1", terminal) == "\x1b[1m> \x1b[0m"
    assert styled("> ", "1", io.StringIO()) == "> "
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("> ", "1", terminal) == "> "
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("> ", "1", terminal) == "> "


def test_the_width_is_that_of_the_terminal_that_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error on a terminal, of a command whose output goes into a pipe."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 40, 33, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(its, "w") as terminal:  # noqa: PTH123  # a descriptor
        assert width_of(terminal) == 33
        assert wrapped("word " * 7, terminal).split("\n")[0] == "word word word word word word"
    os.close(ours)
    assert width_of(io.StringIO()) is None
