"""Schemas made to take all time, memory or stack, and those that no grammar follows as a model
writes calls.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tool_templates import SPECIAL, STOPS, TEMPLATES, template
from tool_walks import MARKS

from mtmd.base.errors import OptionError, PromptError
from mtmd.llm.sampling.json_schema import endless, grammar_text, schema_text
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.conversation import read_conversation
from mtmd.service import call_plan
from mtmd.service.call_plan import CallPlan, plan_calls
from mtmd.tools import lark
from mtmd.tools.grammar import ConstrainedTool, hold
from mtmd.tools.history import sealed
from mtmd.tools.lark import Lark
from mtmd.tools.parser import CallParser
from mtmd.tools.probe import read_template
from mtmd.tools.schemas import types_of, with_definitions
from mtmd.tools.tool import DEEP_MAX, Tool, read_toolbox
from mtmd.tools.value_grammar import ValueGrammar
from mtmd.tools.values import ValueForm

PYTHON = ValueForm("'", "'", "True", "False", "None", True)
# One property refers to another, by names that our own definitions have: refused beside values.
TAKEN = {
    "type": "object",
    "properties": {"a": {"$ref": "#/properties/b"}, "b": {}},
    "$defs": {"place-0": {}},
}


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels - 1):
        made = {"not": made}
    return made


def tool(schema: Any, strict: bool = False, name: str = "f") -> Tool:
    return Tool(name, parameters=json.dumps(schema), strict=strict)


def plan(*tools: Tool, kind: str = "elements", choice: str = "auto") -> CallPlan:
    settings = AnswerOptions(tools=tools, tool_choice=choice)
    result = read_template(template(kind).render, SPECIAL, STOPS)
    return plan_calls(settings, result, MARKS, grammar_text)


def test_trials_of_one_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tools, whose schemas are followed in part, or not at all, after as many trials each."""
    tools = [tool(TAKEN, name=f"f{number}") for number in range(256)]
    now, tried = [0.0], list[str]()

    def slow(source: str) -> object:
        tried.append(source)
        now[0] += 1.0
        return grammar_text(source)

    monkeypatch.setattr(call_plan, "time", SimpleNamespace(monotonic=lambda: now[0]))
    result = read_template(template("elements").render, SPECIAL, STOPS)
    made = plan_calls(AnswerOptions(tools=tools), result, MARKS, slow)
    assert len(tried) == call_plan.TRIALS_S
    assert made.grammar is None and "could not be checked in 20 s" in made.warnings[-1]
    tried.clear()
    strict = [tool({"type": "object"}, strict=True, name=f"f{number}") for number in range(256)]
    with pytest.raises(OptionError, match="give fewer tools, or simpler schemas"):
        plan_calls(AnswerOptions(tools=strict), result, MARKS, slow)
    assert len(tried) == call_plan.TRIALS_S


def test_schemas_have_so_many_levels() -> None:
    box = read_toolbox([{"name": "f", "parameters": nested(DEEP_MAX)}])
    assert sealed(box.tools[0].declaration(), str)["function"]["name"] == "f"
    for levels in (DEEP_MAX + 1, 400, 900, 10_000):
        with pytest.raises(OptionError, match=r"^tools\[0\]\.parameters: found"):
            read_toolbox([{"name": "f", "parameters": nested(levels)}])


def test_arguments_of_earlier_calls_have_so_many_levels() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps(nested(400))}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "!"},
    ]
    with pytest.raises(PromptError, match="at most 100 levels"):
        read_conversation(messages, str)


def test_halves_of_surrogate_pairs_are_refused() -> None:
    with pytest.raises(OptionError, match="what JSON cannot represent"):
        read_toolbox([{"name": "f", "parameters": {"const": "\ud800"}}])


@pytest.mark.parametrize("levels", [900, 990, 100_000])
def test_an_argument_too_deep_to_be_read_is_a_text(levels: int) -> None:
    syntax = read_template(template("elements").render, SPECIAL, STOPS).syntax
    parser = CallParser(syntax, [ConstrainedTool(Tool("f"), {})], SPECIAL)
    written = syntax.write([("f", {"a": "VALUE"}, "callid001")])
    text = "[" * levels + "]" * levels
    parser.push(written.replace("VALUE", text))
    (call,) = parser.calls
    assert json.loads(call.arguments)["a"]


def test_references_may_have_any_numbers() -> None:
    for index in ("9" * 5000, "²", "٠", "1"):
        schema = {"anyOf": [{}], "not": {"$ref": f"#/anyOf/{index}"}}
        assert with_definitions(schema)["not"]


def test_references_may_be_written_with_escapes() -> None:
    root = {"$defs": {"Page[int]": {"type": "integer"}, "a/b": {"type": "null"}}}
    assert types_of({"$ref": "#/$defs/Page%5Bint%5D"}, root) == {"integer"}
    assert types_of({"$ref": "#/$defs/a~1b"}, root) == {"null"}


@pytest.mark.parametrize("required", [[["a"]], [{}], "a", 7, {"a": 1}], ids=str)
def test_required_names_may_be_anything(required: Any) -> None:
    schema = {"type": "object", "properties": {"a": {}}, "required": required}
    assert hold(tool(schema), grammar_text)[1]
    with pytest.raises(OptionError):
        schema_text(schema)


@pytest.mark.parametrize("kind", ["elements", "marks", "python"])
def test_wide_choices_for_many_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not their product: it is given up when it is too long, and told."""
    looks = 0
    look = Lark.look

    def counted(self: Lark) -> None:
        nonlocal looks
        looks += 1
        look(self)

    monkeypatch.setattr(Lark, "look", counted)
    union = {"$defs": {"U": {"oneOf": [{"const": i} for i in range(900)]}}}
    names = {f"p{i}": {"oneOf": [{"$ref": "#/$defs/U"}, {"type": "null"}]} for i in range(400)}
    result = plan(tool({"type": "object", "properties": names, **union}), kind=kind)
    assert looks < 5 * lark.LOOKS_MAX and len(result.grammar or "") <= lark.RULES_MAX
    assert any("tool f: its arguments follow its schema in part" in w for w in result.warnings)


def test_rules_and_looks_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark, "RULES_MAX", 100)
    with pytest.raises(OptionError, match="more than 100 characters"):
        for _ in range(3):
            Lark.terminal(rules := Lark({}), "x" * 40)
            Lark.rule(rules, "y" * 80)
    monkeypatch.setattr(lark, "LOOKS_MAX", 9)
    values = ValueGrammar(Lark({}), PYTHON, {}, lenient=False)
    with pytest.raises(OptionError, match="more than 9 parts"):
        values.value({"oneOf": [{"const": i} for i in range(10)]})


ITSELF = {
    "a reference": {"A": {"$ref": "#/$defs/A"}},
    "two": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
    "parts": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"oneOf": [{"$ref": "#/$defs/A"}]}]}},
    "all": {"A": {"allOf": [{"type": "string"}, {"$ref": "#/$defs/A"}]}},
}


@pytest.mark.parametrize("definitions", ITSELF.values(), ids=ITSELF)
def test_what_leads_to_nothing_but_itself_is_told(definitions: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "required": ["a"],
        "$defs": definitions,
    }
    with pytest.raises(OptionError, match="leads to nothing but itself"):
        schema_text(schema)
    with pytest.raises(OptionError, match=r"which is strict: found #/.defs/., which leads to"):
        hold(tool(schema, strict=True), grammar_text)
    stored, warning = hold(tool(schema), grammar_text)
    assert "leads to nothing but itself" in (warning or "")
    assert stored.schema["$defs"]["A"] == {}  # type: ignore[index]


def test_what_leads_to_itself_and_elsewhere_is_followed() -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "array", "items": {"$ref": "#/$defs/T"}}]}
    assert endless({"$ref": "#/$defs/T", "$defs": {"T": tree}}) == []
    assert endless({"$defs": ITSELF["a reference"]}) == [], "nothing refers to it"
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    assert endless({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {}}}) == []


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_tool_that_no_grammar_follows_is_loosened_alone(kind: str) -> None:
    other = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    result = plan(tool(TAKEN), tool(other, name="g"), kind=kind)
    assert result.grammar is not None
    grammar_text(result.grammar)
    assert result.tools[1].schema["required"] == ["n"] and not result.tools[1].lenient
    assert all("tool f: its arguments" in warning for warning in result.warnings)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_counts_with_a_point_and_types_that_are_null_loosen_nothing(kind: str) -> None:
    names = {"a": {"type": "string", "minLength": 2.0}, "b": {"type": None}}
    schema = {"type": None, "properties": names, "required": ["a"]}
    result = plan(*read_toolbox([{"name": "f", "parameters": schema}]).tools, kind=kind)
    assert result.grammar is not None and result.warnings == ()
    assert result.tools[0].schema["required"] == ["a"] and not result.tools[0].lenient


def test_a_tool_that_no_grammar_follows_in_its_form_is_told() -> None:
    result = plan(tool(TAKEN))
    assert result.warnings and "as the model writes calls" in result.warnings[0]
    for tools, choice in (((tool(TAKEN, strict=True),), "auto"), ((tool(TAKEN),), "required")):
        with pytest.raises(OptionError, match="tools: the parameters of 'f': it cannot be follo"):
            plan(*tools, choice=choice)


def test_an_integer_is_a_number() -> None:
    """Else 3 would fit both."""
    values = ValueGrammar(Lark({}), PYTHON, {}, lenient=False)
    several = [{"type": "integer"}, {"type": "number"}]
    assert values.value({"oneOf": several}).startswith("%json")
    assert not values.value({"oneOf": [{"type": "integer"}, {"type": "null"}]}).startswith("%json")
