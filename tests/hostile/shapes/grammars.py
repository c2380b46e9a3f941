"""Grammars in every notation, as they come, damaged, and made to take all time or memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from attempts import Attempt, chat, damaged, post
from hostile_schemas import schema_attempt

GBNF = (
    'root ::= "yes" | "no"',
    'root ::= item+\nitem ::= "- " [^\\n]+ "\\n"',
    'root ::= "{" ws "a" ws ":" ws [0-9]{1,5} ws "}"\nws ::= [ \\t\\n]*',
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
    "root ::= [a-zé-ü]{2,8} # a comment",
)
LARK = (
    'start: "yes" | "no"',
    'start: WORD (" " WORD)*\nWORD: /[a-z]+/',
    'start: value\nvalue: "[" (value ("," value)*)? "]" | NUMBER\nNUMBER: /-?[0-9]+/',
    '%llguidance {}\nstart: %json {"type": "integer"}',
)
PATTERNS = (
    "yes|no",
    "[a-z]+@[a-z]+\\.com",
    "\\d{4}-\\d\\d",
    "(é|ß)+",
    "(?i)a.b",
    "^a$",
    "a{3,9}",
    "(",
    "a**",
)
HEAVY = 0.01
HEAVY_BOMBS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "an expression of 2^k states": lambda rng: {"regex": f"(a|b)*a(a|b){{{rng.choice((14, 18, 30))}}}"},
    "expressions that are met at once": lambda rng: {
        "grammar": "start: A" + "".join(f" & B{k}" for k in range(12)) + "\nA: /[ab]*/\n"
        + "\n".join(f"B{k}: /(a|b)*a(a|b){{{k}}}/" for k in range(12))
    },
    "counts in counts": lambda rng: {"regex": "((a{0,60}){0,60}){0,60}"},
    "a rule for every way": lambda rng: {
        "grammar": "root ::= " + " ".join(["(s | s s)?"] * 60) + '\ns ::= "a" | "a" s | s "a"'
    },
}  # fmt: skip
BOMBS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "many choices": lambda rng: {"guided_choice": [f"w{i}" for i in range(rng.choice((900, 5000)))]},
    "a rule that is itself": lambda rng: {"grammar": "root ::= root"},
    "rules that end nowhere": lambda rng: {"grammar": 'root ::= a\na ::= "x" b\nb ::= a'},
    "left recursion": lambda rng: {"grammar": 'root ::= root "a" | "a"'},
    "deep": lambda rng: {"grammar": "root ::= " + "(" * (d := rng.choice((50, 3000))) + '"a"' + ")" * d},
    "long": lambda rng: {"grammar": 'root ::= "' + "a" * rng.choice((30_000, 400_000)) + '"'},
    "many rules": lambda rng: {
        "grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1} | "b"' for i in range(2000))
    },
    "a large count": lambda rng: {"regex": f"a{{{rng.choice((1000, 100_000, 10**9))}}}"},
    "an empty one": lambda rng: {"grammar": rng.choice(("", " ", "#", "root", "root ::="))},
    "two at once": lambda rng: {"regex": "a", "guided_choice": ["a"]},
}  # fmt: skip


def grammar(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """What it is, and the fields that ask for it."""
    chance = rng.random()
    if chance < HEAVY:
        name = rng.choice(list(HEAVY_BOMBS))
        return f"heavy: {name}", HEAVY_BOMBS[name](rng)
    if chance < 0.12:
        name = rng.choice(list(BOMBS))
        return f"bomb: {name}", BOMBS[name](rng)
    kind = rng.randrange(4)
    if kind == 0:
        text = rng.choice(PATTERNS)
        fields = ("regex", "guided_regex", "structured_outputs.regex")
    elif kind == 1:
        words = [
            rng.choice(("yes", "no", "é", "", "a b", "x" * 300)) for _ in range(rng.randint(0, 5))
        ]
        if rng.random() < 0.5:
            return "choices", {"structured_outputs": {"choice": words}}
        return "choices", {"guided_choice": words}
    elif kind == 2:
        text, fields = rng.choice(GBNF), ("grammar", "ebnf", "guided_grammar")
    else:
        text, fields = rng.choice(LARK), ("grammar", "structured_outputs.grammar")
    what = "a grammar"
    if rng.random() < 0.6:
        text, what = damaged(text.encode(), rng, 4).decode("utf-8", "replace"), "a damaged grammar"
    outer, _, inner = rng.choice(fields).partition(".")
    return what, {outer: {inner: text} if inner else text}


def grammar_attempt(rng: random.Random, key: str) -> Attempt:
    what, fields = grammar(rng)
    body = chat("go on", **fields) | {"max_tokens": rng.choice((1, 4, 20))}
    return Attempt(what, post("/v1/chat/completions", body, key))


def constraint_attempt(rng: random.Random, key: str) -> Attempt:
    """What an answer has to look like, by a schema or a grammar."""
    return (schema_attempt if rng.random() < 0.6 else grammar_attempt)(rng, key)
