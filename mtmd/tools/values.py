"""Values of arguments as templates write them where that is not JSON: Python's literals, texts
between marks, texts without any.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

DEEP_MAX = 64
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0", "/": "/"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


@dataclass(frozen=True)
class ValueForm:
    """`open` and `close` stand around texts, both empty where texts stand as they are and end with
    the argument; `quoted_keys`: names inside objects are texts.
    """

    open: str
    close: str
    true: str
    false: str
    null: str
    quoted_keys: bool

    @property
    def is_raw(self) -> bool:
        return not self.open

    @property
    def escapes(self) -> bool:
        """Return whether texts have escapes, as between quotation marks."""
        return self.open in ("'", '"')


class ValueError_(ValueError):
    """A text is no value."""


def write_value(value: Any, form: ValueForm) -> str:
    """A value of JSON types."""
    if isinstance(value, str):
        return _quoted(value, form)
    if form.is_raw:
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool):
        return {True: form.true, False: form.false, None: form.null}[value]
    if isinstance(value, dict):
        pairs = (
            f"{_quoted(key, form) if form.quoted_keys else key}:{write_value(item, form)}"
            for key, item in value.items()
        )
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(write_value(item, form) for item in value)}]"
    return json.dumps(value)


def quoted_text(text: str, quote: str) -> str:
    """Between quotation marks, as Python reads it."""
    body = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    return quote + body.replace(quote, f"\\{quote}") + quote


def _quoted(text: str, form: ValueForm) -> str:
    return quoted_text(text, form.open) if form.escapes else form.open + text + form.close


def read_value(text: str, start: int, form: ValueForm) -> tuple[Any, int]:
    """The value that begins at `start`, and where it ends: of `form`, or JSON. Raises ValueError_
    for what is none, IndexError where the text ends before the value.
    """
    return _read(text, start, form, 0)


class ValueEnd:
    """Finds where a value ends while it is written: before one of `ends`, outside texts and
    brackets. Looks at each character once.
    """

    def __init__(self, form: ValueForm, ends: tuple[str, ...]):
        self._form, self._ends = form, ends
        self._wait = max(map(len, ends))
        self._at = self._deep = 0
        self._close = ""

    def push(self, text: str) -> int | None:
        """`text` from the value's beginning on; None while the value goes on."""
        while self._at < len(text):
            if self._close:
                if not self._in_text(text):
                    return None
            elif len(text) - self._at < self._wait and not self._ends_at(text):
                return None
            elif self._ends_at(text):
                return self._at
            else:
                self._outside(text)
        return None

    def _ends_at(self, text: str) -> bool:
        return not self._deep and self._at > 0 and text.startswith(self._ends, self._at)

    def _outside(self, text: str) -> None:
        form, char = self._form, text[self._at]
        if form.open and not form.escapes and text.startswith(form.open, self._at):
            self._close, self._at = form.close, self._at + len(form.open)
            return
        if char in "\"'":
            self._close = char
        elif char in "{[(":
            self._deep += 1
        elif char in "}])":
            self._deep -= 1
        self._at += 1

    def _in_text(self, text: str) -> bool:
        """Past the text that it is in; False where that goes on."""
        if len(self._close) == 1:
            end = _IN_TEXT[self._close].match(text, self._at)
            assert end is not None
            self._at = end.end()
            if not text.startswith(self._close, self._at):
                return False
            self._at += 1
        else:
            end_at = text.find(self._close, self._at)
            if end_at < 0:
                self._at = max(self._at, len(text) - len(self._close) + 1)
                return False
            self._at = end_at + len(self._close)
        self._close = ""
        return True


_IN_TEXT = {'"': re.compile(r'(?:[^"\\]|\\.)*', re.S), "'": re.compile(r"(?:[^'\\]|\\.)*", re.S)}


def _read(text: str, at: int, form: ValueForm, deep: int) -> tuple[Any, int]:
    if deep > DEEP_MAX:
        raise ValueError_("too deep")
    at = _blanks(text, at)
    char = text[at]
    if form.open and text.startswith(form.open, at) and not form.escapes:
        start = at + len(form.open)
        end = text.find(form.close, start)
        if end < 0:
            raise IndexError
        return text[start:end], end + len(form.close)
    if char in "\"'":
        return _string(text, at)
    if char == "{":
        return _object(text, at, form, deep)
    if char == "[":
        return _list(text, at, form, deep)
    if word := _WORD.match(text, at):
        if word.end() == len(text):
            raise IndexError
        if word[0] not in _WORDS:
            raise ValueError_(f"{word[0]!r} is no value")
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None or number.end() == len(text):
        raise (IndexError if len(text) - at < 2 else ValueError_)(f"{text[at : at + 20]!r}")
    return json.loads(number[0]), number.end()


def _object(text: str, at: int, form: ValueForm, deep: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    at = _blanks(text, at + 1)
    while text[at] != "}":
        if text[at] in "\"'" or (form.open and text.startswith(form.open, at)):
            key, at = _read(text, at, form, deep + 1)
        else:
            end = text.index(":", at) if ":" in text[at:] else -1
            if end < 0:
                raise IndexError
            key, at = text[at:end].strip(), end
        at = _blanks(text, at)
        if text[at] != ":":
            raise ValueError_("expected ':'")
        result[str(key)], at = _read(text, at + 1, form, deep + 1)
        at = _next(text, at, "}")
    return result, at + 1


def _list(text: str, at: int, form: ValueForm, deep: int) -> tuple[list[Any], int]:
    result: list[Any] = []
    at = _blanks(text, at + 1)
    while text[at] != "]":
        value, at = _read(text, at, form, deep + 1)
        result.append(value)
        at = _next(text, at, "]")
    return result, at + 1


def _next(text: str, at: int, end: str) -> int:
    at = _blanks(text, at)
    if text[at] == ",":
        return _blanks(text, at + 1)
    if text[at] != end:
        raise ValueError_(f"expected ',' or {end!r}")
    return at


def _string(text: str, at: int) -> tuple[str, int]:
    quote, parts, at = text[at], [], at + 1
    while (char := text[at]) != quote:
        if char != "\\":
            end = at + 1
            while text[end] not in (quote, "\\"):
                end += 1
            parts.append(text[at:end])
            at = end
            continue
        kind = text[at + 1]
        if kind in "ux":
            digits = 4 if kind == "u" else 2
            code = text[at + 2 : at + 2 + digits]
            if len(code) < digits:
                raise IndexError
            parts.append(chr(int(code, 16)))
            at += 2 + digits
        else:
            parts.append(_ESCAPES.get(kind, kind))
            at += 2
    # halves of a surrogate pair, each written by itself
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace"), at + 1


def _blanks(text: str, at: int) -> int:
    while text[at] in " \t\n\r":
        at += 1
    return at
