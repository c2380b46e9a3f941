"""Grammars in llguidance's Lark notation, put together from texts and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.json_schema import GRAMMAR_CHARS_MAX, grammar_options
from mtmd.llm.sampling.schema_defaults import bound_numbers, drop_idle, say_any_of, share_numbers
from mtmd.tools.syntax import ID, ID_PATTERN

# Without forcing, every way to cut a text into tokens stays open: the model is asked, not the
# library's tokenizer.
HEAD = '%llguidance {"no_forcing": true}\n'
ANY = "(?s:.*)"
# Characters of JSON schemas in one grammar, each with what it refers to beside it, and of its
# rules: no longer grammar is followed.
JSON_MAX = RULES_MAX = GRAMMAR_CHARS_MAX
LOOKS_MAX = 100_000  # at parts of choices: a tenth of a second


class TooLongError(OptionError):
    """Schemas that need a longer grammar than is made."""


class Lark:
    """Rules under names of their own. `special` are tokens that add nothing to a text, by their
    spelling.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        spellings = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, [*spellings, ID])))
        self._rules: list[str] = []
        self._names = self._json_size = self._size = self._looks = 0

    def name(self, terminal: bool = False) -> str:
        self._names += 1
        return f"T{self._names}" if terminal else f"r{self._names}"

    def rule(self, body: str, *, lazy: bool = False, name: str | None = None) -> str:
        """A rule, by its name. Raises TooLongError where all of them are too long."""
        name = name or self.name()
        self._add(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, pattern: str) -> str:
        """`pattern` is what stands on the right: expressions between slashes."""
        name = self.name(terminal=True)
        self._add(f"{name}: {pattern}")
        return name

    def _add(self, rule: str) -> None:
        self._size += len(rule)
        if self._size > RULES_MAX:
            raise TooLongError(
                f"tools: found schemas whose grammar has more than {RULES_MAX:,} characters, "
                "expected at most so many"
            )
        self._rules.append(rule)

    def look(self) -> None:
        """One more part of a choice is looked at. Raises TooLongError where they are too many."""
        self._looks += 1
        if self._looks > LOOKS_MAX:
            raise TooLongError(
                f"tools: found choices of more than {LOOKS_MAX:,} parts, each counted as often as "
                "it is referred to, expected at most so many"
            )

    def text(self, text: str) -> str:
        """An expression for exactly this text; special tokens in it stand for themselves."""
        parts, done = [], 0
        for match in self._marks.finditer(text):
            parts.append(_quoted(text[done : match.start()]))
            is_id = match[0] == ID
            parts.append(f"/{ID_PATTERN}/" if is_id else f"<[{self._special[match[0]]}]>")
            done = match.end()
        parts.append(_quoted(text[done:]))
        return " ".join(part for part in parts if part) or '""'

    def is_special(self, text: str) -> bool:
        return text in self._special

    def until(self, text: str, pattern: str | None = None) -> str:
        """Any text, or one of `pattern` (as `terminal` takes it), up to the first `text`, and
        that.
        """
        before = self.terminal(pattern or f"/{ANY}/")
        if self.is_special(text):
            return f"{before} {self.text(text)}"
        return self.rule(f"{before} {_quoted(text)}", lazy=True)

    def without(self, pattern: str) -> str:
        """Any text that the expression `pattern` does not match as a whole."""
        return self.terminal(f"/{ANY}/ & ~/{pattern}/")

    def json(self, schema: Mapping[str, Any], lenient: bool = False) -> str:
        """A value by a JSON schema. Raises TooLongError where all of them are too long."""
        text = json.dumps(dict(schema), ensure_ascii=False)
        self._json_size += len(text)
        if self._json_size > JSON_MAX:
            raise TooLongError(
                f"tools: found JSON schemas of more than {JSON_MAX:,} characters, each counted "
                "with the definitions that it refers to, expected at most so many"
            )
        bounded = json.loads(text)  # a copy, sooner than by deepcopy
        drop_idle(bounded)
        say_any_of(bounded)
        bound_numbers(bounded)
        share_numbers(bounded)
        return f"%json {json.dumps(bounded | grammar_options(lenient), ensure_ascii=False)}"

    def source(self, start: str) -> str:
        return f"{HEAD}start: {start}\n" + "\n".join(self._rules) + "\n"


def pattern_of(text: str) -> str:
    """A regular expression for exactly this text, to stand between slashes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/&~\"#-])", r"\\\1", text).replace("\n", r"\n")


def loose_pattern_of(text: str) -> str:
    """Do what `pattern_of` does, whatever blanks stand around the punctuation of JSON."""
    parts = [part.strip() for part in re.split(r"([{\[:,])", text)]
    return r"\s*" + "".join(
        rf"\s*{pattern_of(part)}\s*" if part in ("{", "[", ":", ",") else pattern_of(part)
        for part in parts
        if part
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
