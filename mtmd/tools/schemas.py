"""JSON schemas of arguments, as far as a grammar needs them: without words for people, references
followed, types told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtmd.llm.sampling.json_schema import changed
from mtmd.llm.sampling.schema_defaults import DEFINITIONS, unescaped

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly"]
)
_INDEX_DIGITS = 9
_PARTS_MAX = 1000  # of a choice
_REPEATED_MAX = 1 << 20  # characters of what is repeated among the definitions
_LOCATION = "place-"  # begins the names of those
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]+")


def without_annotations(schema: Any) -> Any:
    """The schema without what tells people only: a property named "title" stays."""
    return changed(schema, lambda part: {k: v for k, v in part.items() if k not in ANNOTATIONS})


def with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, in which references to any place of it ("#", "#/properties/x/items") are
    references to definitions, as such a place is not there beside a part. Those to places that
    are missing stay, and all of them where the schema would become too long.
    """
    table = schema.get("$defs", {})
    if not isinstance(table, dict) or any(name.startswith(_LOCATION) for name in table):
        return schema
    names: dict[str, str] = {}
    waiting: list[str] = []

    def named(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if not isinstance(reference, str) or _DEFINITION.fullmatch(reference):
            return part
        if reference not in names:
            if _location(schema, reference) is None:
                return part
            names[reference] = f"{_LOCATION}{len(names)}"
            waiting.append(reference)
        return {**part, "$ref": f"#/$defs/{names[reference]}"}

    result, locations, left = changed(schema, named), dict[str, Any](), _REPEATED_MAX
    while waiting:
        reference = waiting.pop()
        location = _location(schema, reference)
        left -= len(json.dumps(location))
        if left < 0:
            return schema
        locations[names[reference]] = changed(location, named)
    return {**result, "$defs": {**result.get("$defs", {}), **locations}} if locations else schema


def _location(schema: dict[str, Any], reference: str) -> Any:
    """Return what a reference within the schema speaks of, the whole without its definitions; None
    where there is nothing.
    """
    start, *path = reference.split("/")
    if start != "#":
        return None
    result: Any = schema
    for name in map(unescaped, path):
        if isinstance(result, list):
            is_index = len(name) < _INDEX_DIGITS and name.isdecimal() and int(name) < len(result)
            result = result[int(name)] if is_index else None
        else:
            result = result.get(name) if isinstance(result, dict) else None
        if result is None:
            return None
    if result is schema:
        return {key: value for key, value in schema.items() if key not in DEFINITIONS}
    return result if isinstance(result, (dict, bool)) else None


def definitions(root: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """Return what references in a part of `root` need beside it: the definitions that it reaches,
    all where it refers to something else.
    """
    tables = {key: root[key] for key in DEFINITIONS if isinstance(root.get(key), dict)}
    result: dict[str, Any] = {}
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        waiting += value.values()
        if "$ref" not in value:
            continue
        start, table, name, *_ = [*str(value["$ref"]).split("/"), "", ""]
        name = unescaped(name)
        if start != "#" or name not in tables.get(table, ()):
            return tables
        if name not in result.setdefault(table, {}):
            result[table][name] = tables[table][name]
            waiting.append(result[table][name])
    return result


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself, or what it refers to; None for what is not among the definitions."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        _, *path = str(schema["$ref"]).split("/")
        result: Any = root if schema["$ref"].startswith("#/") else None
        for part in path:
            result = result.get(unescaped(part)) if isinstance(result, Mapping) else None
            if result is None:
                return None
        schema = result
    return None


def types_of(
    schema: Any, root: Mapping[str, Any], look: Callable[[], object] = lambda: None
) -> set[str]:
    """The types that a value may have, as far as the schema tells; all where it does not. `look` is
    called for each part that is looked at.
    """
    kinds = set[str]()
    for part in _choices(schema, root, ("const", "enum", "type"), look):
        if not isinstance(part, dict):
            return set(TYPES)
        kind = part.get("type")
        if "const" in part:
            kinds.add(type_of(part["const"]))
        elif isinstance(part.get("enum"), list):
            kinds |= {type_of(value) for value in part["enum"]}
        elif kind is None:
            return set(TYPES)
        else:
            kinds |= set(kind) if isinstance(kind, list) else {kind}
    return kinds or set(TYPES)


def texts_of(
    schema: Any, root: Mapping[str, Any], look: Callable[[], object] = lambda: None
) -> list[str] | None:
    """All texts that a value may be, which is a text; None where the schema names none. `look` as
    for `types_of`.
    """
    texts: dict[str, None] = {}
    for part in _choices(schema, root, ("const", "enum"), look):
        if isinstance(part, dict) and "const" in part:
            texts[part["const"]] = None
        elif isinstance(part, dict) and isinstance(part.get("enum"), list):
            texts |= dict.fromkeys(part["enum"])
        else:
            return None
    return list(texts) or None


def _choices(
    schema: Any, root: Mapping[str, Any], ends: tuple[str, ...], look: Callable[[], object]
) -> Iterator[Any]:
    """The parts of which a value follows one, references followed: what is itself a choice among
    parts is gone into unless it says one of `ends`. Each part comes once, however often and in
    however many ways it is referred to; beyond `_PARTS_MAX` comes None, as of what is not told.
    """
    waiting, seen = [schema], set[int]()
    while waiting:
        if len(seen) == _PARTS_MAX:
            yield None
            return
        look()
        part = resolve(waiting.pop(), root)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict) and part.keys().isdisjoint(ends):
            several = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
            if several:
                waiting += reversed(several[0])
                continue
        yield part


def type_of(value: Any) -> str:
    """Return the type of a value made of JSON types."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
