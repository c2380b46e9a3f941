"""Programs of an encoder, foreseen from one layer of each kind. Nothing is run or compiled."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from mtmd.clip.batch_shapes import foreseen_packs, foreseen_tiles
from mtmd.clip.token_budget import Budget
from mtmd.inspect.predict_target import subject_of
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.programs import Programs
from mtmd.loaded.programs import encoder_plans, foreseen_programs

# Features of some layers beside the last, windows, grids and packs of any size, one size
SHAPES = ("qwen3-vl-2b", "qwen2.5-vl-3b", "pixtral-12b", "lfm2-vl-450m", "gemma-3-4b")


def programs_of(plan: Plan) -> set[Hashable]:
    return set(Programs().add_all([plan]).result)


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_of_each_kind_launches_what_all_do(name: str) -> None:
    encoder = subject_of("cuda:90", None, name).encoder
    assert encoder is not None
    tiles = random.Random(name).sample(foreseen_tiles(encoder, Budget()), 2)
    packs = foreseen_packs(encoder)[-1:]
    whole = [*(encoder.new_plan(*one) for one in tiles), *map(encoder.pack_plan, packs)]
    for few, expected in zip(encoder_plans(encoder, tiles, packs), whole, strict=True):
        assert programs_of(few) == programs_of(expected)
        assert few.nodes < expected.nodes / 3


def test_nothing_is_kept_of_what_is_foreseen() -> None:
    """No plan is made to be run but those that a start needs anyway."""
    model = subject_of("cuda:90", None, "qwen3-vl-2b")
    encoder, runner = model.encoder, model.runner
    assert encoder is not None and runner.reads_pages and encoder.why_no_packs is None

    def made() -> tuple[int, int, int]:
        caches = encoder._plan.cache_info(), encoder._pack_plan.cache_info()
        return runner._plan.begun, *(cache.misses for cache in caches)

    before = made()
    assert len(foreseen_programs(encoder, runner, Budget())) > 20 and made() == before
