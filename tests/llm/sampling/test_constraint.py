"""Answers that follow a JSON schema, whatever the model: random logits on small tokenizers of each
kind, jsonschema as the oracle.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
import small_tokenizers
import test_runner as small
import test_tokenizer
import tokenizers
import torch
from tokenizer_samples import metadata, original

from mtmd.base.errors import MtmdError, OptionError
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.constraint import Grammars, JsonConstraint, allowed_bits, masked
from mtmd.llm.sampling.json_schema import MULTIPLE_MAX, SCHEMA_BYTES_MAX, schema_text
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.options.answer import AnswerOptions

NAMES = test_tokenizer.NAMES


def from_gguf() -> Tokenizer:
    inner = original("qwen2")
    return Tokenizer.from_gguf(
        metadata(inner, "gpt2", "qwen2", eos_token_id=inner.token_to_id("<eos>")), "a.gguf"
    )


KINDS = {
    **{
        name: (lambda make=make: Tokenizer(make(), NAMES))
        for name, make in test_tokenizer.KINDS.items()
    },
    "gguf": from_gguf,
}
TOKENIZERS: dict[str, tuple[Tokenizer, Grammars, int]] = {}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Tokenizer, Grammars, int]:
    """A tokenizer, its grammars, and the token that ends an answer."""
    if request.param not in TOKENIZERS:
        tokenizer = KINDS[request.param]()
        TOKENIZERS[request.param] = tokenizer, Grammars(tokenizer), tokenizer.special["eos_token"]
    return TOKENIZERS[request.param]


SCHEMAS: dict[str, Any] = {
    "any object": True,
    "anything": {},
    "record": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "colour": {"enum": ["red", "green", "été", None, 3]},
        },
        "required": ["name", "count", "colour"],
        "additionalProperties": False,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "日本"}},
    },
    "other properties are numbers": {
        "properties": {"a": {"type": "string"}, '"': {"type": "string"}, "/": {"type": "string"}},
        "type": "object",
        "additionalProperties": {"type": "integer"},
    },
    "array of boxes": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "maximum": 1},
            "minItems": 4,
            "maxItems": 4,
        },
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "items": False,
        "minItems": 2,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "either": {
        "anyOf": [
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
            {"type": "integer", "multipleOf": 7},
            {"type": "null"},
        ]
    },
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, **more},
                "required": ["kind", *more],
                "additionalProperties": False,
            }
            for kind, more in (("a", {"x": {"type": "integer"}}), ("b", {"y": {"type": "boolean"}}))
        ]
    },
    "dates": {
        "type": "array",
        "items": {"type": "string", "format": "date", "pattern": r"^\d{4}-\d\d-\d\d$"},
        "maxItems": 2,
    },
    "money": {"type": "number", "exclusiveMinimum": -5, "maximum": 1000},
    "escapes": {"enum": ['\n\t\\"', "a/b", "\u2028", "🎉"]},
    "patterned keys": {
        "type": "object",
        "patternProperties": {"^n": {"type": "integer"}, "^s": {"type": "string", "maxLength": 2}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "required and more": {
        "type": "object",
        "required": ["a"],
        "minProperties": 1,
        "additionalProperties": {"type": "null"},
        "maxProperties": 3,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"maxProperties": 2},
        ]
    },
}


def write(
    constraint: JsonConstraint,
    stop: int,
    rows: int,
    seed: int,
    temperature: float,
    maximum: int = 400,
) -> tuple[list[int], bool]:
    """Tokens of an answer by random logits, and whether it came to its end. The end grows likelier,
    so that long texts do end.
    """
    rng, sampler, tokens = (
        torch.Generator().manual_seed(seed),
        Sampler(Sampling(temperature=temperature, seed=seed)),
        list[int](),
    )
    while len(tokens) < maximum:
        logits = torch.randn(rows, generator=rng)
        logits[stop] += 5
        token = sampler(constraint.mask(logits), tokens)
        if token == stop:
            return tokens, True
        constraint.accept(token)
        tokens.append(token)
    return tokens, False


def conforms(text: str, schema: Any) -> bool:
    value = json.loads(text)
    return jsonschema.Draft202012Validator(
        {"type": "object"} if schema is True else schema
    ).is_valid(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_follow_the_schema(kind: tuple[Tokenizer, Grammars, int], name: str) -> None:
    tokenizer, grammars, stop = kind
    schema, ended = schema_text(SCHEMAS[name]), 0
    assert schema is not None
    for seed in range(12):
        constraint = grammars.constraint(schema, frozenset({stop}))
        tokens, is_whole = write(constraint, stop, len(tokenizer) + 3, seed, seed % 3 * 0.7)
        stream = tokenizer.stream()
        text = "".join(map(stream.push, tokens)) + stream.finish()
        assert text == tokenizer.decode(tokens) or not is_whole  # cut within a character
        if is_whole:
            ended += 1
            assert conforms(text, SCHEMAS[name]), text
        else:  # cut by its length: still the beginning of one
            assert tokens and text.lstrip()[:1] in '{["tfn-0123456789', text
    assert ended >= 4


LEAVES: list[Any] = [
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "string", "maxLength": 4},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["x", 1, None, "é\n"]},
    {"const": "k"},
    {"type": "number", "maximum": 2},
    {"type": "string", "pattern": "a+b"},
]


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    pick = rng.randrange(4) if depth < 3 else 3
    if pick == 0:
        names = rng.sample(["a", "b", "ab", "é", '"q', "a b"], rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {n: random_schema(rng, depth + 1) for n in names},
            "required": [n for n in names if rng.random() < 0.5],
            "additionalProperties": rng.choice([False, {"type": "integer"}]),
        }
    if pick == 1:
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randint(0, 2),
            "maxItems": rng.randint(2, 3),
        }
    if pick == 2:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    return rng.choice(LEAVES)


def test_random_schemas() -> None:
    rng, ended = random.Random(5), 0
    tokenizer = KINDS["byte_level"]()
    grammars, stop = Grammars(tokenizer), tokenizer.special["eos_token"]
    for seed in range(150):
        schema = random_schema(rng)
        text = schema_text(schema)
        assert text is not None
        tokens, is_whole = write(
            grammars.constraint(text, frozenset({stop})),
            stop,
            len(tokenizer),
            seed,
            seed % 2,
            maximum=250,
        )
        if is_whole:
            ended += 1
            assert conforms(tokenizer.decode(tokens), schema), (schema, tokenizer.decode(tokens))
    assert ended > 100


def test_the_end_comes_only_where_the_answer_is_whole() -> None:
    tokenizer = KINDS["byte_level"]()
    stops = frozenset({tokenizer.special["eos_token"], tokenizer.id("<end_of_turn>"), 10_000})
    constraint = Grammars(tokenizer).constraint(
        str(schema_text({"type": "array", "items": {"type": "integer"}, "maxItems": 2})), stops
    )
    allowed, logits = [], torch.zeros(len(tokenizer))
    for character in "[1, 2]":
        allowed.append(
            [bool(constraint.mask(logits)[s].isfinite()) for s in sorted(stops) if s < len(logits)]
        )
        constraint.accept(tokenizer.id({" ": "Ġ"}.get(character, character)))
    assert allowed == [[False, False]] * 6
    last = constraint.mask(logits)
    assert {int(i) for i in last.isfinite().nonzero()} == stops - {
        10_000
    } and not logits.isinf().any()


def test_special_tokens_never_come_but_other_added_ones_do() -> None:
    tokenizer = KINDS["gemma"]()
    stop = tokenizer.special["eos_token"]
    constraint = Grammars(tokenizer).constraint(
        str(schema_text({"type": "string"})), frozenset({stop})
    )
    constraint.accept(tokenizer.id("<0x22>"))
    finite = constraint.mask(torch.zeros(len(tokenizer))).isfinite()
    special = [tokenizer.id(text) for text in small_tokenizers.SPECIAL]
    assert (
        not finite[special].any()
        and finite[tokenizer.id("<table>")]
        and not finite[tokenizer.id("\n\n")]
    )


def test_token_bytes_are_what_decoding_gives(kind: tuple[Tokenizer, Grammars, int]) -> None:
    tokenizer, _, _ = kind
    spelled, rng = tokenizer.token_bytes(), random.Random(3)
    ordinary = [i for i, b in enumerate(spelled) if b.isascii() and b.strip()]
    assert len(ordinary) > 60 and spelled[tokenizer.special["eos_token"]] == b""
    for _ in range(200):
        ids = rng.choices(ordinary, k=8)
        assert tokenizer.decode(ids).lstrip() == b"".join(spelled[i] for i in ids).decode().lstrip()


def test_a_vocabulary_that_lacks_a_character() -> None:
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<eos>": 0, '"': 1, "a": 2, "<unk>": 3}, [], unk_token="<unk>")
    )
    inner.add_special_tokens(["<eos>", "<unk>"])
    constraint = Grammars(Tokenizer(inner, {"eos_token": "<eos>"})).constraint(
        str(schema_text({"const": "ab"})), frozenset({0})
    )
    for token in (1, 2):
        assert [int(i) for i in constraint.mask(torch.zeros(4)).isfinite().nonzero()] == [token]
        constraint.accept(token)
    with pytest.raises(MtmdError, match="characters that the model cannot write"):
        constraint.mask(torch.zeros(4))


def test_grammars_are_made_once_and_forgotten_last_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mtmd.llm.sampling.constraint as module

    monkeypatch.setattr(module, "GRAMMARS", 2)
    grammars, made = Grammars(KINDS["byte_level"]()), []
    make = grammars._make
    monkeypatch.setattr(grammars, "_make", lambda schema: (made.append(schema), make(schema))[1])
    for schema in ("a", "b", "a", "c", "a", "b"):
        grammars.constraint(str(schema_text({"const": schema})), frozenset({1}))
    assert [json.loads(s)["const"] for s in made] == ["a", "b", "c", "b"]


def test_answers_with_one_grammar_do_not_disturb_each_other() -> None:
    tokenizer = KINDS["byte_level"]()
    grammars, schema = Grammars(tokenizer), str(schema_text({"enum": ["ab", "cd"]}))
    first, second = (grammars.constraint(schema, frozenset({1})) for _ in range(2))
    for character in '"a':
        first.accept(tokenizer.id(character))
    second.accept(tokenizer.id('"'))
    finite = second.mask(torch.zeros(len(tokenizer))).isfinite()
    assert finite[tokenizer.id("c")] and finite[tokenizer.id("a")]


def engine_answer(
    max_tokens: int, temperature: float, seed: int, schema: Any
) -> tuple[str, str | None]:
    """By a random decoder of as many tokens as it has rows, beside another request that is free."""
    letters = ["<eos>", *'[]{}"0123456789:,abcdefghijk-.']
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({text: i for i, text in enumerate(letters)}, [])
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer, stop, engine = (
        Tokenizer(inner, {"eos_token": "<eos>"}),
        frozenset({0}),
        Engine(small.runner(256, sequences=2)),
    )
    assert small.FAMILY.vocabulary > len(tokenizer), "rows without a token"
    constraint = Grammars(tokenizer).constraint(str(schema_text(schema)), stop)
    sampling = Sampling(temperature=temperature, seed=seed)
    generation, other = (
        engine.submit(Prompt([Span((5, 6, 7))], Sampler(sampling), stop, max_tokens, constraint=c))
        for c in (constraint, None)
    )
    while engine.busy:
        engine.step()
    assert other.finish in ("stop", "length") and generation.error is None, generation.error
    return tokenizer.decode(generation.tokens), generation.finish


SHORT = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 2,
    "maxItems": 3,
}


@pytest.mark.parametrize(("temperature", "seed"), [(0, 0), (1, 1), (3, 2), (3, 3)])
def test_in_the_engine(temperature: float, seed: int) -> None:
    text, finish = engine_answer(200, temperature, seed, SHORT)
    assert finish == "stop" and conforms(text, SHORT), text


def test_cut_by_max_tokens() -> None:
    text, finish = engine_answer(2, 0, 0, SHORT)
    assert finish == "length" and text.startswith("[") and not text.endswith("]")


REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (3, "found 3, expected an object"),
    "false": (False, "found False"),
    "a list": ([1], "found \\[1\\]"),
    "text": ("{", "not JSON"),
    "text of false": ("false", "found false"),
    "NaN": ({"maximum": float("nan")}, "JSON cannot represent"),
    "a set": ({"enum": {1}}, "JSON cannot represent"),
    "half a character": ({"const": "\ud800"}, "JSON cannot represent"),
    "deep text": ("[" * 60_000, "not JSON"),
    "large": ({"const": "x" * SCHEMA_BYTES_MAX}, "at most 65536"),
    "large text": (" " * (SCHEMA_BYTES_MAX + 1), "at most 65536"),
    "a type": ({"type": "string!"}, r"cannot be followed \(Invalid type: string!\)"),
    "not": ({"not": {"type": "null"}}, r'\["not"\]'),
    "if": ({"if": {}, "then": {}}, "Unimplemented"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "a remote reference": ({"$ref": "http://127.0.0.1/x"}, "127.0.0.1"),
    "a file": ({"$ref": "file:///etc/passwd"}, "passwd"),
    "a missing reference": ({"$ref": "#/$defs/x"}, "does not exist"),
    "nothing fits": ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsat"),
    "a broken pattern": ({"type": "string", "pattern": "("}, "unclosed group"),
    "leniency": ({"not": {}, "x-guidance": {"lenient": True}}, r'\["not"\]'),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "keys that may come twice": (
        {"properties": {"a": {"type": "object", "minProperties": 2}}},
        "minProperties 2",
    ),
    "large multiples": ({"type": "integer", "multipleOf": MULTIPLE_MAX + 1}, "multipleOf 20001"),
    "multiples of multiples": (
        {"allOf": [{"multipleOf": 997}, {"items": {"multipleOf": 9.91}}]},
        "multipleOf 9.91, 997",
    ),
    "a huge number": ({"maximum": 10**400}, "out of range"),
    "a huge multiple": ({"multipleOf": 10**400}, "multipleOf 1000"),
    "an odd multiple": ({"multipleOf": True}, "multipleOf"),
    "a small multiple": ({"multipleOf": 1e-300}, "too many digits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    schema, reported = REFUSED[name]
    with pytest.raises(OptionError, match=reported) as caught:
        AnswerOptions(json_schema=schema)
    line = str(caught.value)
    assert line.startswith("json_schema: ") and line.isprintable() and len(line) < 400


def test_itself_inside_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(OptionError, match="JSON cannot represent"):
        AnswerOptions(json_schema=schema)


def test_kept_as_text() -> None:
    assert AnswerOptions().json_schema is None
    for schema in (True, "true", {"type": "object"}, '{"type":"object"}'):
        assert AnswerOptions(json_schema=schema).json_schema == '{"type": "object"}'
    assert (
        AnswerOptions(json_schema={"const": 5, "multipleOf": 0.01}).json_schema
        == '{"const": 5, "multipleOf": 0.01}'
    )
    assert hash(AnswerOptions(json_schema=True)) == hash(AnswerOptions(json_schema="true"))


def test_nothing_ends_the_answer() -> None:
    with pytest.raises(OptionError, match="leave ignore_eos away"):
        Grammars(KINDS["byte_level"]()).constraint('{"type": "object"}', frozenset())


def test_the_library_is_loaded_only_when_used() -> None:
    code = (
        "import sys, mtmd.options.answer; mtmd.options.answer.AnswerOptions(); print('llguidance' in sys.modules); "
        "mtmd.options.answer.AnswerOptions(json_schema=True); print('llguidance' in sys.modules, 'torch' "
        "in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "True", "False"]


def test_bits_are_those_of_the_library_but_for_ends_and_rows_behind_the_vocabulary() -> None:
    rng = np.random.default_rng(3)
    for size, tokens in ((64, 61), (61, 61), (70, 64), (50, 61), (9, 9), (8, 8)):
        given = rng.integers(0, 2, 96).astype(np.uint8)
        given[1] = 1
        stop = frozenset({2, tokens - 1, size - 1, size, 1000})
        for may_end in (False, True):
            expected = given[:size] == 1
            expected[tokens:] = False
            expected[[s for s in stop if s < size]] = may_end
            bits = allowed_bits(
                np.packbits(given, bitorder="little").tobytes(), size, tokens, stop, may_end
            )
            assert len(bits) == -(-size // 8)
            actual = np.unpackbits(bits, bitorder="little")
            assert actual[:size].tolist() == expected.tolist() and not actual[size:].any()
            left = masked(torch.zeros(size), bits).isfinite()
            assert left.tolist() == expected.tolist()
    with pytest.raises(OptionError):
        allowed_bits(bytes(8), 61, 61, frozenset({3}), False)
