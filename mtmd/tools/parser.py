"""Calls read out of an answer while it is written: text before them goes on as text, a call as its
name and then its arguments, piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mtmd.tools.grammar import ALL, ConstrainedTool, closing
from mtmd.tools.schemas import types_of
from mtmd.tools.syntax import ID, ID_PATTERN, Arguments, CallSyntax
from mtmd.tools.tool import ToolCall, new_id
from mtmd.tools.values import ValueEnd, ValueError_, read_value

BLANKS_STORED = 64  # at a text's end, that may come before a call
FENCES = ("", "```", "```json")  # what an unmarked call may stand in
_UNMARKED = re.compile(
    r"\s*(?:```(?:json)?\s*)?\{\s*"
    r"\"name\"\s*:\s*\"(?P<name>[^\"]*)\"\s*,\s*\"(?P<key>\w+)\"\s*:\s*(?=\{)"
)
_CLOSING = re.compile(r"\s*\}")


@dataclass(frozen=True)
class CallPiece:
    """More of a call: `index` tells which, in order; the first piece of each has its `id` and
    `name`, all joined have its `arguments`.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Piece: TypeAlias = "str | CallPiece"


class CallParser:
    """Parser of the calls of one answer. `special` are the spellings of tokens that a call may
    have. `unmarked`: an answer that begins with the JSON of a call, without the mark that belongs
    before it, is a call, too, also within a block of code: small models write it so.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        tools: Sequence[ConstrainedTool],
        special: Sequence[str],
        unmarked: bool = False,
    ):
        self._syntax = syntax
        self._tools = {stored.tool.name: stored for stored in tools}
        self._names = sorted(self._tools, key=len, reverse=True)
        self._trigger = syntax.trigger(special)
        self._opening = syntax.opening.lstrip()
        self._key = _json_key(syntax, self._trigger) if unmarked else None
        self._step = self._free if self._key is None else self._unmarked
        self._after_json: Any = None
        self._text = ""
        self._begun = False
        self._ended = False
        self._arguments: list[list[str]] = []
        self._made: list[tuple[str, str]] = []
        self._keys = 0
        self._reader: _JsonEnd | None = None
        self._value: tuple[str, int, ValueEnd] | None = None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return those so far; the last one's arguments may be cut."""
        return tuple(
            ToolCall(id_, name, "".join(parts))
            for (id_, name), parts in zip(self._made, self._arguments, strict=True)
        )

    def push(self, text: str) -> list[Piece]:
        """Return what is certain after more of the answer."""
        self._text += text
        return list(self._run())

    def finish(self) -> list[Piece]:
        """Return what was held back and begins no call."""
        text, self._text = self._text, ""
        is_text = self._step == self._free or (self._step == self._unmarked and not self._made)
        return [text] if text and is_text else []

    def _run(self) -> Iterator[Piece]:
        while True:
            step, length = self._step, len(self._text)
            yield from step()
            if self._step == step and len(self._text) == length:
                return

    def _free(self) -> Iterator[Piece]:
        """Text that belongs to no call."""
        if self._trigger is None:
            yield from self._beginning()
            return
        at = self._text.find(self._trigger)
        if at < 0:
            certain = len(self._text) - overlap(self._text, self._trigger)
            # Blanks before a call belong to it; they wait until it is known what follows.
            blank = len(self._text[:certain].rstrip())
            certain = max(blank, certain - BLANKS_STORED)
            if certain:
                yield self._take(certain)
            return
        before = self._take(at).rstrip()
        if before:
            yield before
        self._take(len(self._trigger))
        self._step = self._after(self._opening[len(self._trigger) :], self._name)

    def _unmarked(self) -> Iterator[Piece]:
        """A call without its mark. Text that may be one waits until that is known."""
        result = _UNMARKED.match(self._text)
        if result and result["name"] in self._tools and result["key"] == self._key:
            self._take(result.end())
            yield self._called(result["name"])
            self._after_json = self._unmarked_end
            self._step = self._json
            return
        text = "".join(self._text.split())
        begins = (
            f'{fence}{{"name":"{"".join(name.split())}","{self._key}":{{'
            for fence in FENCES
            for name in self._names
        )
        if not any(begin.startswith(text) for begin in begins):
            self._step = self._lost if self._made else self._free

    def _unmarked_end(self) -> Iterator[Piece]:
        """The end of a call without its mark, and of its block of code; another one may follow."""
        result = _CLOSING.match(self._text)
        if result:
            self._take(result.end())
            self._step = self._fence
        elif self._text.strip():
            self._step = self._lost
        return iter(())

    def _fence(self) -> Iterator[Piece]:
        text = self._text.lstrip()
        if text.startswith("```") or (text and not "```".startswith(text)):
            self._text = text.removeprefix("```")
            self._step = self._unmarked
        return iter(())

    def _beginning(self) -> Iterator[Piece]:
        """Yield it without a mark, an answer is a call if it begins like one."""
        text = self._text.lstrip()
        begins = [
            self._opening + (name if not self._opening.strip("[ \n") else "")
            for name in self._names
        ]
        if not self._begun and any(text.startswith(begin) for begin in begins):
            self._text = text
            self._step = self._after(self._opening, self._name)
        elif self._begun or not any(begin.startswith(text) for begin in begins):
            self._begun = True
            if self._text:
                yield self._take(len(self._text))

    def _after(self, literal: str, then: Any) -> Any:
        """A step that takes exactly this text, ids of any nine letters."""
        parts = [re.escape(part) for part in literal.split(ID)]
        pattern, minimum = re.compile(ID_PATTERN.join(parts)), len(literal) + 8 * literal.count(ID)

        def step() -> Iterator[Piece]:
            match = pattern.match(self._text)
            if match:
                self._take(match.end())
                self._step = then
            elif len(self._text) >= minimum:
                self._step = self._lost
            return iter(())

        return step

    def _lost(self) -> Iterator[Piece]:
        """Yield what follows is no call: a grammar was not held to. It is left out."""
        self._text = ""
        return iter(())

    def _name(self) -> Iterator[Piece]:
        """The name of the next call. It is certain when something follows that no name has."""
        name = next((name for name in self._names if self._follows(name)), None)
        if name is None:
            if len(self._text) > max(map(len, self._names), default=0) + self._longest():
                self._step = self._lost
            return
        self._take(len(name))
        yield self._called(name)
        how = self._syntax.arguments
        if how is None:
            self._after_json = self._after(self._syntax.after, self._next)
            self._step = self._after(self._syntax.after_name, self._json)
        else:
            self._keys = 0
            self._step = self._first

    def _called(self, name: str) -> CallPiece:
        """The first piece of the next call."""
        self._made.append((new_id(), name))
        self._arguments.append([])
        self._reader = _JsonEnd()
        return CallPiece(len(self._made) - 1, self._made[-1][0], name, "")

    def _follows(self, name: str) -> bool:
        """Return whether the text begins with a name and goes on as a call does after it."""
        rest = self._text[len(name) :]
        if not self._text.startswith(name):
            return False
        how = self._syntax.arguments
        ways = (self._syntax.after_name,) if how is None else (how.first, how.none)
        return any(_matches(way, rest) for way in ways) if any(ways) else bool(rest)

    def _longest(self) -> int:
        how = self._syntax.arguments
        ways = (self._syntax.after_name,) if how is None else (how.first, how.none)
        return max(len(way) + 8 * way.count(ID) for way in ways)

    def _json(self) -> Iterator[Piece]:
        """Arguments in one JSON object, as they are written."""
        assert self._reader is not None
        length = self._reader.push(self._text)
        if length:
            yield self._more(self._take(length))
        if self._reader.done:
            self._step = self._after_json

    def _first(self) -> Iterator[Piece]:
        """Named arguments, or none: a call may have no first."""
        how = self._syntax.arguments
        assert how is not None
        if len(self._text) < len(how.none) and how.none.startswith(self._text):
            return  # one of them may begin with the other
        for way, then in sorted(
            ((how.first, self._argument), (how.none, self._next)), key=lambda w: -len(w[0])
        ):
            if _matches(way, self._text):
                if then == self._next:
                    yield self._more("{}")
                self._step = self._after(way, then)
                return

    def _argument(self) -> Iterator[Piece]:
        """A name and its value, once they are whole."""
        how = self._syntax.arguments
        assert how is not None
        result = self._read_argument(how)
        if result is None:
            return
        key, value, length = result
        if self._text.startswith(self._syntax.after, length):
            follows, then = self._syntax.after, self._next
        elif self._text.startswith(how.separator, length):
            follows, then = how.separator, self._argument
        elif len(self._text) - length < max(len(self._syntax.after), len(how.separator)):
            return
        else:
            self._step = self._lost
            return
        self._take(length)
        self._value = None
        written = json.dumps(value, ensure_ascii=False)
        if key == ALL and isinstance(value, dict):
            yield self._more(written)
        else:
            begin = "{" if not self._keys else ", "
            end = "}" if then == self._next else ""
            yield self._more(f"{begin}{json.dumps(key, ensure_ascii=False)}: {written}{end}")
        self._keys += 1
        self._step = self._after(follows, then)

    def _read_argument(self, how: Arguments) -> tuple[str, Any, int] | None:
        """The next name and value and where they end, None while they are not whole."""
        if self._value is None:
            assign = self._text.find(how.assign)
            ends = (how.separator, self._syntax.after)
            if self._text.startswith(f"{ALL}{{") and how.assign == "=":
                self._value = ALL, len(ALL), ValueEnd(how.form, ends)
            elif assign >= 0:
                begin = assign + len(how.assign)
                self._value = self._text[:assign], begin, ValueEnd(how.form, ends)
            else:
                return None
        key, begin, reader = self._value
        if how.form.is_raw:
            end = self._text.find(closing(how, self._syntax.after), begin)
            if end < 0:
                return None
            return key, self._raw(key, self._text[begin:end]), end
        length = reader.push(self._text[begin:])
        if length is None:
            return None
        try:
            value, end = read_value(self._text, begin, how.form)
        except (ValueError_, ValueError, IndexError, RecursionError):
            self._step = self._lost
            return None
        return key, value, end

    def _raw(self, key: str, text: str) -> Any:
        """A value without marks: a text where the schema has no other type, else JSON."""
        schema: Mapping[str, Any] = self._tools[self._made[-1][1]].schema
        properties = schema.get("properties")
        kinds = types_of(properties.get(key, {}) if isinstance(properties, dict) else {}, schema)
        if kinds == {"string"} and key != ALL:
            return text
        try:
            value = json.loads(text)
            json.dumps(value)  # deep ones are read, and not written
        except (ValueError, RecursionError):
            return text
        return value

    def _next(self) -> Iterator[Piece]:
        """Another call, or the end of them."""
        again = self._syntax.between + self._syntax.before_name
        if again and _matches(again, self._text):
            self._step = self._after(again, self._name)
        elif not again and self._text:
            self._step = self._lost
        return iter(())

    def _more(self, arguments: str) -> CallPiece:
        self._arguments[-1].append(arguments)
        return CallPiece(len(self._made) - 1, None, None, arguments)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


def _json_key(syntax: CallSyntax, trigger: str | None) -> str | None:
    """The key of the arguments where a call is a mark, and JSON with the name and them."""
    if trigger is None or syntax.arguments is not None:
        return None
    between = "".join(f"{syntax.opening.lstrip()[len(trigger) :]}\0{syntax.after_name}".split())
    result = re.fullmatch(r'\{"name":"\0","(\w+)":', between)
    return result[1] if result else None


class _JsonEnd:
    """Finds where a JSON object ends, in pieces."""

    def __init__(self) -> None:
        self._deep = 0
        self._in_text = self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Return how much of the text belongs to the object."""
        for at, char in enumerate(text):
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_text = False
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._deep += 1
            elif char in "}]":
                self._deep -= 1
                if self._deep == 0:
                    self.done = True
                    return at + 1
        return len(text)


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the text's end may be the beginning of the mark."""
    return next((n for n in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _matches(literal: str, text: str) -> bool:
    """Return whether the text begins with it."""
    if ID not in literal:
        return text.startswith(literal)
    parts = [re.escape(part) for part in literal.split(ID)]
    return re.match(ID_PATTERN.join(parts), text) is not None
