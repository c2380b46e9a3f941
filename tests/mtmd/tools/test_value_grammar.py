"""Grammars of argument values in forms of their own."""

from __future__ import annotations

import pytest

from mtmd.tools.lark import Lark
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
