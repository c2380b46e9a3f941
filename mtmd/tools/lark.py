"""Grammars in llguidance's Lark notation, put together from texts and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mtmd.kernels.errors import OptionError
from mtmd.llm.sampling.json_schema import GRAMMAR_OPTIONS
from mtmd.llm.sampling.schema_defaults import bound_numbers, drop_idle, say_any_of, share_numbers
from mtmd.tools.syntax import ID, ID_PATTERN

# Without forcing, every way to cut a text into tokens stays open: the model is asked, not the
# library's tokenizer.
HEAD = '%llguidance {"no_forcing": true}\n'
ANY = "(?s:.*)"
# Characters of JSON schemas in one grammar, each with what it refers to beside it. llguidance has
# refused a tenth of it as too big, after seconds of a worker; much more would take our own memory.
JSON_MAX = 16 << 20


class Lark:
    """Rules under names of their own. `special` are tokens that add nothing to a text, by their
    spelling.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        spellings = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, [*spellings, ID])))
        self._rules: list[str] = []
        self._names = self._json_size = 0

    def name(self, terminal: bool = False) -> str:
        self._names += 1
        return f"T{self._names}" if terminal else f"r{self._names}"

    def rule(self, body: str, *, lazy: bool = False, name: str | None = None) -> str:
        """A rule, by its name."""
        name = name or self.name()
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, pattern: str) -> str:
        """`pattern` is what stands on the right: expressions between slashes."""
        name = self.name(terminal=True)
        self._rules.append(f"{name}: {pattern}")
        return name

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

    def until(self, text: str) -> str:
        """Any text, up to the first `text`, and that."""
        if self.is_special(text):
            return f"{self.terminal(f'/{ANY}/')} {self.text(text)}"
        return self.rule(f"{self.terminal(f'/{ANY}/')} {_quoted(text)}", lazy=True)

    def without(self, pattern: str) -> str:
        """Any text that the expression `pattern` does not match as a whole."""
        return self.terminal(f"/{ANY}/ & ~/{pattern}/")

    def json(self, schema: Mapping[str, Any], lenient: bool = False) -> str:
        """A value by a JSON schema. Raises OptionError where all of them are too long."""
        options = {**GRAMMAR_OPTIONS["x-guidance"], "lenient": lenient}
        text = json.dumps(dict(schema))
        self._json_size += len(text)
        if self._json_size > JSON_MAX:
            raise OptionError(
                f"tools: found JSON schemas of more than {JSON_MAX:,} characters, each counted "
                "with the definitions that it refers to, expected at most so many"
            )
        bounded = json.loads(text)  # a copy, sooner than by deepcopy
        drop_idle(bounded)
        say_any_of(bounded)
        bound_numbers(bounded)
        share_numbers(bounded)
        return f"%json {json.dumps({**bounded, 'x-guidance': options}, ensure_ascii=False)}"

    def source(self, start: str) -> str:
        return f"{HEAD}start: {start}\n" + "\n".join(self._rules) + "\n"


def pattern_of(text: str) -> str:
    """A regular expression for exactly this text, to stand between slashes."""
    return re.sub(r"([\\^$.|?*+()\[\]{}/&~\"#-])", r"\\\1", text).replace("\n", r"\n")


def loose_pattern_of(text: str) -> str:
    """As `pattern_of`, whatever blanks stand around the punctuation of JSON."""
    parts = [part.strip() for part in re.split(r"([{\[:,])", text)]
    return r"\s*" + "".join(
        rf"\s*{pattern_of(part)}\s*" if part in ("{", "[", ":", ",") else pattern_of(part)
        for part in parts
        if part
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
