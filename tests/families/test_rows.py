"""Every family computes a token alike, to the last bit where it runs as machine code, however many
of them are in a batch: so that answers are the same with tokens proposed and without.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from common import Oracle
from table import CASES, CHOSEN, ROWS

from mtmd.checkpoint.open import open_checkpoint
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span, lay_out
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.llm.state import PAGE
from mtmd.model import Model
from mtmd.options.load import LoadOptions

Build = Callable[[str, str], Oracle]
PROMPT, NEXT = tuple(range(3, 76)), (7, 21, 9, 30, 11, 2, 5, 17)


@pytest.mark.parametrize(("row", "variant"), CASES)
def test_rows_of_a_batch_are_as_if_alone(build: Build, row: str, variant: str) -> None:
    model = Model(
        open_checkpoint(build(row, variant).folder),
        LoadOptions(device="cpu", parallel=2, context=128, dtype="bf16"),
    )
    runner = model.runner
    cache = runner.new_cache()
    running = runner.begin(cache, 0)
    runner.prefill([Span(PROMPT)], cache, running)
    states = cache.snapshot(0)
    expected = []
    for token in NEXT:
        expected.append(runner.read([(running, [Span((token,))])], cache)[0])
    for count in (2, 4, 8):
        running.done = running.total = len(PROMPT)
        running.position -= len(NEXT)
        cache.restore(0, states)
        batch = make_batch([(running, [Span(NEXT[:count])])], cache, rows=[count])
        actual = runner.forward(batch)
        assert actual.shape[0] == count
        for one, alone in zip(actual, expected, strict=False):
            assert torch.equal(one, alone), (count, float((one - alone).abs().max()))
        running.position += len(NEXT)


@pytest.mark.parametrize(("row", "variant"), CHOSEN)
def test_an_answer_is_the_same_with_proposals(build: Build, row: str, variant: str) -> None:
    """In bf16, where equal logits are many, drawn from few tokens, so that some come again."""
    runner = Model(
        open_checkpoint(build(row, variant).folder),
        LoadOptions(device="cpu", parallel=1, context=128, dtype="bf16"),
    ).runner
    answers = []
    for mode in ("off", 4):
        engine = Engine(runner, speculate=mode)
        requested = [
            engine.submit(
                Prompt(
                    [Span((5, 6, 7, 8) * 6)],
                    Sampler(Sampling(temperature=temperature, top_k=3, seed=1)),
                    max_tokens=60,
                )
            )
            for temperature in (0.0, 0.7)
        ]
        while engine.busy:
            engine.step()
        answers.append([sequence.tokens for sequence in requested])
    assert answers[0] == answers[1]
    assert sum(sequence.proposed for sequence in requested) > 0


@pytest.mark.parametrize(("row", "variant"), [c for c in CASES if ROWS[c[0]].vision])
def test_picture_rows_that_only_fill_up_change_nothing(
    build: Build, row: str, variant: str
) -> None:
    """A part of a picture beside a token of an answer: as it is, and as a cache that is read in
    place has it, by machine code and node by node.
    """
    model = Model(
        open_checkpoint(build(row, variant).folder),
        LoadOptions(device="cpu", parallel=2, context=128, dtype="fp32"),
    )
    for rows in (6, 16):  # filled up, and full
        filled_up(model.runner, rows)


def filled_up(runner: Runner, rows: int) -> None:
    cache = runner.new_cache()
    answering, reading = runner.begin(cache, 0), runner.begin(cache, 1)
    runner.prefill([Span(PROMPT[:9])], cache, answering)
    values = torch.randn(3, runner.family.image_width, generator=torch.Generator().manual_seed(1))
    picture = Span((9,) * 3, values, content=b"a picture")
    prompt = lay_out([Span((5, 6)), picture, Span(tuple(range(3, rows - 3)))], 0)[0]
    parts = [(answering, [Span((7,))]), (reading, prompt)]
    before = {name: t.clone() for name, t in cache.tensors.items()}
    result = {}
    for way in ("as it is", "in place", "node by node"):
        for name, tensor in before.items():
            cache.tensors[name].copy_(tensor)
        cache.in_place = way != "as it is"
        batch = make_batch(parts, cache)
        assert batch.shape.images == (3 if way == "as it is" else batch.shape.tokens)
        logits = runner.forward(batch, (lambda *_: None) if way == "node by node" else None)
        states = {name: written(name, t) for name, t in cache.tensors.items()}
        result[way] = {"logits": logits, **states}
    for way in ("in place", "node by node"):
        for name, value in result["as it is"].items():
            difference = (result[way][name].double() - value.double()).square().mean()
            assert difference <= 1e-9 * value.double().square().mean(), (way, name)


def written(name: str, states: torch.Tensor) -> torch.Tensor:
    """Without what rows that fill up write: page 0, and the slot behind the others."""
    return states[:, PAGE:].clone() if name.startswith("kv") else states[:-1].clone()
