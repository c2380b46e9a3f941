"""Which schemas are taken to name all properties that there may be."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mtmd.llm.sampling.closed_schema import close_objects

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}


def closed(schema: Any) -> Any:
    made = copy.deepcopy(schema)
    close_objects(made)
    return made


def test_objects_are_closed_wherever_they_stand() -> None:
    schema = {
        "type": "object",
        "properties": {
            "each": {"type": "array", "items": {"$ref": "#/$defs/Thing"}},
            "one": {"anyOf": [COUNT, {"type": "null"}]},
            "enum": {"enum": [{"properties": {"data": 1}}]},
        },
        "$defs": {"Thing": {"type": "object", "properties": {"name": {"type": "string"}}}},
    }
    made = closed(schema)
    assert made["additionalProperties"] is False
    assert made["$defs"]["Thing"]["additionalProperties"] is False
    assert made["properties"]["one"]["anyOf"][0]["additionalProperties"] is False
    assert made["properties"]["enum"] == schema["properties"]["enum"], "which is data"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        COUNT | {"additionalProperties": True},
        COUNT | {"patternProperties": {"^x": {}}},
        COUNT | {"required": ["count", "another"]},
        {"allOf": [COUNT, {"properties": {"more": {}}}]},
        COUNT | {"$ref": "#/$defs/Base", "$defs": {"Base": {"properties": {"more": {}}}}},
        COUNT | {"anyOf": [{"properties": {"more": {}}}, {"properties": {"less": {}}}]},
        COUNT | {"unevaluatedProperties": {"type": "string"}},
        True,
    ],
    ids=str,
)
def test_what_says_otherwise_or_is_put_together_stays(schema: Any) -> None:
    assert closed(schema) == schema
