"""Grammars of argument values in forms of their own."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import OptionError
from mtmd.tools import lark
from mtmd.tools.lark import Lark
from mtmd.tools.schemas import TYPES, definitions, texts_of, types_of, with_definitions
from mtmd.tools.value_grammar import ValueGrammar
from mtmd.tools.values import ValueForm

ROOT = {"$defs": {"Place": {"type": "object", "properties": {"of": {"type": "integer"}}}}}


@pytest.mark.parametrize(
    ("schema", "refers"),
    [
        ({"type": "integer"}, False),
        ({"$ref": "#/$defs/Place"}, True),
        ({"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/Place"}}, True),
        (False, False),
    ],
    ids=str,
)
def test_definitions_stand_beside_what_refers_to_them(schema: object, refers: bool) -> None:
    """With all of them beside each argument a tool's grammar was of their product."""
    form = ValueForm("'", "'", "True", "False", "None", True)
    text = ValueGrammar(Lark({}), form, ROOT, lenient=False).json(schema)
    assert ('"Place"' in text) == refers


def test_definitions_that_nothing_reaches_are_left_out() -> None:
    root = {
        "$defs": {
            "A": {"anyOf": [{"$ref": "#/$defs/B"}, {"type": "null"}]},
            "B": {"type": "array", "items": {"$ref": "#/$defs/A"}},
            "a/b": {"type": "string"},
            "other": {"type": "string"},
        },
        "definitions": {"C": {"type": "boolean"}},
    }
    assert definitions(root, {"$ref": "#/$defs/A"}) == {
        "$defs": {name: root["$defs"][name] for name in "AB"}
    }
    assert definitions(root, [{"$ref": "#/$defs/a~1b"}, {"not": {"$ref": "#/definitions/C"}}]) == {
        "$defs": {"a/b": {"type": "string"}},
        "definitions": {"C": {"type": "boolean"}},
    }
    for other in ("#", "#/properties/x", "#/$defs/missing", "https://there/x#/$defs/A", "A"):
        assert definitions(root, {"$ref": other}) == root, "whatever it may mean"
    assert definitions(root, {"type": "string"}) == {}


def test_definitions_beside_many_arguments_take_no_end_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lark, "JSON_MAX", 10_000)
    root = {"$defs": {"Long": {"type": "string", "pattern": "a" * 900}}}
    form = ValueForm("'", "'", "True", "False", "None", True)
    values, written = ValueGrammar(Lark({}), form, root, lenient=False), 0
    with pytest.raises(OptionError, match="more than 10,000 characters, each counted"):
        for written in range(20):
            values.json({"allOf": [{"$ref": "#/$defs/Long"}], "minLength": written})
    assert written == 9


def test_references_take_no_more_room_than_there_is() -> None:
    deep: dict[str, Any] = {"type": "object", "properties": {}}
    schema: dict[str, Any] = {"type": "object", "properties": {"p": deep}}
    path = "#/properties/p"
    for _ in range(40):
        deep["properties"] = {"p": {"type": "object"}, "r": {"$ref": path}}
        deep["description"] = "long" * 10_000
        deep, path = deep["properties"]["p"], f"{path}/properties/p"
    assert with_definitions(schema) is schema
    chain = {f"p{i}": {"$ref": f"#/properties/p{i + 1}"} for i in range(3000)}
    made = with_definitions({"type": "object", "properties": {**chain, "p3000": {"type": "null"}}})
    assert len(made["$defs"]) == 3000


DOUBLING = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
    for i in range(60)
}


@pytest.mark.parametrize(
    "choices",
    [
        {**DOUBLING, "d60": {"const": "a"}},
        {"d0": {"oneOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}, {"const": "a"}]}},
    ],
    ids=["each twice", "itself"],
)
def test_a_choice_is_gone_into_once_however_often_it_is_referred_to(choices: Any) -> None:
    """Not once for each way that leads there, which are 2 ** 60."""
    schema, root = {"$ref": "#/$defs/d0"}, {"$defs": choices}
    assert types_of(schema, root) == {"string"}
    assert texts_of(schema, root) == ["a"]


def test_a_choice_of_nothing_but_itself_tells_nothing() -> None:
    schema = {"$ref": "#/$defs/a"}
    root = {"$defs": {"a": {"anyOf": [schema, schema]}}}
    assert types_of(schema, root) == set(TYPES)
    assert texts_of(schema, root) is None


def test_of_a_choice_among_very_many_nothing_is_told() -> None:
    schema = {"anyOf": [{"const": str(i)} for i in range(2000)]}
    assert types_of(schema, {}) == set(TYPES)
    assert texts_of(schema, {}) is None
    few = {"anyOf": schema["anyOf"][:900]}
    assert types_of(few, {}) == {"string"} and len(texts_of(few, {}) or ()) == 900
