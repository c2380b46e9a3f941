"""Batches foreseen: what any other batch would launch is among what they do. On a GPU that is not
here; nothing is run or compiled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Hashable
from pathlib import Path
from unittest.mock import patch

import pytest
import test_engine as small

from mtmd.finding import find_checkpoint
from mtmd.inspect.predict_target import subject_of
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import Target
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.programs import Programs
from mtmd.llm.batch import FEW, BatchShape
from mtmd.llm.batch_shapes import FORESEEN, few_rows, foreseen_batches
from mtmd.llm.engine.runner import PLANS
from mtmd.loaded.programs import decoder_plans
from mtmd.model import Model
from mtmd.options.load import LoadOptions

SHAPES = ("gemma-3-4b", "qwen3-vl-2b", "qwen3-next-80b-a3b", "lfm2-vl-450m", "glm-4.1v-9b")
SHAPES += ("llama-3.2-1b", "qwen2.5-vl-3b", "qwen3-30b-a3b")


@pytest.fixture(scope="module")
def model() -> Model:
    settings = LoadOptions(parallel=6, context=1024)
    checkpoint, name = find_checkpoint("demo", settings)
    return Model(checkpoint, settings, [Target("cuda:90"), Cpu(), Reference()], name=name)


def test_batches_that_come_launch_no_other_programs(model: Model) -> None:
    runner, chance = model.runner, random.Random(0)
    foreseen = Programs().add_all(decoder_plans(runner, foreseen_batches(runner))).result
    assert len(foreseen) > 8
    for _ in range(20):
        count = chance.randint(1, runner.sequences)
        tokens = max(count, chance.choice((1, 4, 17, 64, 200, 512)) - chance.randint(0, 3))
        verified = chance.random() < 0.2
        batch = BatchShape(
            tokens,
            images=chance.choice((0, 0, min(tokens, runner.image_tokens))),
            requested=tokens if verified and tokens <= 64 else count,
            sequences=count,
        ).rounded(False, runner.pages)
        other = Programs().add_all([runner.new_plan(batch)]).result
        assert set(other) <= set(foreseen), batch


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_of_each_kind_launches_what_all_do(name: str) -> None:
    """Published shapes: sliding windows, experts, delta nets, convolutions, features of pictures
    added to some layers.
    """
    runner = subject_of("cuda:90", None, name).runner
    foreseen = foreseen_batches(runner)
    batches = random.Random(name).sample(foreseen, 2) + foreseen[-1:]
    for few, batch in zip(decoder_plans(runner, batches), batches, strict=True):
        whole = runner.new_plan(batch)
        assert programs_of(few) == programs_of(whole), batch
        assert few.nodes < whole.nodes / 3


OWN_INPUTS = {  # each layer reads columns of its own of what comes before the first
    "gemma3n_text": {"num_hidden_layers": 15, "num_kv_shared_layers": 5},
    "gemma4_text": {"num_hidden_layers": 15, "num_kv_shared_layers": 5, "hidden_size": 512},
}


@pytest.mark.parametrize("kind", OWN_INPUTS)
def test_layers_with_inputs_of_their_own_are_of_few_kinds(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, "vocab_size": 1024, "vocab_size_per_layer_input": 1024}
    config |= {"intermediate_size": 1024, **OWN_INPUTS[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = subject_of("cuda:90", None, str(tmp_path)).runner
    batches = [BatchShape(count, requested=1, sequences=1, pages=4) for count in (1, 300)]
    for few, batch in zip(decoder_plans(runner, batches), batches, strict=True):
        whole = runner.new_plan(batch)
        assert programs_of(few) == programs_of(whole), batch
        assert few.nodes < whole.nodes * 0.55


def test_rows_that_are_wanted_change_what_is_behind_the_layers_alone() -> None:
    """So a batch that differs by them alone is planned with one layer."""
    runner = subject_of("cuda:90", None, "qwen3-next-80b-a3b").runner
    pair = [BatchShape(18, requested=count, sequences=1, pages=4) for count in (1, 18)]
    first, second = decoder_plans(runner, pair)
    whole = Programs().add_all(map(runner.new_plan, pair)).result
    assert set(Programs().add_all([first, second]).result) == set(whole)
    assert second.nodes < first.nodes


def test_a_start_looks_at_few_nodes() -> None:
    """In place of those of 36 layers for each of a hundred batches."""
    runner = subject_of("cuda:90", None, "qwen3-vl-8b").runner
    batches = foreseen_batches(runner)
    looked_at = sum(plan.nodes for plan in decoder_plans(runner, batches))
    assert looked_at < len(batches) * runner.new_plan(batches[0]).nodes / 12


def programs_of(plan: Plan) -> set[Hashable]:
    return set(Programs().add_all([plan]).result)


def test_there_are_few_of_them(model: Model) -> None:
    batches = foreseen_batches(model.runner)
    assert len(set(batches)) == len(batches) < 160
    assert {b.pages for b in batches} == {model.runner.pages}, "of a table there is one size"
    assert {b.tokens for b in batches if b.tokens == b.sequences} >= set(range(1, 7))


def test_small_batches_of_those_who_wait_are_foreseen() -> None:
    subject = small.engine(sequences=4, context=128)
    foreseen = set(few_rows(subject.runner, subject.cache))
    assert foreseen and len(foreseen) <= FORESEEN < PLANS
    met, prepare, chance = set[BatchShape](), subject.runner.prepare, random.Random(1)

    def prepared(batch: BatchShape) -> None:
        met.add(batch)
        prepare(batch)

    with patch.object(subject.runner, "prepare", prepared):
        for number in range(30):
            subject.submit(
                small.request(chance.randint(2, 60), 5 + number % 9, chance.randint(1, 12))
            )
            for _ in range(chance.randint(0, 6)):
                subject.step()
        small.run(subject)
    few = {b for b in met if b.tokens <= FEW and b.requested}
    assert few and few <= foreseen


@pytest.mark.parametrize("sequences", [1, 4, 6])
@pytest.mark.parametrize("image_tokens", [0, 9])
def test_every_small_batch_in_which_somebody_waits_is_foreseen(
    sequences: int, image_tokens: int
) -> None:
    subject = small.engine(sequences=sequences, context=128)
    runner = subject.runner
    runner._image_tokens, whole = image_tokens, runner.pages_for(runner.context)
    foreseen, answers = few_rows(runner, subject.cache), few_rows(runner, subject.cache, False)
    assert len(set(foreseen)) == len(foreseen) <= FORESEEN < PLANS
    assert foreseen[: len(answers)] == answers and foreseen[0] == BatchShape(1).rounded(True)
    for tokens in range(1, FEW + 1):
        for count in range(1, min(tokens, sequences) + 1):
            for pages in range(1, count * whole + 1):
                for images in range(min(image_tokens, tokens) + 1):
                    batch = BatchShape(tokens, images, count, count, pages)
                    assert batch.rounded(True) in answers, batch
                proposed = BatchShape(tokens, 0, tokens, count, pages)
                assert proposed.rounded(True) in foreseen, proposed


def test_none_are_foreseen_where_pages_are_gathered() -> None:
    subject = small.engine()
    subject.cache.in_place = False
    assert not list(few_rows(subject.runner, subject.cache))
