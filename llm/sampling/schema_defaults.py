"""Describes what a JSON schema leaves open, and a model may run on in: objects have the properties
that it names and no others, numbers so many digits, unless it says otherwise.

By the standard `{"properties": {"count": ...}}` lets any further name in, with any value, and a
model that is held to no more may write names without end. OpenAI's strict schemas, llama.cpp and
xgrammar (vLLM) take such a schema as closed. And an integer may have as many digits as the answer
has room for; llama.cpp ends it after 16. Here it has room for ids of 64 bits, which have 17 to 19.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")  # tables of them
_STATED = ("additionalProperties", "patternProperties")
_ALONGSIDE = ("$ref", "allOf", "anyOf", "oneOf")  # what adds names to `properties`
_ACROSS = ("unevaluatedProperties", "if", "not", "dependentSchemas", "dependencies")
_DIGITS = 16  # of a number before the point
_LARGEST = 10**_DIGITS - 1
_INTEGER = 2**63 - 1024  # llguidance reads bounds as floats, and counts in 64 bits
_DECIMALS = 1e-9  # llguidance takes no finer step
_COARSE = 1e-3  # bounds below that may want finer steps than these
_BOUNDS = (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))
_NUMBER = {"type", "multipleOf"} | {key for *keys, _ in _BOUNDS for key in keys}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REFERENCES = 16  # that lead from one to the next
_IDLE = {"uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"})}
_FORMATS = frozenset(  # llguidance's
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
_SHOWN = ("$id", "allOf", "oneOf")
_SHARED = "x-number-"  # begins the names of definitions
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
_TABLES = ("properties", "patternProperties", *DEFINITIONS)
_LISTS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_ONE = ("items", "additionalProperties", "contains")


def close_objects(schema: Any) -> None:
    """Says so in `schema` itself, JSON values. One in which an object is put together of several
    schemas stays as it is: closed, each of them would refuse the others' names.
    """
    parts = list(_schemas(schema))
    if any(_is_composed(part) for part in parts):
        return
    for part in parts:
        names, required = part.get("properties"), part.get("required", [])
        if not isinstance(names, dict) or not names or not isinstance(required, list):
            continue
        is_named = all(isinstance(name, str) and name in names for name in required)
        if is_named and not any(stated in part for stated in _STATED):
            part["additionalProperties"] = False


def say_plainly(schema: Any) -> None:
    """Rewrite, in `schema` itself, what programs write in other words: counts with a point that are
    whole ones (2.0), null for a type or a count that is not asked for.
    """
    for part in _schemas(schema):
        for key in ("type", *_COUNTS):
            value = part.get(key)
            if key in part and value is None:
                del part[key]
            elif key in _COUNTS and isinstance(value, float) and value.is_integer():
                part[key] = int(value)
            elif key == "type" and isinstance(value, list):
                part[key] = ["null" if kind is None else kind for kind in value]


def drop_idle(schema: Any) -> None:
    """Keywords that ask for nothing, of which the grammar does not know that, in `schema` itself,
    JSON values: zod writes `propertyNames` for each record.
    """
    for part in _schemas(schema):
        for key, values in _IDLE.items():
            if key in part and any(part[key] == value for value in values):
                del part[key]


def drop_formats(schema: Any) -> list[str]:
    """Formats that no grammar is known for, which the standard calls notes, are taken out of
    `schema` itself, JSON values; Pydantic writes "path", "password" and "binary", zod "base64".
    Returns those of texts, each once, in order: "int32" of an integer holds no text to anything.
    """
    dropped = set[str]()
    for part in _schemas(schema):
        name = part.get("format")
        if isinstance(name, str) and name not in _FORMATS:
            del part["format"]
            kinds = part.get("type", "string")
            if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
                dropped.add(name)
    return sorted(dropped)


def not_enforced(formats: list[str]) -> str:
    """Return what is told of those."""
    return f"any text is taken where the format is {shown(formats)}, which no grammar is known for"


def shown(names: Sequence[str]) -> str:
    """The first of them, for people."""
    return ", ".join(f"{name!r:.40}" for name in names[:3]) + (", ..." if names[3:] else "")


def say_any_of(schema: Any) -> None:
    """`oneOf` whose parts are apart by their types alone is `anyOf`, in `schema` itself, JSON
    values: a reference, as to what may be null, hides from the grammar that they are.
    """
    for part in _schemas(schema):
        several = part.get("oneOf")
        if isinstance(several, list) and "anyOf" not in part:
            kinds = [_kinds(one, schema) for one in several]
            if all(kinds) and sum(map(len, kinds)) == len(set[str]().union(*kinds)):
                part["anyOf"] = part.pop("oneOf")


def definition_of(reference: object) -> tuple[str, str]:
    """The table and the name of the definition that a reference is to, "" each for any other."""
    start, table, name, *more = [*str(reference).split("/", 3), "", ""]
    is_one = start == "#" and table in DEFINITIONS and not any(more)
    return (table, unescaped(name)) if is_one else ("", "")


def unescaped(part: str) -> str:
    """The name that a part of a reference stands for."""
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _kinds(part: Any, root: Any) -> set[str]:
    """The types that a part names, an integer among the numbers; none where it does not."""
    for _ in range(_REFERENCES):
        if not isinstance(part, dict) or "$ref" not in part:
            break
        table, name = definition_of(part["$ref"])
        known = root.get(table)
        part = known.get(name) if isinstance(known, dict) else None
    kind = part.get("type") if isinstance(part, dict) and "$ref" not in part else None
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    return {"number" if one == "integer" else one for one in kinds if isinstance(one, str)}


def bound_numbers(schema: Any) -> None:
    """Says so in `schema` itself, JSON values: of integers, and of numbers with a bound, which the
    grammar lets have no exponent then. Numbers without one stay as they are: 6e-34 is one, too. Nor
    does anything change where a bound beside a reference may leave nothing within ours.
    """
    parts = list(_schemas(schema))
    if any(_is_all_of(part) or any(key in part for key in _ACROSS) for part in parts):
        return
    if any(any(key in part for key in _ALONGSIDE) and not _is_coarse(part) for part in parts):
        return
    for part in parts:
        given = part.get("type")
        given = given if isinstance(given, list) else [given]
        kinds = {kind for kind in given if isinstance(kind, str)}
        bounds = _bounds_of(part)
        if (
            not kinds & {"integer", "number"}
            or any(key in part for key in ("enum", "const", *_ALONGSIDE))
            or ("number" in kinds and not bounds)
            or not _are_usual(bounds)
        ):
            continue
        has_steps = "number" in kinds and _is_coarse(part)
        maximum = _LARGEST if "number" in kinds else _INTEGER
        for inclusive, exclusive, sign in _BOUNDS:
            if inclusive not in part and exclusive not in part:
                part[inclusive] = sign * maximum
        if has_steps:
            part.setdefault("multipleOf", _DECIMALS)


def _bounds_of(part: dict[str, Any]) -> list[Any]:
    return [part[key] for *keys, _ in _BOUNDS for key in keys if key in part]


def _are_usual(bounds: list[Any]) -> bool:
    return all(_is_number(bound) and abs(bound) < _LARGEST / 10 for bound in bounds)


def _is_coarse(part: dict[str, Any]) -> bool:
    """Return whether its bounds leave steps of `_DECIMALS` between them, and want no finer ones."""
    bounds = _bounds_of(part)
    return (
        _are_usual(bounds)
        and all(bound == 0 or abs(bound) >= _COARSE for bound in bounds)
        and (len(bounds) < 2 or max(bounds) - min(bounds) >= _COARSE)
    )


def share_numbers(schema: Any) -> None:
    """Numbers of the same kind and bounds refer to one definition, in `schema` itself: the grammar
    writes out a range of 19 digits for each that stands alone, and has room for some hundreds.
    Where parts are held against each other, as by `oneOf`, nothing changes: references hide them.
    """
    parts = list(_schemas(schema))
    if any(_is_composed(part) or any(key in part for key in _SHOWN) for part in parts):
        return
    alike: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        if part is not schema and "type" in part and part.keys() <= _NUMBER | _NOTES:
            number = {key: part[key] for key in sorted(_NUMBER) if key in part}
            alike.setdefault(json.dumps(number), []).append(part)
    ranges = {rule: several for rule, several in alike.items() if '"maximum"' in rule}
    definitions = schema.get("$defs", {}) if ranges else None
    if not isinstance(definitions, dict) or any(name.startswith(_SHARED) for name in definitions):
        return
    for index, (rule, several) in enumerate(ranges.items()):
        if len(several) > 1:
            name = f"{_SHARED}{index}"
            for part in several:
                part.clear()
                part["$ref"] = f"#/$defs/{name}"
            schema["$defs"] = definitions = {**definitions, name: json.loads(rule)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key, value in part.items():
            if isinstance(value, dict):
                if key in _TABLES:
                    waiting += value.values()
                elif key in _ONE:
                    waiting.append(value)
            elif isinstance(value, list) and key in _LISTS:
                waiting += value


def _is_composed(part: dict[str, Any]) -> bool:
    return (
        _is_all_of(part)
        or ("properties" in part and any(key in part for key in _ALONGSIDE))
        or any(key in part for key in _ACROSS)
    )


def _is_all_of(part: dict[str, Any]) -> bool:
    several = part.get("allOf")
    return isinstance(several, list) and len(several) > 1
