"""Batches foreseen: what any other batch would launch is among what they do. On a GPU that is not
here; nothing is run or compiled.
"""

from __future__ import annotations

import random

import pytest

from mtmd.config import LoadOptions
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.report.programs import Programs
from mtmd.llm.batch import BatchShape
from mtmd.llm.foreseen import foreseen_batches
from mtmd.loading import find_checkpoint
from mtmd.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    settings = LoadOptions(parallel=6, context=1024)
    checkpoint, name = find_checkpoint("demo", settings)
    return Model(checkpoint, settings, [Target("cuda:90"), Cpu(), Reference()], name=name)


def test_batches_that_come_launch_no_other_programs(model: Model) -> None:
    runner, chance = model.runner, random.Random(0)
    foreseen = Programs().add_all(runner.new_plan(b) for b in foreseen_batches(runner)).found
    assert len(foreseen) > 8
    for _ in range(20):
        count = chance.randint(1, runner.sequences)
        tokens = max(count, chance.choice((1, 4, 17, 64, 200, 512)) - chance.randint(0, 3))
        verified = chance.random() < 0.2
        batch = BatchShape(
            tokens,
            images=chance.choice((0, 0, min(tokens, runner.image_tokens))),
            wanted=tokens if verified and tokens <= 64 else count,
            sequences=count,
        ).rounded(False, runner.pages)
        other = Programs().add_all([runner.new_plan(batch)]).found
        assert set(other) <= set(foreseen), batch


def test_there_are_few_of_them(model: Model) -> None:
    batches = foreseen_batches(model.runner)
    assert len(set(batches)) == len(batches) < 160
    assert {b.pages for b in batches} == {model.runner.pages}, "of a table there is one size"
    assert {b.tokens for b in batches if b.tokens == b.sequences} >= set(range(1, 7))
