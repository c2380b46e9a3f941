"""JSON schemas that an answer has to follow, checked before anything is generated. Loads without
torch and without the grammar library.

What a grammar cannot promise is refused: keywords that llguidance does not know, and a few uses of
others, each told below with its reason. Where a schema is not strict they are passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from math import prod
from typing import Any, get_origin

from mtmd.base.errors import OptionError
from mtmd.base.panics import panics_as
from mtmd.base.text import one_line
from mtmd.llm.sampling.schema_defaults import (
    DEFINITIONS,
    bound_numbers,
    close_objects,
    definition_of,
    drop_formats,
    drop_idle,
    not_enforced,
    say_any_of,
    say_plainly,
    share_numbers,
)

SCHEMA_BYTES_MAX = 64 << 10
# A grammar for multiples of N has N states, for several at once as many as their common multiple:
# 20,000 take 0.2 s to make.
MULTIPLE_MAX = 20_000
_TABLES = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")
_DATA = ("enum", "const", "required")
_DEEP_MAX = 100
_LOOP_PASSES = 16
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_FAR = 1e15
_AROUND = {"type", "name", "description", "schema", "strict"}  # of OpenAI's `response_format`
LARK = "%llguidance"  # begins a grammar in Lark notation
GRAMMAR_CHARS_MAX = 1 << 20

# One spelling for each string: were "\u0061" allowed for "a", a key could pass for another one. On
# one line, with a blank or none after commas and colons: blanks are tokens that say nothing.
# These take the place of a schema's own "x-guidance".
GRAMMAR_OPTIONS = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
    "coerce_one_of": False,
}
# Of a schema that answers follow in part: the reason. No keyword.
LEFT_OUT = "x-left-out"


def grammar_options(is_lenient: bool) -> dict[str, Any]:
    """Return the options for a schema of a grammar; `is_lenient`: keywords that llguidance does not
    know are passed over.
    """
    return {"x-guidance": {**GRAMMAR_OPTIONS, "lenient": is_lenient}}


class CheckedSchema(str):
    """Describes what `schema_text` returned, tried already where it could do no harm: not to be
    looked into here again.
    """

    __slots__ = ()


def schema_text(value: object, check: Callable[[str], object] | None = None) -> str | None:
    """A schema as JSON text: of a mapping, of JSON text, of a Pydantic model or another type that
    Pydantic knows, or of True, which stands for any object; without what OpenAI's `response_format`
    has around it. None stays None. `check` is called with it, None for `grammar_text`.

    Raises OptionError for what is no schema, is larger than 64 KiB, or asks for what cannot be
    promised. In a `response_format` that does not say `"strict": true` the last is passed over,
    and `left_out` says so.
    """
    if value is None or isinstance(value, CheckedSchema):
        return value
    schema, is_strict = _read(value)
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise _wrong(
            f"{_short(value)}", 'an object such as {"type": "object"}, or true for any JSON object'
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # not JSON: a set, NaN, half of a surrogate pair, itself inside itself
        raise _wrong(
            f"what JSON cannot represent ({_short(error)})", "JSON values throughout"
        ) from error
    if size > SCHEMA_BYTES_MAX:
        raise _wrong(f"{size} bytes", f"at most {SCHEMA_BYTES_MAX}")
    try:
        (check or grammar_text)(text)
    except OptionError as error:
        if is_strict:
            raise
        return _in_part(schema, check or grammar_text, error)
    return text


def _in_part(
    schema: dict[str, Any], check: Callable[[str], object], error: OptionError
) -> CheckedSchema:
    """A schema without what cannot be promised: first what llguidance passes over by itself, then
    patterns that look around, too. Raises `error`, which says what that is, where it is not enough.
    """
    less = without_loops(schema)
    if _multiples(less) > MULTIPLE_MAX:
        less = changed(less, lambda part: {k: v for k, v in part.items() if k != "multipleOf"})
    reason = str(error).removeprefix("json_schema: ")
    for one in (less, loosened(less)):
        text = json.dumps({**one, LEFT_OUT: reason}, ensure_ascii=False)
        try:
            check(text)
        except OptionError:
            continue
        return CheckedSchema(text)
    raise error


@lru_cache(maxsize=512)  # of all the tools of a request, and more
def grammar_text(schema: str) -> str:
    """The grammar of a schema as `schema_text` returns it, or of one in the library's Lark notation
    (`grammars.py`), in the library's form. Raises OptionError where there is none.
    """
    from llguidance import LLMatcher

    if schema.startswith(LARK):
        return lark_grammar(schema)
    parsed = json.loads(schema)
    is_lenient = parsed.pop(LEFT_OUT, None) is not None
    say_plainly(parsed)
    if not is_lenient:
        _check_promises(parsed)
    drop_formats(parsed)
    drop_idle(parsed)
    say_any_of(parsed)
    close_objects(parsed)
    bound_numbers(parsed)
    share_numbers(parsed)
    # Without forcing, every way to cut a text into tokens stays open: the model is asked, not the
    # library's tokenizer.
    with panics_as(lambda words: _wrong(f"a schema that cannot be read ({words})", "a usual one")):
        grammar = LLMatcher.grammar_from_lark(
            '%llguidance {"no_forcing": true}\n'
            f"start: %json {json.dumps(parsed | grammar_options(is_lenient))}"
        )
        problem = LLMatcher.validate_grammar(grammar)
    if problem:
        # without the grammar's own text, and where in it
        reason = _before_location(problem).split("JSON schema: ")[-1]
        raise _wrong(f"a schema that cannot be followed ({_short(reason)})", "one without that")
    return grammar


def left_out(schema: str) -> tuple[str, ...]:
    """Warnings: what answers are not held to of a schema as `schema_text` returns it."""
    parsed = json.loads(schema)
    reason, formats = parsed.pop(LEFT_OUT, None), drop_formats(parsed)
    in_part = (f"json_schema: the answer follows it in part: {reason}",) if reason else ()
    return (*in_part, *([f"json_schema: {not_enforced(formats)}"] if formats else []))


def lark_grammar(source: str) -> str:
    """A grammar in Lark notation in the library's form. Raises OptionError."""
    from llguidance import LLMatcher

    if len(source) > GRAMMAR_CHARS_MAX:
        raise OptionError(
            f"grammar: found {len(source)} characters, expected at most {GRAMMAR_CHARS_MAX}"
        )
    grammar = LLMatcher.grammar_from_lark(source)
    problem = LLMatcher.validate_grammar(grammar)
    if problem:
        reason = _short(_before_location(problem))
        raise OptionError(f"grammar: found one that cannot be followed ({reason})")
    return grammar


def _before_location(problem: str) -> str:
    """Return what is wrong with a grammar, without the lines that show where: the first is " 1 |
    ...".
    """
    lines = problem.split("\n")
    shown = next(
        (n for n, line in enumerate(lines) if n and line.lstrip().startswith("1 | ")), None
    )
    return "\n".join(lines[:shown])


def _check_promises(schema: Any) -> None:
    """Refuse what the grammar would take and answers could break, or what would take it for
    ever.
    """
    for table, name in endless(schema):
        raise _wrong(f"#/{table}/{_short(name)}, which leads to nothing but itself", "a value")
    for part in _subschemas(schema):
        minimum, required = part.get("minProperties"), part.get("required", ())
        # The grammar counts a key that comes twice as two properties, a reader as one.
        if isinstance(minimum, (int, float)) and minimum > (
            len(set(map(str, required))) if isinstance(required, list) else 0
        ):
            raise _wrong(
                f"minProperties {_short(minimum)}",
                "as many names in 'required': a key written twice would count twice",
            )
    if _multiples(schema) > MULTIPLE_MAX:
        result = sorted({part["multipleOf"] for part in _subschemas(schema) if _multiple(part)})
        raise _wrong(
            f"multipleOf {_short(', '.join(map(str, result)))}",
            f"numbers whose product is at most {MULTIPLE_MAX}",
        )


def _multiples(schema: Any) -> Decimal:
    """Return how many states a grammar has for all `multipleOf` together, at most."""
    result = {multiple for part in _subschemas(schema) if (multiple := _multiple(part))}
    locations = max((-int(m.normalize().as_tuple().exponent) for m in result), default=0)
    return prod((abs(m).scaleb(max(locations, 0)) for m in result), start=Decimal(1))


def _multiple(part: dict[str, Any]) -> Decimal | None:
    multiple = part.get("multipleOf")
    is_number = isinstance(multiple, (int, float)) and not isinstance(multiple, bool)
    return Decimal(repr(multiple)) if is_number else None


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], deep: int = 0) -> Any:
    """A copy in which `change` is made to each schema, to the outer ones first."""
    if deep > _DEEP_MAX:
        return schema
    if isinstance(schema, list):
        return [changed(item, change, deep + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in change(schema).items():
        if key in _TABLES and isinstance(value, dict):
            result[key] = {k: changed(v, change, deep + 1) for k, v in value.items()}
        else:
            result[key] = value if key in _DATA else changed(value, change, deep + 1)
    return result


def loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what the grammars' regular expressions cannot say: look-around in
    patterns (word boundaries, too), numbers of more digits than they count.
    """

    def is_stated(key: str, value: Any) -> bool:
        if key == "pattern":
            return not _LOOKS_AROUND.search(str(value))
        is_far = isinstance(value, (int, float)) and abs(value) > _FAR
        return not (is_far and key in _BOUNDS)

    result: dict[str, Any] = changed(
        schema, lambda part: {k: v for k, v in part.items() if is_stated(k, v)}
    )
    return result


def without_loops(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, in which definitions that lead to nothing but themselves are of any value."""
    result: dict[str, dict[str, Any]] = {}
    for table, name in endless(schema):
        result.setdefault(table, {})[name] = {}
    return {**schema, **{table: {**schema[table], **names} for table, names in result.items()}}


def endless(schema: Any) -> list[tuple[str, str]]:
    """The (table, name) of each definition that leads to nothing but itself, so that no value
    follows it, and that something refers to. Empty where that takes many passes to find out.
    """
    tables = {key: schema[key] for key in DEFINITIONS if isinstance(schema.get(key), dict)}
    waiting = [(table, name) for table, definitions in tables.items() for name in definitions]
    for _ in range(_LOOP_PASSES):
        # those that are seen to end help the next, whichever way they refer to each other
        open_ones = set(waiting)
        for location in reversed(waiting):
            table, name = location
            if _has_end(tables[table][name], open_ones):
                open_ones.remove(location)
        left = [location for location in reversed(waiting) if location in open_ones]
        if not left:
            return []
        if len(left) == len(waiting):
            reached = _reached(schema, tables)
            return [location for location in left if location in reached]
        waiting = left
    return []


def _reached(schema: dict[str, Any], tables: dict[str, Any]) -> set[tuple[str, str]]:
    """Return what the schema refers to, its definitions beside."""
    result = set[tuple[str, str]]()
    waiting: list[Any] = [value for key, value in schema.items() if key not in DEFINITIONS]
    waiting.append({"$ref": schema.get("$ref")})
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        location = definition_of(part.get("$ref"))
        if location not in result and location[1] in tables.get(location[0], ()):
            result.add(location)
            waiting.append(tables[location[0]][location[1]])
    return result


def _has_end(part: Any, open_ones: set[tuple[str, str]], deep: int = 0) -> bool:
    """Return whether a value may follow it, as far as is known."""
    if not isinstance(part, dict) or deep > _DEEP_MAX:
        return True
    if definition_of(part.get("$ref")) in open_ones:
        return False
    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        several = part.get(key)
        if not isinstance(several, list) or not several:
            continue
        if not enough(_has_end(one, open_ones, deep + 1) for one in several):
            return False
    return True


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it: a few are data or tables of schemas, which may look like one and are then
    taken for it.
    """
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _read(value: object) -> tuple[object, bool]:
    """A schema, and whether all that it asks for has to be promised."""
    if isinstance(value, type) or get_origin(value) is not None:
        return _of_type(value), True
    if type(value).__name__ == "TypeAdapter":  # of Pydantic
        made = _made(value.json_schema, f"{value!r:.60}")  # type: ignore[attr-defined]
        return made, True
    if hasattr(value, "model_json_schema"):
        name = type(value).__name__
        raise _wrong(f"an object of the class {name:.60}", f"the class itself, {name:.60}")
    if not isinstance(value, (str, bytes)):
        return _unwrapped(value)
    if len(value) > SCHEMA_BYTES_MAX:
        raise _wrong(f"{len(value)} characters", f"at most {SCHEMA_BYTES_MAX} bytes")
    try:
        return _unwrapped(json.loads(value))
    except (ValueError, RecursionError) as error:
        raise _wrong(f"text that is not JSON ({_short(error)})", "a JSON schema") from error


def _unwrapped(value: object) -> tuple[object, bool]:
    """Return what OpenAI's `response_format` has around a schema, taken off. There, as nowhere
    else, a schema is strict only where it says so.
    """
    inner = value
    if isinstance(inner, Mapping) and inner.get("type") == "json_schema":
        inner = inner.get("json_schema", inner)
    if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        kind = inner.get("type", "json_schema")
        if kind == "json_schema" and not set(inner) - _AROUND:
            return inner["schema"], inner.get("strict") is True
    return value, True


def _of_type(value: Any) -> object:
    """Return the of type of a Pydantic model, or of what else Pydantic knows: a dataclass, a list
    of models.
    """
    make = getattr(value, "model_json_schema", None)
    is_class = isinstance(value, type) and get_origin(value) is None
    words = f"the class {value.__name__:.60}" if is_class else f"the type {_short(value):.60}"
    if callable(make):
        return _made(make, words)
    from pydantic import PydanticSchemaGenerationError, TypeAdapter  # here: few need it
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(value)
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        raise _wrong(
            words, "a Pydantic model, or a type that Pydantic knows, or a JSON schema as an object"
        ) from error
    return _made(adapter.json_schema, words)


def _made(make: Callable[[], object], words: str) -> object:
    try:
        return make()
    except Exception as error:
        raise _wrong(
            f"{words}, of which no schema can be made ({_short(error)})",
            "an object of fields that JSON can represent",
        ) from error


def _short(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


def _wrong(result: str, expected: str) -> OptionError:
    return OptionError(f"json_schema: found {result}, expected {expected}")
