"""Grammars in the notations that clients write them in, as one: llguidance's Lark
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). Loads without torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line
from mtmd.llm.sampling.json_schema import GRAMMAR_CHARS_MAX, LARK, CheckedSchema, lark_grammar

NOTATIONS = ("regex", "choice", "lark", "gbnf")
CHOICES_MAX = 4096
DEEP_MAX = 100
# Without forcing, every way to cut a text into tokens stays open: the model is asked, not the
# library's tokenizer.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Of GBNF: a comment, a text, a class of characters; each also without an end, which the converter
# refuses.
_GBNF_PARTS = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?', re.DOTALL)
_GBNF_ESCAPES = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL
)


def grammar_source(value: object, check: Callable[[str], object] = lark_grammar) -> str | None:
    """A grammar in Lark notation, from a mapping of one of `NOTATIONS` to it, or from a text in
    Lark's or GBNF's notation. None stays None. `check` is called with it.

    Raises OptionError for one that is too long or cannot be followed.
    """
    if value is None or isinstance(value, CheckedSchema):
        return value
    notation, grammar = _notation(value)
    if len(str(grammar)) > GRAMMAR_CHARS_MAX:
        raise OptionError(f"grammar: found more than {GRAMMAR_CHARS_MAX} characters")
    source = _READERS[notation](grammar)
    check(source)
    return source


def _notation(value: object) -> tuple[str, Any]:
    if isinstance(value, str):
        is_lark = re.search(r"(?m)^\s*(%llguidance\b|start\s*:)", value) is not None
        return "lark" if is_lark else "gbnf", value
    if isinstance(value, Mapping) and len(value) == 1:
        ((notation, grammar),) = value.items()
        if notation in NOTATIONS:
            return str(notation), grammar
    raise OptionError(
        f"grammar: found {one_line(repr(value))[:80]}, expected a text, or one of "
        f"{', '.join(NOTATIONS)} with a grammar"
    )


def _regex(grammar: object) -> str:
    """Return it in the syntax of Rust's regex crate, the whole of the answer."""
    pattern = _text(grammar, "regex").removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    if not pattern:
        raise OptionError("grammar: found an empty regular expression, expected one of some texts")
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    return f"{_HEAD}start: TEXT\nTEXT: /({escaped})/\n"


def _choice(grammar: object) -> str:
    if (
        not isinstance(grammar, (list, tuple))
        or not 0 < len(grammar) <= CHOICES_MAX
        or not all(isinstance(choice, str) and choice for choice in grammar)
    ):
        raise OptionError(
            f"grammar: expected as choice a list of at most {CHOICES_MAX} texts that are not empty"
        )
    return f"{_HEAD}start: {' | '.join(json.dumps(c, ensure_ascii=False) for c in grammar)}\n"


def _lark(grammar: object) -> str:
    source = _text(grammar, "lark")
    head = re.match(r"\s*%llguidance[^\n]*\n?", source)
    return _HEAD + (source[head.end() :] if head else source)


def _gbnf(grammar: object) -> str:
    """llama.cpp's notation, by the library's own converter. It calls itself for what stands in
    parentheses.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = _text(grammar, "gbnf")
    if source.count("(") > DEEP_MAX and _depth(source) > DEEP_MAX:
        raise OptionError(f"grammar: found more than {DEEP_MAX} parentheses in one another")
    source = _GBNF_PARTS.sub(_with_characters, source)
    try:
        return _lark(gbnf_to_lark(source))
    except Exception as error:  # the library's own, of several kinds
        raise OptionError(
            f"grammar: found GBNF that cannot be read ({one_line(str(error))[:160]}), expected "
            "rules of the kind 'root ::= ...'"
        ) from error


def _with_characters(part: re.Match[str]) -> str:
    """A text or class of GBNF with characters in place of \\x, \\u and \\U, which stand for code
    points: the library's converter reads them otherwise. Those of ASCII, which may mean something
    there, stay escaped.
    """
    return part[0] if part[0].startswith("#") else _GBNF_ESCAPES.sub(_character, part[0])


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        raise OptionError(
            f"grammar: found {escape[0]}, which is no character, expected a code point; write one "
            "beyond U+FFFF as \\UXXXXXXXX"
        )
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _depth(source: str) -> int:
    deep = maximum = 0
    for char in source:
        deep += (char == "(") - (char == ")")
        maximum = max(maximum, deep)
    return maximum


def _text(grammar: object, notation: str) -> str:
    if not isinstance(grammar, str) or not grammar.strip():
        raise OptionError(f"grammar: expected as {notation} a text that is not empty")
    return grammar


_READERS = {"regex": _regex, "choice": _choice, "lark": _lark, "gbnf": _gbnf}
assert _HEAD.startswith(LARK)
