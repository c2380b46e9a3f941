"""Whether what was sent stands in the prompt: every text of a conversation once.

The conversation is rendered a second time with two marks in every text. Where that prompt, its
marks removed, is the first one, the marks say exactly which texts are there. A template that looks
into texts can write another prompt for marked ones: then the texts are searched for, in order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtmd.kernels.errors import PromptError
from mtmd.kernels.text import one_line

# Unicode noncharacters, which are for use inside a program and not part of exchanged text.
_BEGIN, _END, _DIGITS = "\ufdd3", "\ufdd4", "\ufdd8\ufdd9\ufdda\ufddb\ufddc\ufddd\ufdde\ufddf"
_MARKS = re.compile(f"([{_BEGIN}{_END}])([{_DIGITS}]+)")
# Templates write tags and line breaks in their own way.
_BETWEEN = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|\n")
# A part that was printed instead of read, in Python's or JSON's notation.
_AS_DATA = re.compile(rf"['\"]text['\"]\s*:\s*['\"].(?:{_BEGIN}|\\u{ord(_BEGIN):x})", re.DOTALL)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that templates may leave out of the history."""
THOUGHTS_LEFT_OUT = "the chat template leaves thoughts of earlier answers out of the prompt"
REPEATED = "the chat template writes a text of the conversation more than once"
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class SentText:
    """A text of message `number`, from 1. `optional`: a thought, which a template may leave out;
    `repeatable`: a function's name, which it may write with the result as well.
    """

    number: int
    role: str
    text: str
    optional: bool = False
    repeatable: bool = False

    def __str__(self) -> str:
        return f"message {self.number} ({self.role}): {one_line(self.text, _SHOWN_CHARS)!r}"


def check_texts(
    write: Callable[[list[dict[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> tuple[str, tuple[str, ...]]:
    """Return the prompt that `write` makes of the messages, and notes on what the template left
    out by a rule of its own. `write` is called twice.

    Raises PromptError, naming the message, where a text is not in the prompt; and what `write`
    raises.
    """
    plain = [dict(message) for message in messages]
    prompt = write(plain)
    marked, texts = _with_marks(plain)
    if not texts:
        return prompt, ()
    try:
        other = write(marked)
    except PromptError:  # a text that the template compares with others
        other = ""
    whole = _MARKS.sub("", other) == prompt
    if _AS_DATA.search(other):
        raise PromptError("the chat template prints parts of a message as data")
    found = _found_by_marks(other, len(texts)) if whole else _found_by_search(prompt, texts)
    notes: dict[str, None] = {}
    for text, (begins, ends) in zip(texts, found, strict=True):
        if (begins > 1 or ends > 1) and not text.repeatable:
            notes[REPEATED] = None
        if begins and ends:
            continue
        if text.optional or (text.role == "assistant" and ends):
            notes[THOUGHTS_LEFT_OUT] = None
            continue
        raise PromptError(
            f"the chat template leaves out a text that was sent: {text}; use another chat template "
            "(--chat-template), or send the text in a message of another role"
        )
    return prompt, tuple(notes)


def _with_marks(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[SentText]]:
    texts: list[SentText] = []
    made = []
    for number, message in enumerate(messages, 1):
        mark = partial(_mark, texts, number, message["role"])
        content = message["content"]
        if isinstance(content, str):
            content = mark(content)
        else:
            content = [
                {**part, "text": mark(part["text"])} if part["type"] == "text" else part
                for part in content
            ]
        changed = {**message, "content": content}
        for name in THOUGHTS:
            if isinstance(message.get(name), str):
                changed[name] = mark(message[name], optional=True)
        if message.get("tool_calls"):
            changed["tool_calls"] = [_call_with_marks(c, mark) for c in message["tool_calls"]]
        made.append(changed)
    return made, texts


def _call_with_marks(call: Mapping[str, Any], mark: Callable[..., str]) -> dict[str, Any]:
    """Return the call with marks in its name and in the texts among its arguments."""
    function, arguments = call["function"], call["function"]["arguments"]
    name = mark(function["name"], repeatable=True)
    if isinstance(arguments, Mapping):
        arguments = {k: mark(v) if isinstance(v, str) else v for k, v in arguments.items()}
    else:
        arguments = mark(arguments)
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _mark(texts: list[SentText], number: int, role: str, text: str, **kind: bool) -> str:
    """Add a text to `texts`, and return it with its marks; one of blanks alone has none."""
    if not text.strip():
        return text
    texts.append(SentText(number, role, text, **kind))
    return _marked(text, len(texts) - 1)


def _marked(text: str, index: int) -> str:
    """The text with a mark after its first character and one before its last, blanks left out."""
    start = len(text) - len(text.lstrip())
    stop = len(text.rstrip())
    digits = "".join(_DIGITS[int(digit)] for digit in f"{index:o}")
    inside = text[start + 1 : max(start + 1, stop - 1)]
    last = text[max(start + 1, stop - 1) : stop]
    return f"{text[: start + 1]}{_BEGIN}{digits}{inside}{_END}{digits}{last}{text[stop:]}"


def _found_by_marks(prompt: str, count: int) -> list[tuple[int, int]]:
    """How often the beginning and the end of each text stand in the prompt."""
    places = Counter(match.groups() for match in _MARKS.finditer(prompt))
    names = ["".join(_DIGITS[int(digit)] for digit in f"{i:o}") for i in range(count)]
    return [(places[_BEGIN, name], places[_END, name]) for name in names]


def _found_by_search(prompt: str, texts: Sequence[SentText]) -> list[tuple[int, int]]:
    """As `_found_by_marks`, from the texts themselves: each is searched for behind the one before
    it, piece by piece where the template writes line breaks or tags in another way.
    """
    found, at = [], 0
    for text in texts:
        end = _end_of(prompt, text.text, at)
        if end is None:
            pieces = list(filter(None, map(str.strip, _BETWEEN.split(text.text)))) or [text.text]
            ends = [_end_of(prompt, piece, 0) for piece in pieces]
            found.append((int(None not in ends), int(ends[-1] is not None)))
            continue
        found.append((1, 1))
        at = end
    return found


def _end_of(prompt: str, text: str, at: int) -> int | None:
    """Where the text, or its notation in JSON, ends in the prompt behind `at`, or anywhere."""
    stem = text.strip()
    for form in (stem, json.dumps(stem, ensure_ascii=False)[1:-1]):
        for start in (at, 0):
            place = prompt.find(form, start)
            if place >= 0:
                return place + len(form)
    return None
