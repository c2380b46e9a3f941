"""Which schemas are taken to name all properties that there may be, and which numbers get an end."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mtmd.llm.sampling.grammar import compile_grammar, read_vocabulary
from mtmd.llm.sampling.json_schema import schema_text
from mtmd.llm.sampling.schema_defaults import bound_numbers, close_objects

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


MOST = 9_999_999_999_999_999


def bounded(schema: Any) -> Any:
    made = copy.deepcopy(schema)
    bound_numbers(made)
    return made


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "integer"}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": ["integer", "null"]}, {"minimum": -MOST, "maximum": MOST}),
        ({"type": "integer", "minimum": 0}, {"maximum": MOST}),
        ({"type": "integer", "exclusiveMaximum": 0}, {"minimum": -MOST}),
        ({"type": "integer", "minimum": 1, "maximum": 6}, {}),
        ({"type": "integer", "minimum": 10**17}, {}),
        ({"type": "integer", "enum": [10**20]}, {}),
        ({"type": "number"}, {}),
        ({"type": "number", "minimum": 0}, {"maximum": MOST, "multipleOf": 1e-9}),
        ({"type": "number", "minimum": 0, "maximum": 1}, {"multipleOf": 1e-9}),
        ({"type": "number", "minimum": 0, "maximum": 1e-6}, {}),
        ({"type": "number", "minimum": 0, "multipleOf": 0.5}, {"maximum": MOST}),
        ({"minimum": 0}, {}),
        ({"type": [3, {}]}, {}),
        ({"allOf": [{"type": "integer"}, {"minimum": 10**17}]}, {}),
    ],
    ids=str,
)
def test_numbers_get_an_end_where_none_is_said(schema: Any, added: Any) -> None:
    expected = {**schema, **added}
    assert bounded(schema) == expected
    deep = {"type": "array", "items": {"properties": {"a": schema}}}
    assert bounded(deep)["items"]["properties"]["a"] == expected


def longest(schema: Any, text: bytes) -> bytes:
    """As much of `text` as an answer may begin with."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    matcher = compile_grammar(read_vocabulary([*vocabulary, b"<eos>"]), schema_text(schema))
    for at, byte in enumerate(text):
        if not matcher.try_consume_tokens([byte]):
            return text[:at]
    return text


@pytest.mark.parametrize(
    ("schema", "text", "most"),
    [
        ({"type": "integer"}, b"-" + b"9" * 50, 17),
        ({"type": "integer", "minimum": 3}, b"9" * 50, 16),
        ({"type": "number", "minimum": 0, "maximum": 1}, b"0." + b"3" * 50, 11),
        ({"type": "number", "minimum": 0}, b"8" * 50, 16),
        ({"type": "number"}, b"6.626e-34", 9),
    ],
    ids=str,
)
def test_a_model_that_writes_digits_for_ever_comes_to_an_end(
    schema: Any, text: bytes, most: int
) -> None:
    assert len(longest(schema, text)) == most
