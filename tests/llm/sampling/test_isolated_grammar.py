"""Schemas followed in worker processes: the same answers as without, and bombs that end alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import small_tokenizers
import torch
from processes import children
from small_tokenizers import NAMES

from mtmd.base.errors import OptionError
from mtmd.llm.sampling import isolated_grammar as isolated
from mtmd.llm.sampling.constraint import Grammars, JsonConstraint
from mtmd.llm.sampling.isolated_grammar import IsolatedConstraint, IsolatedGrammars
from mtmd.llm.sampling.json_schema import CheckedSchema, schema_text
from mtmd.llm.tokenizer.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def patterns(maximum: int) -> list[dict[str, str]]:
    """Their product has a state for every set of places in the last `maximum` letters."""
    return [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(1, maximum + 1)]


BOMBS: dict[str, dict[str, Any]] = {
    "allOf": {"allOf": patterns(17)},
    "in a property": {"type": "object", "properties": {"x": {"allOf": patterns(17)}}},
    "by reference": {
        "allOf": [{"$ref": f"#/$defs/{k}"} for k in range(17)],
        "$defs": dict(zip(map(str, range(17)), patterns(17), strict=True)),
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(small_tokenizers.byte_level(), NAMES)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[IsolatedGrammars]:
    made = IsolatedGrammars(tokenizer)
    yield made
    made.close()


def write(
    constraint: JsonConstraint | IsolatedConstraint, stop: int, rows: int, seed: int
) -> list[torch.Tensor]:
    """What may come next at each place of an answer by random logits."""
    rng, seen = torch.Generator().manual_seed(seed), list[torch.Tensor]()
    constraint.begin()
    for _ in range(120):
        logits = torch.randn(rows, generator=rng)
        logits[stop] += 3
        allowed = constraint.mask(logits)
        seen.append(allowed.isfinite())
        token = int(allowed.argmax())
        if token == stop:
            break
        constraint.accept(token)
    constraint.close()
    return seen


@pytest.mark.parametrize(
    "schema", [True, {}, RECORD, {"enum": ["ab", 1, None]}, {"pattern": "^a+$", "type": "string"}]
)
def test_the_same_may_come_next(
    schema: Any, tokenizer: Tokenizer, grammars: IsolatedGrammars
) -> None:
    stop, here = tokenizer.special["eos_token"], Grammars(tokenizer)
    text, checked = schema_text(schema), grammars.checked(schema)
    assert text is not None and checked == text and isinstance(checked, CheckedSchema)
    assert schema_text(checked) is checked
    for seed in range(3):
        for rows in (len(tokenizer), len(tokenizer) + 5):
            ends = frozenset({stop})
            expected = write(here.constraint(text, ends), stop, rows, seed)
            actual = write(grammars.constraint(checked, ends), stop, rows, seed)
            assert [e.tolist() for e in expected] == [f.tolist() for f in actual]


@pytest.mark.parametrize(
    "schema",
    [None, "{", {"type": "string!"}, {"const": "\ud800"}, {"not": {}}, 7, {"multipleOf": 1e-300}],
)
def test_checked_as_without(schema: Any, grammars: IsolatedGrammars) -> None:
    if schema is None:
        assert grammars.checked(schema) is None
        return
    with pytest.raises(OptionError) as here:
        schema_text(schema)
    with pytest.raises(OptionError) as there:
        grammars.checked(schema)
    assert str(here.value) == str(there.value)


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_takes_all_memory_is_refused(
    name: str, grammars: IsolatedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the process with it."""
    monkeypatch.setattr(isolated, "TRIAL_LIMITS", isolated.Limits(2, 48 << 20))
    with pytest.raises(OptionError, match=r"needs more than (48 MiB|2 s)") as caught:
        grammars.checked(BOMBS[name])
    assert grammars.checked({"type": "object"}) == '{"type": "object"}'
    monkeypatch.setattr(grammars, "_tried_now", None)  # it is known by now
    with pytest.raises(OptionError) as again:
        grammars.checked(BOMBS[name])
    assert str(again.value) == str(caught.value)


def test_a_panic_is_an_error_here_and_there(grammars: IsolatedGrammars) -> None:
    schema = {"minimum": "é" * 100}
    with pytest.raises(OptionError, match="found a schema that cannot be read"):
        schema_text(schema)
    with pytest.raises(OptionError, match="found a schema that cannot be read"):
        grammars.checked(schema)


def test_one_whose_worker_ends_is_told_and_others_go_on(
    tokenizer: Tokenizer, grammars: IsolatedGrammars
) -> None:
    stop, logits = frozenset({tokenizer.special["eos_token"]}), torch.zeros(len(tokenizer))
    first, second = (grammars.constraint('{"const": "ab"}', stop) for _ in range(2))
    before = set(workers(grammars))
    first.accept(int(first.mask(logits).argmax()))
    (number,) = set(workers(grammars)) - before
    second.accept(int(second.mask(logits).argmax()))
    os.kill(number, signal.SIGKILL)
    with pytest.raises(OptionError, match="json_schema: to follow the schema takes more than"):
        for _ in range(2):  # what it said before it ended still counts
            first.accept(int(first.mask(logits).argmax()))
    for _ in range(2):
        second.accept(int(second.mask(logits).argmax()))
    first.close()
    second.close()


def workers(grammars: IsolatedGrammars) -> list[int]:
    return children(grammars._server.pid)


def test_an_answer_that_is_over_leaves_no_worker(
    tokenizer: Tokenizer, grammars: IsolatedGrammars
) -> None:
    stop = frozenset({tokenizer.special["eos_token"]})
    grammars.checked(True)
    before = set(workers(grammars))
    constraint = grammars.constraint('{"type": "object"}', stop)
    constraint.mask(torch.zeros(len(tokenizer)))
    (number,) = set(workers(grammars)) - before
    constraint.close()
    while number in workers(grammars):
        continue
    hasty = grammars.constraint('{"type": "object"}', stop)
    hasty.begin()
    hasty.close()  # before its worker is there
    hasty._opened.wait(30)
    while set(workers(grammars)) - before:
        continue


def test_who_says_nothing_for_long_is_given_up(
    tokenizer: Tokenizer, grammars: IsolatedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "WAITED_S", 0.05)
    constraint = grammars.constraint('{"const": 1}', frozenset({1}))
    constraint.mask(torch.zeros(len(tokenizer)))
    assert constraint._worker is not None
    assert not constraint.ready()  # as nothing is asked of it
    constraint._requested -= 1
    assert constraint.ready()
    with pytest.raises(OptionError, match=r"takes more than 0.05 s; simplify it"):
        constraint.mask(torch.zeros(len(tokenizer)))
    constraint.close()


def test_a_long_prompt_or_step_of_the_model_is_no_waiting(
    tokenizer: Tokenizer, grammars: IsolatedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open WebUI sends some forty tools: a prompt of half a minute, in which nobody waits."""
    monkeypatch.setattr(isolated, "WAITED_S", 0.0)
    monkeypatch.setattr(isolated, "PATIENCE_S", 0.0)
    constraint = grammars.constraint('{"type": "object"}', frozenset({1}))
    constraint.begin()
    for _ in range(2):
        assert constraint._opened.wait(30) and constraint._worker is not None
        assert constraint._worker.ready(30)  # found out while the model computes
        mask = constraint.mask(torch.zeros(len(tokenizer)))
        constraint.accept(int(mask.argmax()))
    assert constraint._waited == 0
    constraint.close()


def test_nothing_ends_the_answer(grammars: IsolatedGrammars) -> None:
    with pytest.raises(OptionError, match="leave ignore_eos away"):
        grammars.constraint('{"type": "object"}', frozenset())
