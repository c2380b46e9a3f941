"""Describes how a chat template writes tools, calls and their results, found out by rendering a
conversation with each and looking at what stands around the parts that are known.

Nothing is known of any model here: a template that writes calls in a way of its own is understood
as long as the way has the shape of `syntax.CallSyntax`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtmd.base.errors import MtmdError
from mtmd.tools.syntax import (
    GENERIC,
    ID,
    MARKED,
    MARKED_CALLS,
    Arguments,
    CallSyntax,
    common_prefix,
)
from mtmd.tools.tool import Tool
from mtmd.tools.values import ValueForm

Render = Callable[..., str]
_TOOL, _CALL, _OTHER = "probedtool", "probedcall", "othercall"
_IDS = ("probeid01", "probeid02")
_TEXT, _RESULT = "probedtext", "probedresult"
# Sorted, as some templates sort them.
_KEYS = ("qaone", "qbtwo", "qcthree", "qdfour")
_STRING, _NUMBER = "probedvalue", 73519
_ASK = {"role": "user", "content": "probedquestion"}
_DECLARED = Tool(_TOOL, "probed", '{"type": "object", "properties": {}}').declaration()


@dataclass(frozen=True)
class ToolTemplate:
    """Describes what a template can do by itself. `declares`: it tells the model about tools;
    `writes_calls` and `writes_results`: messages with them go into it as they are, `pictures`:
    those of results as well; `text_arguments`: it takes arguments as JSON text. `syntax` is how
    calls are to be read.
    """

    declares: bool
    syntax: CallSyntax
    writes_calls: bool
    writes_results: bool
    pictures: bool = False
    text_arguments: bool = False


def read_template(
    render: Render, special: Sequence[str], stops: Sequence[str], marker: str | None = None
) -> ToolTemplate:
    """`render(messages, tools=..., add_generation_prompt=...)` as `ChatTemplate.render`; `special`
    are the spellings of the tokenizer's special tokens, `stops` those that end an answer, `marker`
    what the template writes for a picture.
    """
    declares = _TOOL in _try(render, [_ASK], tools=[_DECLARED]) and _TOOL not in _try(
        render, [_ASK]
    )
    for text_arguments in (False, True):
        syntax = _Probe(render, stops, text_arguments).syntax()
        if syntax is not None:
            results, pictures = _results(render, text_arguments, marker)
            return ToolTemplate(declares, syntax, True, results, pictures, text_arguments)
    marked = declares and all(mark in special for mark in MARKED)
    # One that knows of no tools may show any role: its model has never seen results in one.
    results, pictures = _results(render, False, marker) if declares else (False, False)
    syntax = MARKED_CALLS if marked else GENERIC
    return ToolTemplate(declares, syntax, False, results, pictures)


def _results(render: Render, text_arguments: bool, marker: str | None) -> tuple[bool, bool]:
    """Return whether results can be written, and pictures in them."""
    call = _message([_call(_CALL, {_KEYS[0]: _STRING}, _IDS[0], text_arguments)])
    result: dict[str, Any] = {"role": "tool", "tool_call_id": _IDS[0], "name": _CALL}

    def rendered(content: Any) -> str:
        messages = [_ASK, call, {**result, "content": content}]
        return _try(render, messages, tools=[_DECLARED])

    if _RESULT not in rendered(_RESULT):
        return False, False
    parts = rendered([{"type": "text", "text": _RESULT}, {"type": "image"}])
    shown = marker is not None and parts.count(marker) == 1
    # a list printed as it is, which tools are not
    as_data = re.search(r"['\"]type['\"]: ['\"]image", parts)
    return True, shown and _RESULT in parts and not as_data


class _Probe:
    def __init__(self, render: Render, stops: Sequence[str], text_arguments: bool):
        self._render, self._stops, self._text = render, stops, text_arguments

    def syntax(self) -> CallSyntax | None:
        """None where the template leaves calls out, or writes them in some other shape."""
        text = _try(
            self._render, [_ASK, {"role": "assistant", "content": _TEXT}], tools=[_DECLARED]
        )
        if text.count(_TEXT) != 1:
            return None
        self._before, self._after = text.split(_TEXT)
        one = self._body([(_CALL, {_KEYS[0]: _STRING})])
        if one is None or one.count(_CALL) != 1:
            return None
        before, rest = one.split(_CALL)
        result = _json_arguments(rest) or self._named_arguments()
        if result is None:
            return None
        after_name, arguments, tail = result
        whole = CallSyntax("", before.lstrip(), after_name, arguments, tail, several=False)
        return self._several(whole)

    def _several(self, whole: CallSyntax) -> CallSyntax:
        """Return what of the texts around one call belongs to each of several, and what to all."""
        values = {_KEYS[0]: _STRING}
        two = self._body([(_CALL, values), (_OTHER, values)])
        if two is None or two.count(_CALL) != 1 or two.count(_OTHER) != 1:
            return self._without_end(whole, "")
        middle = two[two.index(_CALL) + len(_CALL) : two.index(_OTHER)]
        value_end = middle.rindex(_STRING) + len(_STRING)
        written = re.match(r"\"\s*\}", middle[value_end:]) if whole.arguments is None else None
        closing = whole.arguments.form.close if whole.arguments else ""
        between = middle[value_end + (written.end() if written else len(closing)) :]
        after = common_prefix(whole.after, between)
        end, between = whole.after[len(after) :], between[len(after) :]
        before_name = _common_suffix(whole.before_name, between)
        begin = whole.before_name[: len(whole.before_name) - len(before_name)]
        between = between[: len(between) - len(before_name)]
        result = replace(
            whole, begin=begin, before_name=before_name, after=after, between=between, several=True
        )
        return self._without_end(result, end)

    def _without_end(self, syntax: CallSyntax, end: str) -> CallSyntax:
        """`end` is of all calls; of a call without arguments it is left away, too."""
        if end and syntax.arguments is not None:
            none = syntax.arguments.none.removesuffix(end)
            syntax = replace(syntax, arguments=replace(syntax.arguments, none=none))
        return replace(syntax, end=end)

    def _body(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
        """Return what a message with these calls has in place of a text; ids are `ID`."""
        made = [
            _call(name, values, id_, self._text)
            for (name, values), id_ in zip(calls, _IDS, strict=False)
        ]
        rendered = _try(self._render, [_ASK, _message(made)], tools=[_DECLARED])
        if _CALL not in rendered:
            return None
        start = len(common_prefix(self._before, rendered))
        body = rendered[start : len(rendered) - len(_common_suffix(self._after, rendered))]
        for stop in self._stops:
            if stop in body[body.index(_CALL) :]:
                body = body[: body.index(stop, body.index(_CALL))]
        for id_ in _IDS:
            body = body.replace(id_, ID)
        return body.rstrip() if body.count(_CALL) == 1 else None

    def _named_arguments(self) -> tuple[str, Arguments, str] | None:
        """`first` is in `Arguments`; returned are what leads to JSON, which is not there, the
        arguments, and what follows them.
        """
        several = self._body(
            [(_CALL, dict(zip(_KEYS, (_STRING, _NUMBER, True, None), strict=True)))]
        )
        none = self._body([(_CALL, {})])
        parts = [_KEYS[0], _STRING, _KEYS[1], str(_NUMBER), _KEYS[2], _KEYS[3]]
        if several is None or none is None or any(several.count(part) != 1 for part in parts):
            return None
        at = [several.index(part) for part in parts]
        if at != sorted(at):
            return None
        gap = [
            several[start + len(part) : end]
            for start, part, end in zip(at, parts, [*at[1:], len(several)], strict=True)
        ]
        assign, separator = gap[2], gap[3]
        true = re.match(re.escape(assign) + "([Tt]rue)" + re.escape(separator), gap[4])
        null = re.match(re.escape(assign) + "(None|null)", gap[5])
        if not (
            assign
            and separator
            and gap[0].startswith(assign)
            and gap[1].endswith(separator)
            and true
            and null
        ):
            return None
        form = ValueForm(
            gap[0][len(assign) :],
            gap[1][: len(gap[1]) - len(separator)],
            true[1],
            "False" if true[1] == "True" else "false",
            null[1],
            self._quoted_keys(gap[0][len(assign) :]),
        )
        first = several[several.index(_CALL) + len(_CALL) : at[0]]
        without = none[none.index(_CALL) + len(_CALL) :]
        return "", Arguments(form, first, assign, separator, without), gap[5][null.end() :]

    def _quoted_keys(self, opening: str) -> bool:
        """Return whether names inside objects are written like texts."""
        nested = self._body([(_CALL, {_KEYS[0]: {_KEYS[1]: _STRING}})])
        return nested is None or not re.search(r"\{\s*" + _KEYS[1], nested) or not opening


def _json_arguments(rest: str) -> tuple[str, None, str] | None:
    """Return what stands between a call's name and its arguments, and after them, if they are
    JSON.
    """
    written = re.search(rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_STRING}"\s*\}}', rest)
    return None if written is None else (rest[: written.start()], None, rest[written.end() :])


def _call(name: str, values: dict[str, Any], id_: str, text: bool) -> dict[str, Any]:
    arguments = json.dumps(values) if text else values
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _try(render: Render, messages: list[dict[str, Any]], **more: Any) -> str:
    """Nothing where the template refuses."""
    try:
        return render(messages, add_generation_prompt=False, **more)
    except MtmdError:
        return ""


def _common_suffix(one: str, other: str) -> str:
    length = len(common_prefix(one[::-1], other[::-1]))
    return one[len(one) - length :]
