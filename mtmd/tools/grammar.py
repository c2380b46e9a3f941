"""The grammar of an answer that may, or has to, call tools: calls as the template writes them, with
arguments that follow each tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.json_schema import LEFT_OUT, loosened, without_loops
from mtmd.llm.sampling.schema_defaults import (
    close_objects,
    drop_formats,
    not_enforced,
    say_plainly,
    shown,
)
from mtmd.tools.lark import ANY, Lark, TooLongError, loose_pattern_of
from mtmd.tools.schemas import (
    ANNOTATIONS,
    TYPES,
    resolve,
    texts_of,
    types_of,
    with_definitions,
    without_annotations,
)
from mtmd.tools.syntax import Arguments, CallSyntax, common_prefix
from mtmd.tools.tool import Tool, Toolbox
from mtmd.tools.value_grammar import ValueGrammar, raw_pattern

# The name under which arguments stand that are written as one JSON object though the form has
# names for each.
ALL = "**"
_PARTS = ("allOf", "anyOf", "oneOf")
_OF_TEXTS = {"type", "minLength", "maxLength", "pattern"}
_ADDS = ("$ref", "if", "then", "else", "dependentSchemas", "unevaluatedProperties")


@dataclass(frozen=True)
class ConstrainedTool:
    """A tool whose arguments follow `schema`; `lenient`: keywords that no grammar can promise are
    passed over.
    """

    tool: Tool
    schema: Mapping[str, object]
    lenient: bool = False


def hold(tool: Tool, check: Callable[[str], object]) -> tuple[ConstrainedTool, str | None]:
    """Return what of a tool's schema can be followed, and a warning where that is not all. `check`
    raises OptionError for the text of a schema or a grammar that cannot be followed; so does this,
    where the tool is strict.
    """
    schema = with_definitions(_closed(without_annotations(tool.schema)))
    say_plainly(schema)
    formats = drop_formats(schema)
    try:
        check(json.dumps(schema, ensure_ascii=False))
        return ConstrainedTool(tool, schema), _in_part(
            tool, not_enforced(formats)
        ) if formats else None
    except OptionError as error:
        reason = str(error).removeprefix("json_schema: ")
        if tool.strict:
            raise OptionError(
                f"tools: the parameters of {tool.name!r}, which is strict: {reason}"
            ) from error
    schema = without_loops(schema)
    for less in (schema, loosened(schema)):
        try:
            lark = Lark({})
            check(lark.source(lark.json(less, lenient=True)))
        except OptionError:
            continue
        stored = ConstrainedTool(tool, less, lenient=True)
        return stored, _in_part(tool, reason)
    stored = ConstrainedTool(tool, {"type": "object"})
    return stored, f"tool {tool.name}: its arguments are any JSON object: {reason}"


def _in_part(tool: Tool, reason: str) -> str:
    return f"tool {tool.name}: its arguments follow its schema in part: {reason}"


def looser(stored: ConstrainedTool, error: OptionError) -> Iterator[ConstrainedTool]:
    """The same with less of its schema held, step by step, down to any JSON object; `error` is what
    is wrong with it.
    """
    tool, schema = stored.tool, stored.schema
    if not isinstance(error, TooLongError):  # which all of it stays
        yield ConstrainedTool(tool, schema, lenient=True)
        yield ConstrainedTool(tool, loosened(dict(schema)), lenient=True)
    names = schema.get("properties")
    if isinstance(names, dict) and names:
        kinds = {name: _plain(part) for name, part in names.items()}
        yield ConstrainedTool(tool, {"type": "object", "properties": kinds})
    yield ConstrainedTool(tool, {"type": "object"})


def _plain(part: object) -> dict[str, str]:
    """The type alone."""
    kind = part.get("type") if isinstance(part, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind in TYPES else {}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what the schema leaves open no function takes, and a model may not find an end there;
    but names may stand in parts of it, or among the required ones alone. `"properties": {}` is how
    a function without arguments is declared.
    """
    names, required = schema.get("properties"), schema.get("required", [])
    parts = [part for key in _PARTS for part in _listed(schema.get(key))]
    if (
        not isinstance(names, dict)
        or not {"additionalProperties", "patternProperties", *_ADDS}.isdisjoint(schema)
        or not all(isinstance(part, dict) and part.keys() <= {"required", "type"} for part in parts)
        or not all(isinstance(name, str) and name in names for name in _listed(required))
    ):
        return schema
    return {**schema, "additionalProperties": False}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def answer_grammar(
    tools: Sequence[ConstrainedTool],
    box: Toolbox,
    syntax: CallSyntax,
    special: Mapping[str, int],
    schema: Mapping[str, object] | None = None,
    partly: list[str] | None = None,
) -> str:
    """`special`: tokens that add nothing to a text. `schema`: what an answer without calls
    follows. `partly` gets a warning for each tool with texts that are held to a part of what its
    schema asks of them, as a form without marks has no other way to write them.
    """
    lark = Lark(special)
    calls = []
    for tool in tools:
        freer: list[str] = []
        calls.append(_call(lark, tool, syntax, freer))
        if freer and partly is not None:
            reason = f"texts keep to choices, length and pattern: {shown(freer[::-1])}"
            partly.append(_in_part(tool.tool, reason))
    call = lark.rule(" | ".join(calls))
    several = box.several and syntax.several
    after = lark.text(syntax.end)
    if several:
        again = lark.text(syntax.between + syntax.before_name)
        after = f"({again} {call})* {after}"
    trigger = syntax.trigger(tuple(special))
    opening = syntax.opening.lstrip()
    if box.choice.mode == "required":
        return lark.source(f"{lark.text(opening)} {call} {after}")
    if schema is not None:
        free = lark.rule(lark.json(_as_alone(schema), lenient=LEFT_OUT in schema))
        return lark.source(f"{free} | {lark.text(opening)} {call} {after}")
    if trigger is None:
        begins = "|".join(
            f"{loose_pattern_of(opening + name)}"
            for name in (
                [""] if opening.strip("[ \n") else [f"{stored.tool.name}" for stored in tools]
            )
        )
        free = lark.without(f"({begins}){ANY}")
        return lark.source(f"{free} | {lark.text(opening)} {call} {after}")
    head, rest = lark.until(trigger), lark.text(opening[len(trigger) :])
    free = (
        lark.terminal(f"/{ANY}/")
        if lark.is_special(trigger)
        else lark.without(f"{ANY}{loose_pattern_of(trigger).removeprefix(chr(92) + 's*')}{ANY}")
    )
    return lark.source(f"{free} | {head} {rest} {call} {after}")


def _as_alone(schema: Mapping[str, object]) -> dict[str, Any]:
    """The schema of an answer as `grammar_text` reads it where there are no tools."""
    plain: dict[str, Any] = json.loads(json.dumps(schema))
    plain.pop(LEFT_OUT, None)
    say_plainly(plain)
    drop_formats(plain)
    close_objects(plain)
    return plain


def _call(lark: Lark, stored: ConstrainedTool, syntax: CallSyntax, freer: list[str]) -> str:
    """A rule for a call from its name on. `freer` gets the names of arguments of which more is
    asked than their texts are held to.
    """
    name = stored.tool.name
    if syntax.arguments is None:
        value = lark.json(stored.schema, stored.lenient)
        return lark.rule(f"{lark.text(name + syntax.after_name)} {value} {lark.text(syntax.after)}")
    how = syntax.arguments
    after = lark.text(syntax.after)
    values = ValueGrammar(lark, how.form, stored.schema, stored.lenient)
    pairs = _raw(lark, values, stored, syntax, freer) if how.form.is_raw else None
    if not how.form.is_raw:
        pairs = values.pairs(stored.schema, how.assign, how.separator)
        if pairs is not None:
            pairs = f"{pairs[0]} {after}", pairs[1]
    if pairs is None:
        assign = "" if how.assign == "=" else how.assign
        whole = f"{lark.text(ALL + assign)} {lark.json(stored.schema, stored.lenient)} {after}"
        return lark.rule(f"{lark.text(name + how.first)} {whole}")
    some, may_be_empty = pairs
    written = f"{lark.text(name + how.first)} {some}"
    none = lark.text(name + how.none)
    return lark.rule(f"{written} | {none}" if may_be_empty else written)


def closing(arguments: Arguments, after: str) -> str:
    """Return what ends a value of a form without marks, whatever follows it."""
    return common_prefix(arguments.separator, after)


def _raw(
    lark: Lark, values: ValueGrammar, stored: ConstrainedTool, syntax: CallSyntax, freer: list[str]
) -> tuple[str, bool] | None:
    """Do what `ValueGrammar.pairs` does, for a form whose texts end with the argument, and the rest
    of the call.
    """
    how, properties = syntax.arguments, stored.schema.get("properties")
    assert how is not None
    end = closing(how, syntax.after)
    plain = values.pairs(stored.schema, how.assign, how.separator)
    if plain is None or not isinstance(properties, dict):
        return None
    required = stored.schema.get("required", [])
    assert isinstance(required, list)
    required = frozenset(required)
    follow, stop = lark.text(how.separator[len(end) :]), lark.text(syntax.after[len(end) :])
    rest, first = lark.rule(stop), list[str]()
    for name, schema in reversed(properties.items()):
        value, is_freer = _raw_value(lark, values, stored, schema, end)
        if is_freer:
            freer.append(name)
        pair = lark.rule(f"{lark.text(name + how.assign)} {value}")
        first = [f"{pair} {rest}", *([] if name in required else first)]
        next_one = f"{follow} {pair} {rest}"
        rest = lark.rule(next_one if name in required else f"{next_one} | {rest}")
    return lark.rule(" | ".join(first)), not required


def _raw_value(
    lark: Lark, values: ValueGrammar, stored: ConstrainedTool, schema: Any, end: str
) -> tuple[str, bool]:
    """A value and what ends it: texts as they are, all else as JSON. And whether more is asked of a
    text than it is held to.
    """
    kinds, close = types_of(schema, stored.schema, lark.look), lark.text(end)
    if kinds != {"string"}:  # of several types, as JSON: read back as what it says
        return f"{values.json(schema)} {close}", False
    choices = texts_of(schema, stored.schema, lark.look)
    if choices and all(end not in choice for choice in choices):
        return f"{lark.rule(' | '.join(lark.text(c) for c in choices))} {close}", False
    words = resolve(schema, stored.schema)
    pattern = raw_pattern(words, end) if choices is None else None
    return lark.until(end, pattern), choices is not None or _requests_more(schema, words)


def _requests_more(schema: Mapping[str, Any], words: Mapping[str, Any]) -> bool:
    """Than length and pattern. `words`: what `schema` refers to, or itself."""
    alongside = schema.keys() - {"$ref"} if "$ref" in schema else set()
    return bool((words.keys() - _OF_TEXTS - ANNOTATIONS) | (alongside - ANNOTATIONS))
