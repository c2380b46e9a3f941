"""How the tool calls of one answer are held to their schemas and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtmd.config import AnswerOptions
from mtmd.kernels.errors import OptionError
from mtmd.tools.grammar import HeldTool, answer_grammar, hold
from mtmd.tools.parser import CallParser
from mtmd.tools.probe import ToolTemplate
from mtmd.tools.syntax import CallSyntax


@dataclass(frozen=True)
class CallPlan:
    """`grammar` is of the whole answer; `marks` are special tokens that calls may have, `special`
    their spellings.
    """

    syntax: CallSyntax
    tools: tuple[HeldTool, ...]
    grammar: str
    special: tuple[str, ...]
    marks: tuple[int, ...]
    warnings: tuple[str, ...]

    def parser(self) -> CallParser:
        return CallParser(self.syntax, self.tools, self.special)


def plan_calls(
    settings: AnswerOptions,
    template: ToolTemplate,
    silent: Mapping[str, int],
    check: Callable[[str], object],
) -> CallPlan:
    """`silent`: the tokens that add nothing to an answer; `check` as for `hold`. Raises
    OptionError for a strict tool whose schema cannot be followed.
    """
    box, syntax = settings.toolbox, template.syntax
    found = [hold(tool, check) for tool in box.callable]
    tools = tuple(held for held, _ in found)
    how = syntax.arguments
    parts = [syntax.begin, syntax.before_name, syntax.after_name, syntax.after, syntax.between]
    parts += [syntax.end]
    if how is not None:
        parts += [how.first, how.assign, how.separator, how.none, how.form.open, how.form.close]
    marks = {text: i for text, i in silent.items() if any(text in part for part in parts)}
    schema = settings.json_schema
    assert schema is None or isinstance(schema, str)  # the options made it so
    return CallPlan(
        syntax,
        tools,
        answer_grammar(tools, box, syntax, marks, None if schema is None else json.loads(schema)),
        tuple(marks),
        tuple(marks.values()),
        tuple(warning for _, warning in found if warning),
    )


def check_ids(settings: AnswerOptions, tokens: int) -> None:
    """Raises OptionError for ids that the model does not have, `tokens` being how many it has."""
    assert isinstance(settings.logit_bias, tuple)  # the options made it so
    given = {
        "logit_bias": [token for token, _ in settings.logit_bias],
        "stop_token_ids": settings.stop_token_ids,
    }
    for name, ids in given.items():
        if ids and max(ids) >= tokens:
            raise OptionError(f"{name}: found token {max(ids)}, expected ids below {tokens}")
