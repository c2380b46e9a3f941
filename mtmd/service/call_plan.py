"""Describes how the tool calls of one answer are held to their schemas and read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtmd.base.errors import OptionError
from mtmd.options.answer import AnswerOptions
from mtmd.tools.grammar import ConstrainedTool, answer_grammar, hold, looser
from mtmd.tools.parser import CallParser
from mtmd.tools.probe import ToolTemplate
from mtmd.tools.syntax import CallSyntax

TRIALS_S = 20.0  # until no more grammars are tried for the tools of one request
_IN_FORM = "it cannot be followed as the model writes calls"


@dataclass(frozen=True)
class CallPlan:
    """`grammar` is of the whole answer, None where none can be followed; `marks` are special tokens
    that calls may have, `special` their spellings. `unmarked`: calls without their mark count.
    """

    syntax: CallSyntax
    tools: tuple[ConstrainedTool, ...]
    grammar: str | None
    special: tuple[str, ...]
    marks: tuple[int, ...]
    warnings: tuple[str, ...]
    unmarked: bool = False

    def parser(self) -> CallParser:
        return CallParser(self.syntax, self.tools, self.special, self.unmarked)


def plan_calls(
    settings: AnswerOptions,
    template: ToolTemplate,
    silent: Mapping[str, int],
    check: Callable[[str], object],
) -> CallPlan:
    """`silent`: the tokens that add nothing to an answer; `check` as for `hold`. Raises
    OptionError for a strict tool whose schema cannot be followed, and where a call is required,
    or an answer that follows a schema, that no grammar can be made of. After `TRIALS_S` the rest
    counts as what cannot be followed.
    """
    in_time = _for_a_while()

    def tried(source: str) -> object:
        in_time()
        return check(source)

    box, syntax = settings.toolbox, template.syntax
    result = [hold(tool, tried) for tool in box.callable]
    tools = [stored for stored, _ in result]
    warnings = [warning for _, warning in result if warning]
    how = syntax.arguments
    parts = [syntax.begin, syntax.before_name, syntax.after_name, syntax.after, syntax.between]
    parts += [syntax.end]
    if how is not None:
        parts += [how.first, how.assign, how.separator, how.none, how.form.open, how.form.close]
    marks = {text: i for text, i in silent.items() if any(text in part for part in parts)}
    schema = settings.json_schema
    assert schema is None or isinstance(schema, str)  # the options made it so
    parsed = None if schema is None else json.loads(schema)

    partly: list[str] = []

    def checked(tools: Sequence[ConstrainedTool]) -> str:
        in_time()  # a long grammar takes its time to be written, too
        partly.clear()
        made = answer_grammar(tools, box, syntax, marks, parsed, partly)
        check(made)
        return made

    grammar: str | None
    try:
        grammar = checked(tools)
    except OptionError as error:
        is_required = box.choice.mode == "required"
        tools, reported = _followed(tools, checked, is_required)
        warnings += reported
        problem = _problem(checked, tools)
        grammar = None if problem else checked(tools)
        is_promised = is_required or schema is not None or any(h.tool.strict for h in tools)
        if problem and is_promised:
            raise OptionError(f"tools: {_IN_FORM}: {_reason(problem)}") from error
        if problem:
            warnings.append(f"tool calls do not follow their schemas: {_reason(problem)}")
    warnings += partly if grammar is not None else []
    return CallPlan(
        syntax,
        tuple(tools),
        grammar,
        tuple(marks),
        tuple(marks.values()),
        tuple(warnings),
        unmarked=schema is None,
    )


def _for_a_while() -> Callable[[], None]:
    """Return what is returned raises OptionError after that."""
    end = time.monotonic() + TRIALS_S

    def check() -> None:
        if time.monotonic() >= end:
            raise OptionError(
                f"the tools' schemas could not be checked in {TRIALS_S:g} s; "
                "give fewer tools, or simpler schemas"
            )

    return check


def _followed(
    tools: Sequence[ConstrainedTool],
    checked: Callable[[Sequence[ConstrainedTool]], str],
    is_required: bool,
) -> tuple[list[ConstrainedTool], list[str]]:
    """Each tool with as much of its schema held as a grammar of it alone can follow, and warnings.
    Raises OptionError where that is not all of a strict tool, or of any where a call is required.
    """
    saved, reported = [], list[str]()
    for stored in tools:
        problem = _problem(checked, [stored])
        if problem is None:
            saved.append(stored)
            continue
        name, reason = stored.tool.name, f"{_IN_FORM}: {_reason(problem)}"
        if is_required or stored.tool.strict:
            raise OptionError(f"tools: the parameters of {name!r}: {reason}")
        ways = looser(stored, problem)
        saved.append(next((one for one in ways if _problem(checked, [one]) is None), stored))
        reported.append(f"tool {name}: its arguments follow its schema in part: {reason}")
    return saved, reported


def _problem(
    checked: Callable[[Sequence[ConstrainedTool]], str], tools: Sequence[ConstrainedTool]
) -> OptionError | None:
    """Return what is wrong with their grammar."""
    try:
        checked(tools)
    except OptionError as error:
        return error
    return None


def _reason(problem: OptionError) -> str:
    return str(problem).removeprefix("tools: ").removeprefix("grammar: ")


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
