"""Describes how a chat template writes tool calls, as the texts that stand around their parts.

A call is `before_name`, its name, its arguments, `after`; all calls of a message stand between
`begin` and `end`, with `between` from one to the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.tools.values import ValueForm, write_value

# Stands for a call's id in the texts of a syntax: a Unicode noncharacter.
ID = "\ufdd1"
ID_PATTERN = "[A-Za-z0-9]{9}"


@dataclass(frozen=True)
class Arguments:
    """One after the other, with their names: `first` leads from the call's name to the first
    argument's, `assign` from a name to its value, `separator` to the next name; a call without any
    has `none` in place of all.
    """

    form: ValueForm
    first: str
    assign: str
    separator: str
    none: str


@dataclass(frozen=True)
class CallSyntax:
    """`arguments` is None where they are one JSON object, which `after_name` leads to. `several`:
    whether a message may have more than one call.
    """

    begin: str
    before_name: str
    after_name: str
    arguments: Arguments | None
    after: str
    between: str = ""
    end: str = ""
    several: bool = True

    @property
    def opening(self) -> str:
        """Return what the first call begins with."""
        return self.begin + self.before_name

    def trigger(self, special: Sequence[str]) -> str | None:
        """The mark by which a call is known in the middle of a text: a `special` token at its
        beginning, or a word in brackets. None where calls have no mark: an answer is a call if it
        begins like one.
        """
        opening = self.opening.lstrip()
        token = max((s for s in special if s and opening.startswith(s)), key=len, default=None)
        if token is not None:
            return token
        word = re.match(r"<[^\s<>{}]+>|\[[A-Z_]{3,}\]", opening)
        return word[0] if word else None

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any] | str, str]]) -> str:
        """Calls (name, arguments, id) as the model would write them; arguments that are a text, as
        of a call that was cut, stand as they are.
        """
        written = self.between.join(self._one(*call) for call in calls)
        return self.begin + written + self.end

    def _one(self, name: str, arguments: Mapping[str, Any] | str, id_: str) -> str:
        if isinstance(arguments, str):
            body = (self.after_name if self.arguments is None else self.arguments.first) + arguments
        elif self.arguments is None:
            body = self.after_name + json.dumps(arguments, ensure_ascii=False)
        elif not arguments:
            return (self.before_name + name + self.arguments.none).replace(ID, id_)
        else:
            how = self.arguments
            body = how.first + how.separator.join(
                f"{key}{how.assign}{write_value(value, how.form)}"
                for key, value in arguments.items()
            )
        return (self.before_name + name).replace(ID, id_) + body + self.after.replace(ID, id_)


def common_prefix(one: str, other: str) -> str:
    """Return what both begin with."""
    pairs = zip(one, other, strict=False)
    return one[: next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


# What models without a syntax of their own are asked to write; many were trained on it.
GENERIC = CallSyntax(
    "", '<tool_call>\n{"name": "', '", "arguments": ', None, "}\n</tool_call>", "\n"
)
# Of templates that declare tools and leave the writing of calls to others, with these two tokens.
MARKED = ("<|tool_call_start|>", "<|tool_call_end|>")
MARKED_CALLS = CallSyntax(
    f"{MARKED[0]}[",
    "",
    "(",
    Arguments(ValueForm("'", "'", "True", "False", "None", True), "(", "=", ", ", "()"),
    ")",
    ", ",
    f"]{MARKED[1]}",
)
