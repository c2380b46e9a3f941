"""JSON schemas of arguments, as far as a grammar needs them: without words for people, references
followed, types told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly"]
)
_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "required")
_DEEP_MAX = 100


def without_annotations(schema: Any, deep: int = 0) -> Any:
    """The schema without what tells people only: a property named "title" stays."""
    if deep > _DEEP_MAX:
        return schema
    if isinstance(schema, list):
        return [without_annotations(item, deep + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in ANNOTATIONS:
            continue
        if key in _TABLES and isinstance(value, dict):
            result[key] = {k: without_annotations(v, deep + 1) for k, v in value.items()}
        else:
            result[key] = value if key in _DATA else without_annotations(value, deep + 1)
    return result


def definitions(root: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """What references in a part of `root` need beside it: the definitions that it reaches, all
    where it refers to something else.
    """
    tables = {key: root[key] for key in ("$defs", "definitions") if isinstance(root.get(key), dict)}
    found: dict[str, Any] = {}
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
        name = name.replace("~1", "/").replace("~0", "~")
        if start != "#" or name not in tables.get(table, ()):
            return tables
        if name not in found.setdefault(table, {}):
            found[table][name] = tables[table][name]
            waiting.append(found[table][name])
    return found


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself, or what it refers to; None for what is not among the definitions."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        _, *path = str(schema["$ref"]).split("/")
        found: Any = root if schema["$ref"].startswith("#/") else None
        for part in path:
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return None


def types_of(schema: Any, root: Mapping[str, Any], deep: int = 0) -> set[str]:
    """The types that a value may have, as far as the schema tells; all where it does not."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or deep > _DEEP_MAX:
        return set(TYPES)
    if "const" in schema:
        return {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {type_of(value) for value in schema["enum"]}
    if "type" in schema:
        kind = schema["type"]
        return set(kind) if isinstance(kind, list) else {kind}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return {kind for part in schema[key] for kind in types_of(part, root, deep + 1)}
    return set(TYPES)


def type_of(value: Any) -> str:
    """Of a value made of JSON types."""
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
