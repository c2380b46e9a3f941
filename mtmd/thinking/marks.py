"""The marks that a model writes around a thought, and a text split at them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.tools.parser import overlap

# One mark: <think>, <|channel|>, <seed:think>, [THINK], [BEGIN FINAL RESPONSE].
ATOM = re.compile(r"<[^<>\s]{1,48}>|\[/?[A-Z][A-Z_ ]{1,46}\]")
ABOUT_THOUGHTS = re.compile(r"think|thought|reason", re.I)
# Two marks that say together what they are of: <|open|>think<|sep|>.
_TWO = re.compile(rf"(?:{ATOM.pattern})(?i:think|thought|reasoning)(?:{ATOM.pattern})")


@dataclass(frozen=True)
class Marks:
    """`opening` is all that the template writes between the beginning of an answer and a thought,
    `closing` all between the thought and the rest of the answer, blanks included.
    """

    opening: str
    closing: str

    @cached_property
    def open(self) -> str:
        """The text that begins a thought, without the blanks around it."""
        return self.opening.strip()

    @cached_property
    def close(self) -> str:
        """The text that ends a thought: the first mark of `closing`."""
        result = _TWO.match(self.closing.strip()) or ATOM.search(self.closing)
        return result[0] if result else self.closing.strip()

    @cached_property
    def answer(self) -> str:
        """The text that begins the rest of the answer after `close`, such as the header of a
        channel; often empty.
        """
        return self.closing[self.closing.index(self.close) + len(self.close) :].strip()

    @cached_property
    def turn(self) -> str:
        """The text before the second mark of `answer`, with which the template may begin any
        message, a tool call as well: <|start|>assistant. Empty where `answer` has one mark alone.
        """
        result = [match.start() for match in ATOM.finditer(self.answer)]
        return self.answer[: result[1]] if len(result) > 1 else ""

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """`open`, `close` and `answer`, those that are not empty."""
        return tuple(text for text in (self.open, self.close, self.answer) if text)

    def ends_inside(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends inside a thought."""
        return prompt.rstrip().endswith(self.open)

    def ends_after(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends with a thought that is closed."""
        text = prompt.rstrip()
        return text.endswith(self.close) or bool(self.answer and text.endswith(self.answer))

    def seal(self, text: str) -> str:
        """A text in which none of the marks stands: a thought must not end itself."""
        for mark in self.texts:
            text = text.replace(mark, f"{mark[0]}{SEAL}{mark[1:]}") if len(mark) > 1 else text
        return text


@dataclass(frozen=True)
class ThoughtText:
    """More of the thought."""

    text: str


Piece: TypeAlias = "str | ThoughtText"


class Splitter:
    """Splits the text of one answer, in whatever pieces it comes, into thought and answer.
    `inside`: the prompt ends inside a thought. Only what stands before the answer is a thought:
    marks inside the answer are its text. Blanks around a thought belong to neither part.
    """

    def __init__(self, marks: Marks, inside: bool):
        self._marks, self._text = marks, ""
        self._blanks: list[str] = []  # before `_text`, of which nothing is known yet either
        self._step = self._thought if inside else self._before
        self._begun = False  # the thought has had a character that is no blank
        self._may_repeat = inside  # the mark that begins it: some models write it once more
        self._between = ""  # of what the last thought said and what the next one does
        self.had_thought = inside
        self.has_header = False
        """Whether the answer has begun with a mark of its own."""

    @property
    def is_inside(self) -> bool:
        """Return whether what comes next is of a thought, as far as is known."""
        return self._step == self._thought

    @property
    def is_over(self) -> bool:
        """Return whether all that comes next is of the answer."""
        return self._step == self._answer

    @property
    def stored(self) -> str:
        """Text that may be a mark, and is neither thought nor answer yet."""
        return "".join((*self._blanks, self._text))

    @property
    def holds_blanks_only(self) -> bool:
        """Return whether nothing but blanks is held."""
        return not self._text

    def push(self, text: str) -> list[Piece]:
        """Return what is certain after more of the text."""
        self._text += text
        return list(self._run())

    def finish(self, is_mark: bool = False) -> list[Piece]:
        """Return what was held back. `is_mark`: that is known to be the beginning of a mark."""
        stored, text = self.stored, self._text
        self._text, self._blanks = "", []
        if is_mark:
            return []
        if self._step == self._thought:
            return [ThoughtText(stored.rstrip())] if stored.strip() else []
        if self._is_header(text):
            return []
        text = text if self.had_thought else stored
        return [text] if text else []

    def _is_header(self, text: str) -> bool:
        """Return whether a text is the beginning of the answer's header, of which a mark was whole
        before or is now.
        """
        is_beginning = any(header.startswith(text) for header in _headers(self._marks))
        return is_beginning and (self.had_thought or ATOM.match(text) is not None)

    def _run(self) -> Iterator[Piece]:
        while self._text:
            step, length = self._step, len(self._text)
            yield from step()
            if self._step == step and len(self._text) == length:
                return

    def _strip(self) -> None:
        """Put the blanks at the beginning of the text before it."""
        text = self._text.lstrip()
        if len(text) < len(self._text):
            self._blanks.append(self._text[: len(self._text) - len(text)])
            self._text = text

    def _before(self) -> Iterator[Piece]:
        """Before the first word of the answer: a thought, or the answer's own header."""
        self._strip()
        text, marks = self._text, self._marks
        headers = [h for h in (marks.open, *_headers(marks)) if h]
        for header in headers:
            if text.startswith(header):
                self._text, self._blanks = text[len(header) :], []
                is_open = header == marks.open
                self._step = self._thought if is_open else self._answer
                self.had_thought, self.has_header, self._begun = True, not is_open, False
                self._may_repeat = is_open
                return
        if not any(header.startswith(text) for header in headers):
            self._step = self._answer
            if self.had_thought:
                self._text = text.removeprefix(marks.turn)
            else:
                self._text = self.stored
            self._blanks = []
        yield from ()

    def _thought(self) -> Iterator[Piece]:
        marks = self._marks
        if not self._begun:
            self._text = self._text.lstrip()
            if self._may_repeat and marks.open and self._text:
                if self._text.startswith(marks.open):
                    self._text, self._may_repeat = self._text[len(marks.open) :], False
                    return
                if marks.open.startswith(self._text):
                    return
            self._begun = bool(self._text)
        at = self._text.find(marks.close)
        certain = at if at >= 0 else len(self._text) - overlap(self._text, marks.close)
        thought = self._text[:certain].rstrip()
        blanks, self._text = self._text[len(thought) : certain], self._text[certain:]
        if thought:
            yield ThoughtText("".join((self._between, *self._blanks, thought)))
            self._between, self._blanks = "", []
        if blanks:
            self._blanks.append(blanks)
        if at >= 0:
            self._text, self._blanks = self._text[len(marks.close) :], []
            self._step, self._begun, self._between = self._before, False, "\n\n"

    def _answer(self) -> Iterator[Piece]:
        text = self._text
        if self.had_thought and not self._begun:
            text = text.lstrip()
        self._text = ""
        if text:
            self._begun = True
            yield text


def last_mark(text: str) -> str:
    """The mark that a text ends with, and the blanks after it; nothing where it ends otherwise."""
    stem = text.rstrip()
    for pattern in (_TWO, ATOM):
        for result in pattern.finditer(stem):
            if result.end() == len(stem):
                return text[result.start() :]
    return ""


def _headers(marks: Marks) -> tuple[str, ...]:
    """Return what may begin the answer: of a header of several marks, also its end, as where the
    prompt has the beginning.
    """
    result = [match.start() for match in ATOM.finditer(marks.answer)]
    return tuple(marks.answer[start:] for start in (0, *result[1:])) if marks.answer else ()
