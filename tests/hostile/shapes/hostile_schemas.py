"""JSON schemas that an answer has to follow: as they come, senseless, and made to take all time or
memory while they are compiled or followed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from attempts import Attempt, chat, post

HEAVY = 0.01  # of all: those that take a worker's whole time or memory
PATTERNS = (
    "^a+$",
    "(a|b)*a(a|b){3}",
    "[\\w-]+@[\\w-]+\\.com",
    "\\d{1,3}",
    ".*x.*y.*z",
    "(",
    "\\p{L}+",
    "(?=a)b",
    "^(é|ß|😀)+$",
    "[^\\x00-\\x7f]{1,20}",
    "a{1000}",
    "(?i)straße",
)
PARTS = ("anyOf", "oneOf", "allOf")
VALUES = (0, -1, 1.5, 1e300, 10**30, "x", "é" * 100, "\ud800", None, True, [], {}, [[[]]], "\0")


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Any, mostly sensible."""
    if depth > 4 or rng.random() < 0.1:
        return rng.choice((True, {}, {"type": "string"}, {"const": rng.choice(VALUES)}, False))
    kind = rng.randrange(9)
    deeper = lambda: schema(rng, depth + 1)  # noqa: E731
    if kind == 0:
        made = {"type": "string"} | rng.choice(
            (
                {},
                {"pattern": rng.choice(PATTERNS)},
                {"maxLength": rng.choice((0, 5, 10**6))},
                {"minLength": rng.choice((1, 100_000))},
                {"format": rng.choice(("date-time", "email", "uuid", "ipv6", "nonsense"))},
            )
        )
    elif kind == 1:
        edge = rng.choice(VALUES[:5])
        made = {"type": rng.choice(("integer", "number"))} | rng.choice(
            ({}, {"minimum": edge}, {"maximum": edge, "minimum": 3}, {"multipleOf": edge})
        )
    elif kind == 2:
        names = [rng.choice(("a", "b", "é", "", "x" * 50, "$ref")) + str(i) for i in range(4)]
        made = {
            "type": "object",
            "properties": {name: deeper() for name in names[: rng.randint(0, 4)]},
            "required": names[: rng.randint(0, 4)],
            "additionalProperties": rng.choice((False, True, {"type": "null"})),
        }
    elif kind == 3:
        made = {"type": "array", "items": deeper()} | rng.choice(
            (
                {},
                {"minItems": rng.choice((2, 10**6)), "maxItems": 10**7},
                {"prefixItems": [deeper()]},
            )
        )
    elif kind == 4:
        made = {
            rng.choice(("anyOf", "oneOf", "allOf")): [deeper() for _ in range(rng.randint(1, 4))]
        }
    elif kind == 5:
        made = {"enum": [rng.choice(VALUES) for _ in range(rng.choice((1, 5, 300)))]}
    elif kind == 6:
        made = {"$ref": rng.choice(("#", "#/$defs/a", "#/$defs/b", "http://x/y", "#/nowhere"))}
        if depth == 0:
            made["$defs"] = {"a": deeper(), "b": {"$ref": "#/$defs/a"}}
    elif kind == 7:
        made = {"type": rng.choice(("strin", 7, ["string", "null"], [], None, "object"))}
    else:
        made = {"not": deeper(), "if": deeper(), "then": deeper()}
    if rng.random() < 0.05:
        made[rng.choice(("type", "minimum", "pattern", "enum", "required", "x"))] = rng.choice(
            VALUES
        )
    return made


def patterns(maximum: int) -> list[dict[str, str]]:
    return [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(1, maximum + 1)]


def _deep(rng: random.Random) -> Any:
    made: Any = {"type": "string"}
    for _ in range(rng.choice((20, 60, 70, 300))):
        made = {"type": "array", "items": made}
    return made


def _chain(length: int, key: str) -> Any:
    """Each definition refers to the next one twice."""
    made = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{length}": {"type": "string"}}}


BOMBS: dict[str, Callable[[random.Random], Any]] = {
    "a long enumeration": lambda rng: {
        "enum": [f"word {i}" for i in range(rng.choice((999, 20_000)))]
    },
    "deep": _deep,
    "one that is itself": lambda rng: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "twice in a row": lambda rng: _chain(rng.choice((28, 400)), rng.choice(PARTS)),
    "wide by wide": lambda rng: {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/U"} for i in range(900)},
        "$defs": {"U": {rng.choice(PARTS): [{"const": i} for i in range(900)]}},
    },
    "each its place": lambda rng: {
        "type": "object",
        "properties": {f"p{i}": {"$ref": f"#/properties/p{i + 1}"} for i in range(900)},
    },
    "a long number in a reference": lambda rng: {"anyOf": [{}], "$ref": f"#/anyOf/{'9' * 5000}"},
    "names that are lists": lambda rng: {"properties": {"a": {}}, "required": [["a"]]},
    "a minimum that is a text": lambda rng: {"minimum": "é" * 100},
    "many properties": lambda rng: {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(rng.choice((100, 3000)))},
    },
    "a long pattern": lambda rng: {"type": "string", "pattern": "(a|b|c){0,9}" * 200},
    "a counted pattern": lambda rng: {"type": "string", "pattern": "((a{0,50}){0,50}){0,50}"},
    "a few patterns at once": lambda rng: {"allOf": patterns(rng.randint(3, 8))},
}
HEAVY_BOMBS: dict[str, Callable[[random.Random], Any]] = {
    "allOf": lambda rng: {"allOf": patterns(rng.choice((12, 15, 17)))},
    "in a property": lambda rng: {"type": "object", "properties": {"x": {"allOf": patterns(17)}}},
    "by reference": lambda rng: {
        "allOf": [{"$ref": f"#/$defs/{k}"} for k in range(17)],
        "$defs": dict(zip(map(str, range(17)), patterns(17), strict=True)),
    },
    "many ways at once": lambda rng: {
        "anyOf": [{"allOf": patterns(k)} for k in rng.sample(range(5, 14), 4)]
    },
}


def schema_attempt(rng: random.Random, key: str) -> Attempt:
    chance = rng.random()
    if chance < HEAVY:
        name = rng.choice(list(HEAVY_BOMBS))
        what, made = f"heavy: {name}", HEAVY_BOMBS[name](rng)
    elif chance < 0.1:
        name = rng.choice(list(BOMBS))
        what, made = f"bomb: {name}", BOMBS[name](rng)
    else:
        what, made = "a schema", schema(rng)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": made}}
    if chance > 0.98:
        what, form = (
            "another form",
            rng.choice(
                ({"type": "json_object"}, {"type": "grammar"}, {"type": "json_schema"}, made)
            ),
        )
    body = chat(
        "in JSON",
        response_format=form,
        max_tokens=rng.choice((1, 4, 20)),
        temperature=rng.choice((0, 2)),
    )
    return Attempt(what, post("/v1/chat/completions", body, key))
