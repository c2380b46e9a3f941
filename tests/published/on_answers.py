"""Answers of published models, in fp32, token for token those of transformers with the same file."""

from __future__ import annotations

from typing import Any

import pytest
from published_conversations import as_strings
from published_models import MODELS
from published_subject import TOKENS, Subject, of, prompts_of

import mtmd
from mtmd import Answer, Finished, RawPrompt

BATCH = 8
LONG = 96  # tokens: answers that repeat what was there have tokens proposed
PAIRS = [(name, prompt) for name in MODELS for prompt in prompts_of(name)]


def begun(model: mtmd.Model, prompt: Any, tokens: int = TOKENS) -> Any:
    """An answer under way, to a text as it is or to a conversation."""
    given = RawPrompt(prompt) if isinstance(prompt, str) else prompt
    return model.service.submit(given, max_tokens=tokens)


def ended(ticket: Any) -> Answer:
    *_, last = ticket
    assert isinstance(last, Finished)
    return last.answer


@pytest.mark.parametrize(
    ("subject", "prompt"), PAIRS, ids=[": ".join(p) for p in PAIRS], indirect=["subject"]
)
def test_an_answer_is_that_of_transformers(subject: Subject, prompt: str) -> None:
    prompts = prompts_of(subject.name)
    given = prompts[prompt]
    ids = subject.oracle.prompt_ids(given if isinstance(given, str) else as_strings(given))
    result = ended(begun(subject.fp32, given))
    assert list(result.prompt_token_ids) == ids
    tokens = list(result.output_token_ids)
    assert tokens == subject.oracle.greedy(ids, TOKENS, guess=tokens)
    assert tokens
    subject.results |= {"prompts": len(prompts), "equal": subject.results.get("equal", 0) + 1}


@of(*MODELS)
def test_what_is_compared_with_is_what_transformers_generates(subject: Subject) -> None:
    given = next(iter(prompts_of(subject.name).values()))
    ids = subject.oracle.prompt_ids(given)
    assert subject.oracle.generated(ids, TOKENS) == subject.oracle.greedy(ids, TOKENS)


@of(*MODELS)
def test_batches_of_eight_give_the_same_tokens(subject: Subject) -> None:
    prompts = [*prompts_of(subject.name).values()]
    alone = [ended(begun(subject.fp32, prompt)).output_token_ids for prompt in prompts]
    with subject.load(dtype="fp32", parallel=BATCH) as model:
        for first in range(0, len(prompts), BATCH):
            tickets = [begun(model, prompt) for prompt in prompts[first : first + BATCH]]
            together = [ended(ticket).output_token_ids for ticket in tickets]
            assert together == alone[first : first + BATCH]


@of(*MODELS)
def test_proposed_tokens_change_nothing(subject: Subject) -> None:
    prompts = [*prompts_of(subject.name).values()][::5]
    answers = {}
    for speculate in (8, "off"):
        with subject.load(dtype="fp32", speculate=speculate) as model:
            answers[speculate] = [ended(begun(model, prompt, LONG)) for prompt in prompts]
    assert sum(answer.receipt.accepted_tokens for answer in answers[8]) > 0
    assert not any(answer.receipt.proposed_tokens for answer in answers["off"])
    for proposed, plain in zip(answers[8], answers["off"], strict=True):
        assert proposed.output_token_ids == plain.output_token_ids
