"""Random tools by random schemas, in every way in which templates write calls: what a grammar
allows is read back as arguments that follow the schema. `TOOL_SCHEMAS=500 pytest ...` tries so many.
"""

from __future__ import annotations

import json
import os
import random

import jsonschema
import pytest
from tool_templates import SPECIAL, STOPS, TEMPLATES, template
from tool_walks import MARKS, random_tools, vocabulary, walk

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.json_schema import grammar_text, left_out
from mtmd.tools.grammar import ConstrainedTool, answer_grammar, hold
from mtmd.tools.parser import CallParser, CallPiece
from mtmd.tools.probe import read_template
from mtmd.tools.tool import Tool, read_toolbox

SCHEMAS = int(os.environ.get("TOOL_SCHEMAS", "12"))


@pytest.fixture(scope="module")
def words():
    return vocabulary()


def syntax_of(kind):
    return read_template(template(kind).render, SPECIAL, STOPS).syntax


def pieces(parser, text, rng):
    """What a parser gives for a text that comes in parts."""
    result, at = [], 0
    while at < len(text):
        length = rng.randint(1, 7)
        result += parser.push(text[at : at + length])
        at += length
    return result + parser.finish()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_arguments_follow_their_schemas(kind, words):
    syntax, called = syntax_of(kind), 0
    for seed in range(SCHEMAS):
        rng = random.Random(f"{kind} {seed}")
        box = read_toolbox(random_tools(rng), rng.choice(["required", "auto"]))
        stored = [hold(tool, grammar_text)[0] for tool in box.callable]
        text, ended = walk(answer_grammar(stored, box, syntax, MARKS), words, rng)
        if not ended:
            continue
        parser = CallParser(syntax, stored, SPECIAL)
        result = pieces(parser, text, rng)
        stated = "".join(piece for piece in result if isinstance(piece, str))
        if not parser.calls:
            assert box.choice.mode == "auto" and stated == text
        for index, call in enumerate(parser.calls):
            schema = next(tool.schema for tool in box.tools if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), schema)
            parts = [p for p in result if isinstance(p, CallPiece) and p.index == index]
            assert (parts[0].id, parts[0].name) == (call.id, call.name)
            assert (
                [p.id for p in parts[1:]] == [p.name for p in parts[1:]] == [None] * len(parts[1:])
            )
            assert "".join(p.arguments for p in parts) == call.arguments
        called += len(parser.calls)
    assert called > SCHEMAS // 4


CALL = {"a": "x, 'y' \"z\"\n<b>", "b": 3, "c": True, "d": None, "e": [1, {"f": "g"}], "h": -1.5}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "boolean"},
        "d": {"type": "null"},
        "e": {"type": "array"},
        "h": {"type": "number"},
    },
}


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_that_a_template_writes_are_read_back(kind, size):
    syntax = syntax_of(kind)
    values = CALL if kind != "elements" else {**CALL, "a": "several\nlines & <tags>"}
    calls = [("f", values, "callid001"), ("g", {}, "callid002")][: 2 if syntax.several else 1]
    text = syntax.write(calls)
    tools = [ConstrainedTool(Tool(name), SCHEMA if name == "f" else {}) for name in ("f", "g")]
    parser = CallParser(syntax, tools, SPECIAL)
    before = "" if syntax.trigger(SPECIAL) is None else "I look.\n\n"
    text, result = before + text, []
    for at in range(0, len(text), size):
        result += parser.push(text[at : at + size])
    result += parser.finish()
    assert "".join(p for p in result if isinstance(p, str)) == before.rstrip()
    assert [(c.name, json.loads(c.arguments)) for c in parser.calls] == [c[:2] for c in calls]
    assert len({c.id for c in parser.calls}) == len(calls)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_text_that_is_no_call_stays_text(kind):
    parser = CallParser(syntax_of(kind), [ConstrainedTool(Tool("f"), {})], SPECIAL)
    text = "  <tool is [not] a <|tool, nor {a: 1} or f(x)  \n "
    result = [piece for char in text for piece in parser.push(char)] + parser.finish()
    assert "".join(result) == text and parser.calls == ()


def unmarked(text, size=1, kind="tags"):
    parser = CallParser(syntax_of(kind), [ConstrainedTool(Tool("f"), {})], SPECIAL, unmarked=True)
    result = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
    result += parser.finish()
    stated = "".join(piece for piece in result if isinstance(piece, str))
    return stated, [(call.name, json.loads(call.arguments)) for call in parser.calls]


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(
    "form",
    ["{}", "```json\n{}\n```", "\n```\n{}```\n", "```json\n{}\n```\n```json\n{}\n```", "{}\n{}"],
)
def test_calls_without_their_mark_are_read_as_calls(form, size):
    """Qwen2.5-Coder 0.5B writes its calls so, whatever it is told of tags."""
    written = '{\n  "name": "f",\n  "arguments": {\n "a": {"b": "}```"}}\n}'
    stated, calls = unmarked(form.replace("{}", written), size)
    assert stated.strip() == ""
    assert calls == [("f", {"a": {"b": "}```"}})] * form.count("{}")


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "g", "arguments": {}}\n```',
        '{"name": "f", "age": 3}',
        '{"name": "f f", "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        '```json\n{"name": "f"',
        "```python\nf(1)\n```",
        'Write {"name": "f", "arguments": {}}',
        "  ``",
    ],
)
def test_json_that_is_no_call_stays_text(text, size):
    assert unmarked(text, size) == (text, [])


def test_text_after_a_call_without_its_mark_is_left_out_as_after_others():
    """In every interface an answer's text stands before its calls."""
    text = '```json\n{"name": "f", "arguments": {}}\n```\nThat is all.'
    assert unmarked(text) == ("", [("f", {})])
    assert unmarked('{"name": "f", "arguments": {}}\n{"name": "f') == ("", [("f", {})])


def test_a_call_with_its_mark_is_read_as_ever():
    marked = 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert unmarked(marked) == ("So:", [("f", {"a": 1})])


def test_a_call_that_is_cut_keeps_what_there_is():
    parser = CallParser(syntax_of("tags"), [ConstrainedTool(Tool("f"), {})], SPECIAL)
    parser.push('<tool_call>\n{"name": "f", "arguments": {"a": "hal')
    (call,) = parser.calls
    assert (call.name, call.arguments) == ("f", '{"a": "hal')


@pytest.mark.parametrize("kind", ["python", "marks", "elements"])
def test_work_grows_with_the_length_of_a_value(kind):
    """Characters of a value are not looked at again for each token."""
    import time

    def seconds(length):
        syntax = syntax_of(kind)
        parser = CallParser(syntax, [ConstrainedTool(Tool("f"), SCHEMA)], SPECIAL)
        text = syntax.write([("f", {"a": "ab, " * length}, "callid001")])
        start = time.thread_time()
        for at in range(0, len(text), 4):
            parser.push(text[at : at + 4])
        assert len(json.loads(parser.calls[0].arguments)["a"]) == 4 * length
        return time.thread_time() - start

    seconds(100)
    assert seconds(16_000) < 5  # quadratic in Python: minutes


def test_schemas_that_no_grammar_follows():
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    stored, warning = hold(Tool("f", parameters=json.dumps(unique)), grammar_text)
    assert stored.lenient and "tool f" in warning
    with pytest.raises(OptionError, match="the parameters of 'f', which is strict"):
        hold(Tool("f", parameters=json.dumps(unique), strict=True), grammar_text)
    broken = {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}
    stored, warning = hold(Tool("f", parameters=json.dumps(broken)), grammar_text)
    assert stored.schema == {"type": "object"} and "any JSON object" in warning


def test_a_format_that_no_grammar_knows_is_told_and_the_rest_held():
    path = {"type": "string", "format": "path", "maxLength": 9}
    schema = json.dumps({"type": "object", "properties": {"a": path}, "required": ["a"]})
    for strict in (False, True):
        stored, warning = hold(Tool("f", parameters=schema, strict=strict), grammar_text)
        assert not stored.lenient
        assert stored.schema["properties"] == {"a": {"type": "string", "maxLength": 9}}
        assert warning.startswith("tool f: its arguments follow its schema in part: ")
        assert "'path'" in warning


@pytest.mark.parametrize(
    "number",
    [
        {"type": "integer", "format": "int32"},
        {"type": ["integer", "null"], "format": "int64"},
        {"type": "number", "format": "double"},
    ],
)
def test_formats_of_numbers_are_no_warning(number):
    """As OpenAPI and schemars write them: such a number is held to its type as any other."""
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    stored, warning = hold(Tool("f", parameters=json.dumps(schema), strict=True), grammar_text)
    assert warning is None and not stored.lenient
    assert left_out(json.dumps(schema)) == ()


@pytest.mark.parametrize(
    ("part", "is_freer"),
    [
        ({"type": "string", "format": "date"}, True),
        ({"$ref": "#/$defs/word", "minLength": 2}, True),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string"}]}, True),
        ({"type": "string", "maxLength": 2, "pattern": "a"}, False),
        ({"enum": ["a", "b"], "type": "string"}, False),
        ({"$ref": "#/$defs/word"}, False),
        ({"type": "integer", "minimum": 2}, False),
    ],
)
def test_what_a_text_without_marks_is_not_held_to_is_told(part, is_freer):
    schema = {"type": "object", "properties": {"day": part}, "$defs": {"word": {"type": "string"}}}
    box = read_toolbox([{"name": "f", "parameters": schema}], "auto")
    stored, _ = hold(box.tools[0], grammar_text)
    for kind in TEMPLATES:
        reported, syntax = [], syntax_of(kind)
        answer_grammar([stored], box, syntax, MARKS, None, reported)
        is_raw = syntax.arguments is not None and syntax.arguments.form.is_raw
        assert bool(reported) == (is_freer and is_raw)
        assert all("tool f: " in text and "'day'" in text for text in reported)


def test_of_many_texts_the_first_are_named():
    days = {f"day_{i}": {"type": "string", "format": "date"} for i in range(50)}
    schema = {"type": "object", "properties": days}
    box, reported = read_toolbox([{"name": "f", "parameters": schema}], "auto"), []
    answer_grammar(
        [hold(box.tools[0], grammar_text)[0]], box, syntax_of("elements"), MARKS, None, reported
    )
    assert len(reported) == 1 and reported[0].endswith("'day_0', 'day_1', 'day_2', ...")


def test_choices():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    assert read_toolbox(tools, "none").callable == ()
    one = read_toolbox(tools, {"type": "function", "function": {"name": "g"}})
    assert (one.choice.mode, [t.name for t in one.callable], one.several) == (
        "required",
        ["g"],
        False,
    )
    assert read_toolbox(tools, "g") == one, "as Python's users may say it"
    part = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[:1]}}
    assert [t.name for t in read_toolbox(tools, part).callable] == ["f"]
    for choice, words in (
        ({"type": "function", "function": {"name": "h"}}, r"tool_choice.function.name: found 'h'"),
        ("maybe", "tool_choice: found 'maybe'"),
    ):
        with pytest.raises(OptionError, match=words):
            read_toolbox(tools, choice)
    with pytest.raises(OptionError, match=r"tools\[0\]: found the Python object test_choices, exp"):
        read_toolbox([test_choices])
    with pytest.raises(OptionError, match=r"tools\[1\]: found a second 'f'"):
        read_toolbox([tools[0], tools[0]])


SLOT = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
# As zod, Pydantic and JavaScript's RegExp.source write them
USUAL = {
    "place of another": {
        "a": {"type": "array", "items": SLOT},
        "b": {"$ref": "#/properties/a/items"},
    },
    "in a part as JSON": {
        "a": SLOT,
        "b": {"type": "object", "additionalProperties": {"$ref": "#/properties/a"}},
    },
    "one of several": {
        "a": {"anyOf": [SLOT, {"type": "null"}]},
        "b": {"$ref": "#/properties/a/anyOf/0"},
    },
    "itself": {
        "a": {"const": 1},
        "b": {
            "type": "array",
            "maxItems": 1,
            "uniqueItems": False,
            "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
    },
    "enum by its name": {
        "a": {"$ref": "#/$defs/Colour"},
        "b": {"anyOf": [{"const": "x"}, {"$ref": "#/$defs/Colour"}]},
    },
    "slash": {
        "a": {"type": "string", "pattern": r"^\/v[12]\/x/y$"},
        "b": {"type": "string", "pattern": r"^\\/$"},
    },
    "lines": {
        "a": {"type": "string", "pattern": r"^a\nb$"},
        "b": {"type": "string", "pattern": r"^(x|\n){2}\$$"},
    },
    "record": {
        "a": {"const": 1},
        "b": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"const": 2},
        },
    },
}
COLOUR = {"type": "string", "enum": ["red", "blue"]}


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("case", USUAL)
def test_schemas_as_clients_write_them_are_followed(case, kind, words):
    schema = {
        "type": "object",
        "properties": USUAL[case],
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"Colour": COLOUR},
    }
    syntax, box = syntax_of(kind), read_toolbox([{"name": "f", "parameters": schema}], "required")
    stored, warning = hold(box.tools[0], grammar_text)
    assert warning is None
    source, ends = answer_grammar([stored], box, syntax, MARKS), 0
    for seed in range(4):
        text, ended = walk(source, words, random.Random(seed), 600)
        if ended:
            parser = CallParser(syntax, [stored], SPECIAL)
            parser.push(text)
            parser.finish()
            for call in parser.calls:
                jsonschema.validate(json.loads(call.arguments), schema)
            ends += len(parser.calls)
    assert ends


EMAIL = r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "format": "email", "pattern": EMAIL},
        {"type": "string", "pattern": r"^\w+\b"},
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38},
    ],
    ids=["look-around", "word boundary", "int64", "float"],
)
def test_what_one_argument_asks_in_vain_leaves_the_others_held(part):
    schema = {"type": "object", "properties": {"a": part, "b": {"enum": [1]}}, "required": ["b"]}
    stored, warning = hold(Tool("f", parameters=json.dumps(schema)), grammar_text)
    assert stored.lenient and "in part" in warning
    assert (
        stored.schema["required"] == ["b"]
        and stored.schema["properties"]["a"]["type"] == part["type"]
    )


def test_names_that_stand_in_parts_of_a_schema_may_come():
    branch = {"properties": {"kind": {"const": "a"}, "x": {"const": 1}}, "required": ["kind", "x"]}
    schema = {"type": "object", "properties": {"kind": {"type": "string"}}, "oneOf": [branch]}
    stored, warning = hold(Tool("f", parameters=json.dumps(schema)), grammar_text)
    assert warning is None and "additionalProperties" not in stored.schema
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]}
    stored, warning = hold(Tool("f", parameters=json.dumps(schema)), grammar_text)
    assert warning is None and stored.schema["required"] == ["a", "b"]
    schema = {"type": "object", "properties": {"a": {}, "b": {}}}
    schema["anyOf"] = [{"required": ["a"]}, {"type": "object", "required": ["b"]}]
    assert (
        hold(Tool("f", parameters=json.dumps(schema)), grammar_text)[0].schema[
            "additionalProperties"
        ]
        is False
    )
