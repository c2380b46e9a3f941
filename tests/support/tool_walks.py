"""Random tools, and random answers that a grammar allows, over a small vocabulary: bytes, the
special tokens of `tool_templates`, and a few words.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from tool_templates import SPECIAL

from mtmd.llm.sampling.constraint import Grammars

WORDS = (b"<tool_call>", b'{"', b'": ', b"</", b"true", b"ab", b"\xc3\xa9", b', "', b"null")
TOKENS = [*(bytes([i]) for i in range(256)), *(b"" for _ in SPECIAL), *WORDS, b""]
END = len(TOKENS) - 1
MARKS = {spelling: 256 + i for i, spelling in enumerate(SPECIAL)}
SPELLED = [*(bytes([i]) for i in range(256)), *(s.encode() for s in SPECIAL), *WORDS]
NAMES = ["city", "n", "unit", "x_y", "name", "arguments", "type", "a-b", "q.r", "ä"]


class _Vocabulary:
    def token_bytes(self) -> list[bytes]:
        return TOKENS


def vocabulary() -> Grammars:
    return Grammars(_Vocabulary())  # type: ignore[arg-type]


def walk(source: str, words: Grammars, rng: random.Random, maximum: int = 4000) -> tuple[str, bool]:
    """A random answer, and whether it came to its end."""
    constraint = words.constraint(source, frozenset([END]))
    out = b""
    for _ in range(maximum):
        mask = constraint.mask(torch.zeros(len(TOKENS)))
        allowed = mask.isfinite().nonzero()[:, 0].tolist()
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.7):
            return out.decode(), True
        allowed = [token for token in allowed if token != END]
        token = rng.choices(allowed, [_weight(token) for token in allowed])[0]
        out += SPELLED[token]
        constraint.accept(token)
    return out.decode(errors="replace"), False


def _weight(token: int) -> float:
    """So that texts end, and are not all of one kind."""
    text = SPELLED[token]
    if 256 <= token < 256 + len(SPECIAL):
        return 40
    if text[:1] in b"\"'}])</>":
        return 12
    if text.isalnum():
        return 1
    return 0.3 if text[0] < 32 else 0.05 if text[0] > 126 else 0.5


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    names = rng.sample(["f", "get_weather", "get", "x.y"], rng.randint(1, 3))
    return [
        {"type": "function", "function": {"name": name, "parameters": random_object(rng)}}
        for name in names
    ]


def random_object(rng: random.Random, deep: int = 0) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, deep) for name in names},
    }
    if names:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    if rng.random() < 0.6:
        schema["additionalProperties"] = False
    return schema


def random_schema(rng: random.Random, deep: int = 0) -> dict[str, Any]:
    plain = ["string", "integer", "number", "boolean", "null"]
    more = ["enum", "choice", "length", "pattern", "range", "const", "nullable", "any"]
    kind = rng.choice(plain + ([*more, "array", "object", "anyOf"] if deep < 2 else ["enum"]))
    words = ["red", "gr een", "it's", 'q"t', "ü", "a,b", "true", "5"]
    return {
        "enum": lambda: {"type": "string", "enum": rng.sample(words, 3)},
        "choice": lambda: {"enum": [1, "a", None, True, [1, "x"], {"k": "v"}]},
        "length": lambda: {
            "type": "string",
            "minLength": rng.randint(0, 3),
            "maxLength": rng.randint(3, 9),
        },
        "pattern": lambda: {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,4}$", "^[0-9]{3}-[A-Z]$", "[xyz]/"]),
        },
        "range": lambda: {
            "type": "integer",
            "minimum": rng.randint(-5, 5),
            "maximum": rng.randint(6, 99),
        },
        "const": lambda: {"const": rng.choice(["c", 3, False])},
        "nullable": lambda: {"type": [rng.choice(["string", "integer"]), "null"]},
        "any": dict,
        "array": lambda: {
            "type": "array",
            "items": random_schema(rng, deep + 1),
            "minItems": rng.randint(0, 2),
            "maxItems": rng.randint(2, 4),
        },
        "object": lambda: random_object(rng, deep + 1),
        "anyOf": lambda: {"anyOf": [random_schema(rng, deep + 1) for _ in range(2)]},
    }.get(kind, lambda: {"type": kind, "description": "é"})()
