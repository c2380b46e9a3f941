"""Which schemas are taken to name all properties that there may be, and which numbers get an end."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.grammar import compile_grammar, read_vocabulary
from mtmd.llm.sampling.json_schema import schema_text
from mtmd.llm.sampling.schema_defaults import (
    bound_numbers,
    close_objects,
    drop_idle,
    say_any_of,
    say_plainly,
    share_numbers,
)

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


MAXIMUM = 9_999_999_999_999_999
ID = 2**63 - 1024


def bounded(schema: Any) -> Any:
    made = copy.deepcopy(schema)
    bound_numbers(made)
    return made


@pytest.mark.parametrize(
    ("schema", "added"),
    [
        ({"type": "integer"}, {"minimum": -ID, "maximum": ID}),
        ({"type": ["integer", "null"]}, {"minimum": -ID, "maximum": ID}),
        ({"type": "integer", "minimum": 0}, {"maximum": ID}),
        ({"type": "integer", "exclusiveMaximum": 0}, {"minimum": -ID}),
        ({"type": "integer", "minimum": 1, "maximum": 6}, {}),
        ({"type": "integer", "minimum": 10**17}, {}),
        ({"type": "integer", "enum": [10**20]}, {}),
        ({"type": "number"}, {}),
        ({"type": "number", "minimum": 0}, {"maximum": MAXIMUM, "multipleOf": 1e-9}),
        ({"type": "number", "minimum": 0, "maximum": 1}, {"multipleOf": 1e-9}),
        ({"type": "number", "minimum": 0, "maximum": 1e-6}, {}),
        ({"type": "number", "minimum": 0.25, "maximum": 0.2500000001}, {}),
        ({"type": "number", "minimum": 0, "multipleOf": 0.5}, {"maximum": MAXIMUM}),
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


def refused(schema: Any) -> bool:
    try:
        compile_grammar(
            read_vocabulary([bytes([byte]) for byte in range(256)]), schema_text(schema)
        )
    except OptionError:
        return True
    return False


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"N": {"type": "integer"}}, "$ref": "#/$defs/N", "minimum": 10**17},
        {
            "$defs": {"N": {"type": "number", "exclusiveMinimum": 0}},
            "$ref": "#/$defs/N",
            "maximum": 1e-12,
        },
        {"type": "number", "minimum": 0.1234567891, "maximum": 0.1234567892},
    ],
    ids=str,
)
def test_bounds_of_a_schema_stay_reachable(schema: Any) -> None:
    assert not refused(schema)


def test_numbers_alike_are_one_part_of_the_grammar() -> None:
    """Else the library has no room for so many."""
    whole, level = {"type": "integer"}, {"type": "number", "minimum": 0}
    many = {f"p{i}": whole | {"description": f"of {i}"} for i in range(1000)}
    levels = {f"q{i}": level for i in range(20)}
    schema = {"type": "object", "properties": many | levels | {"text": {"type": "string"}}}
    made = bounded(schema)
    share_numbers(made)
    definitions = list(made["$defs"].values())
    assert len(definitions) == 2 and bounded(whole) in definitions and bounded(level) in definitions
    assert made["properties"]["text"] == {"type": "string"}
    assert not refused(schema)
    optional = {"anyOf": [whole, {"type": "null"}]}
    wrapped = {"type": "array", "items": {"type": "object", "properties": {"a": optional}}}
    assert longest(wrapped | {"maxItems": 1}, b'[{"a": ' + b"9" * 50) == b'[{"a": ' + b"9" * 18


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"properties": {"a": {"type": "integer"}, "b": {"type": "integer", "minimum": 3}}},
        {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "b": {}}},
        {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
        {"properties": {"a": {"enum": [1]}, "b": {"enum": [1]}}},
        {"$id": "https://here/s", "items": {"anyOf": [{"type": "integer"}, {"type": "integer"}]}},
    ],
    ids=str,
)
def test_what_is_alone_or_held_against_others_stays_in_its_place(schema: Any) -> None:
    made = bounded(schema)
    before = copy.deepcopy(made)
    share_numbers(made)
    assert made == before


def longest(schema: Any, text: bytes) -> bytes:
    """As much of `text` as an answer may begin with."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    matcher = compile_grammar(read_vocabulary([*vocabulary, b"<eos>"]), schema_text(schema))
    for at, byte in enumerate(text):
        if not matcher.try_consume_tokens([byte]):
            return text[:at]
    return text


@pytest.mark.parametrize(
    ("schema", "text", "maximum"),
    [
        ({"type": "integer"}, b"-" + b"8" * 50, 20),
        ({"type": "integer", "minimum": 3}, b"8" * 50, 19),
        ({"type": "integer"}, b"1428771234567890123", 19),
        ({"type": "integer", "multipleOf": 7}, b"7" * 50, 19),
        ({"type": "number", "minimum": 0, "maximum": 1}, b"0." + b"3" * 50, 11),
        ({"type": "number", "minimum": 0}, b"8" * 50, 16),
        ({"type": "number"}, b"6.626e-34", 9),
    ],
    ids=str,
)
def test_a_model_that_writes_digits_for_ever_comes_to_an_end(
    schema: Any, text: bytes, maximum: int
) -> None:
    assert len(longest(schema, text)) == maximum


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        ({"type": "string", "minLength": 2.0}, {"type": "string", "minLength": 2}),
        ({"type": "array", "maxItems": 3.0, "minItems": None}, {"type": "array", "maxItems": 3}),
        ({"type": None, "enum": [1]}, {"enum": [1]}),
        ({"type": ["string", None]}, {"type": ["string", "null"]}),
        ({"type": "string", "minLength": 2.5}, {"type": "string", "minLength": 2.5}),
        ({"type": "number", "minimum": 2.0}, {"type": "number", "minimum": 2.0}),
    ],
    ids=str,
)
def test_what_programs_write_is_read_as_it_is_meant(schema: Any, meant: Any) -> None:
    made = {"type": "object", "properties": {"a": schema}}
    say_plainly(made)
    assert made["properties"]["a"] == meant
    assert refused({"type": "object", "properties": {"a": schema}}) == (
        "minLength" in meant and meant["minLength"] == 2.5
    )


DEFINED = {
    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "Same": {"$ref": "#/$defs/Point"},
    "Itself": {"$ref": "#/$defs/Itself"},
    "Any": {"enum": [1, "a"]},
}


@pytest.mark.parametrize(
    ("parts", "separate"),
    [
        ([{"$ref": "#/$defs/Point"}, {"type": "null"}], True),
        ([{"type": ["null", "string"]}, {"$ref": "#/$defs/Same"}, {"type": "number"}], True),
        ([{"$ref": "#/$defs/Point"}, {"$ref": "#/$defs/Same"}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"$ref": "#/$defs/Any"}, {"type": "null"}], False),
        ([{"$ref": "#/$defs/Itself"}, {"type": "null"}], False),
        ([{"$ref": "#/$defs/missing"}, {"type": "null"}], False),
        ([{"$ref": "there#/$defs/Point"}, {"type": "null"}], False),
        ([{"$ref": 5}, {"type": 5}, True], False),
        (5, False),
    ],
    ids=str,
)
def test_one_of_parts_that_are_apart_is_any_of_them(parts: Any, separate: bool) -> None:
    schema = {"properties": {"a": {"oneOf": parts, "title": "A"}}, "$defs": DEFINED}
    made = copy.deepcopy(schema)
    say_any_of(made)
    assert (made != schema) == separate
    if separate:
        assert made["properties"] == {"a": {"anyOf": parts, "title": "A"}}
        assert schema_text(schema) is not None


def test_keywords_that_ask_for_nothing_are_no_reason_to_refuse() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    several = {"type": "array", "uniqueItems": False}
    schema = {"properties": {"a": record, "uniqueItems": several}, "required": ["a"]}
    assert schema_text(schema) is not None
    drop_idle(schema)
    assert "propertyNames" not in record and "uniqueItems" not in several
    assert list(schema["properties"]) == ["a", "uniqueItems"], "which are names"
    for asks in ({"uniqueItems": True}, {"propertyNames": {"maxLength": 2}}):
        made = {"items": dict(asks)}
        drop_idle(made)
        assert made == {"items": asks}
