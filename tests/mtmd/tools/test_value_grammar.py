"""Grammars of argument values in forms of their own."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.kernels.errors import OptionError
from mtmd.tools import lark
from mtmd.tools.lark import Lark
from mtmd.tools.schemas import definitions, with_definitions
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
