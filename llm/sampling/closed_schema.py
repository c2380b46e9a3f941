"""Objects of a JSON schema have the properties that it names and no others, where it does not say.

By the standard `{"properties": {"count": ...}}` lets any further name in, with any value, and a
model that is held to no more may write names without end. OpenAI's strict schemas, llama.cpp and
xgrammar (vLLM) take such a schema as closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SAID = ("additionalProperties", "patternProperties")
_BESIDE = ("$ref", "allOf", "anyOf", "oneOf")  # what adds names to `properties`
_ACROSS = ("unevaluatedProperties", "if", "not", "dependentSchemas", "dependencies")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")
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
        if not any(said in part for said in _SAID) and all(name in names for name in required):
            part["additionalProperties"] = False


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for key in _TABLES:
            table = part.get(key)
            waiting += table.values() if isinstance(table, dict) else ()
        for key in _LISTS:
            several = part.get(key)
            waiting += several if isinstance(several, list) else ()
        waiting += [part[key] for key in _ONE if key in part]


def _is_composed(part: dict[str, Any]) -> bool:
    several = part.get("allOf")
    return (
        (isinstance(several, list) and len(several) > 1)
        or ("properties" in part and any(key in part for key in _BESIDE))
        or any(key in part for key in _ACROSS)
    )
