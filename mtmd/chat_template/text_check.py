"""Describes whether what was sent stands in the prompt: every text of a conversation once.

The conversation is rendered a second time with two marks in every text. Where that prompt, its
marks removed, is the first one, the marks say exactly which texts are there. A template that looks
into texts can write another prompt for marked ones: then the texts are searched for, in order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from mtmd.base.errors import PromptError
from mtmd.base.text import one_line

# Unicode noncharacters, which are for use inside a program and not part of exchanged text.
_BEGIN, _END, _DIGITS = "\ufdd3", "\ufdd4", "\ufdd8\ufdd9\ufdda\ufddb\ufddc\ufddd\ufdde\ufddf"
_MARKS = re.compile(f"([{_BEGIN}{_END}])([{_DIGITS}]+)")
# Templates write tags and line breaks in their own way.
_BETWEEN = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]|\n")
# A text behind the key of a part: its part may have been printed instead of read, in Python's or
# JSON's notation, where a mark is escaped or not.
_AS_DATA = re.compile(
    rf"['\"]text['\"]\s*:\s*['\"](?:\\.|.)"
    rf"(?:{_BEGIN}([{_DIGITS}]+)|\\u{ord(_BEGIN):x}((?:\\ufdd[89a-f])+))",
    re.DOTALL,
)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that templates may leave out of the history."""
_TAG = re.compile(r"</|\[/|<\|")
THOUGHTS_LEFT_OUT = "the chat template leaves thoughts of earlier answers out of the prompt"
REPEATED = "the chat template writes a text of the conversation more than once"
CHANGED = "the chat template changes a text in the middle"
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class SentText:
    """A text of message `number`, from 1. `optional`: a thought, which a template may leave out;
    `repeatable`: a function's name, which it may write with the result as well; `in_part`: of a
    content that is a list.
    """

    number: int
    role: str
    text: str
    optional: bool = False
    repeatable: bool = False
    in_part: bool = False

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
    if any(texts[_index(*result.groups())].in_part for result in _AS_DATA.finditer(other)):
        raise PromptError("the chat template prints parts of a message as data")
    locations = (
        _locations_of_marks(other, len(texts)) if whole else _locations_by_search(prompt, texts)
    )
    notes: dict[str, None] = {}
    for text, (begins, ends) in zip(texts, locations, strict=True):
        if begins > 1 or ends > 1:
            notes |= {} if text.repeatable else {REPEATED: None}
        if begins and ends:
            continue
        is_thought = text.role == "assistant" and ends and _TAG.search(text.text)
        if text.optional or is_thought:
            notes[THOUGHTS_LEFT_OUT] = None
            continue
        raise PromptError(
            f"the chat template leaves out a text that was sent: {text}; use another chat template "
            "(--chat-template), or send the text in a message of another role"
        )
    if whole:
        notes |= {f"{CHANGED}: {texts[index]}": None for index in _changed(other, marked)}
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
                {**part, "text": mark(part["text"], in_part=True)}
                if part["type"] == "text"
                else part
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
    arguments = _values_with_marks(arguments, mark)
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _values_with_marks(value: Any, mark: Callable[..., str]) -> Any:
    """Return a value of JSON types, of `DEEP_MAX` levels at most, with marks in all its texts."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {key: _values_with_marks(item, mark) for key, item in value.items()}
    return [_values_with_marks(item, mark) for item in value] if isinstance(value, list) else value


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


def _index(digits: str | None, escaped: str | None) -> int:
    """Return the number of a text, from the digits of its mark."""
    if digits is None:
        return int(
            "".join(str(int(part[-1], 16) - 8) for part in (escaped or "").split("\\")[1:]), 8
        )
    return int("".join(str(_DIGITS.index(digit)) for digit in digits), 8)


def _locations_of_marks(prompt: str, count: int) -> list[tuple[int, int]]:
    """Return how often the beginning and the end of each text stand in the prompt."""
    locations = Counter((mark[1], _index(mark[2], None)) for mark in _MARKS.finditer(prompt))
    return [(locations[_BEGIN, index], locations[_END, index]) for index in range(count)]


def _changed(prompt: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the texts of contents that stand in the prompt with other words between their marks,
    blanks and the escapes of JSON aside.
    """
    sent = {
        index: inside
        for message in messages
        for text in _texts_of(message["content"])
        for index, inside in _between_marks(text)
    }
    return [
        index
        for index, inside in _between_marks(prompt)
        if index in sent
        and _squeezed(inside) != _squeezed(sent[index])
        and _squeezed(inside) != _squeezed(json.dumps(sent[index], ensure_ascii=False)[1:-1])
    ]


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _between_marks(text: str) -> Iterator[tuple[int, str]]:
    """Yield what stands between the two marks of each text, where nothing else is marked there."""
    marks = list(_MARKS.finditer(text))
    for begin, end in pairwise(marks):
        if (begin[1], end[1], begin[2]) == (_BEGIN, _END, end[2]):
            yield _index(begin[2], None), text[begin.end() : end.start()]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _locations_by_search(prompt: str, texts: Sequence[SentText]) -> list[tuple[int, int]]:
    """Do what `_locations_of_marks` does, from the texts themselves: each is searched for behind
    the one before it, or anywhere; piece by piece where the template writes line breaks or tags in
    another way, up to the first piece that is missing.
    """
    locations, at = [], 0
    for text in texts:
        stem = text.text.strip()
        end = _end_of(prompt, stem, at) or _end_of(prompt, stem, 0)
        if end is not None:
            locations.append((1, 1))
            at = end
            continue
        pieces = list(filter(None, map(str.strip, _BETWEEN.split(stem)))) or [stem]
        reached, missing = at, False
        for piece in pieces:
            result = _end_of(prompt, piece, reached)
            if result is None:
                missing = True
                break
            reached = result
        last = not missing or _end_of(prompt, pieces[-1], at) is not None
        locations.append((int(not missing), int(last)))
        at = at if missing else reached
    return locations


def _end_of(prompt: str, stem: str, at: int) -> int | None:
    """Return where the text, or its notation in JSON, ends in the prompt behind `at`."""
    for form in dict.fromkeys((stem, json.dumps(stem, ensure_ascii=False)[1:-1])):
        location = prompt.find(form, at)
        if location >= 0:
            return location + len(form)
    return None
