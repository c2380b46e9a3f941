"""Sizes and quarters against Idefics2's image processor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

from mtmd.clip.resolution.quarters import Quartered, read_quartered
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

PATCH = 7


def way(splits: bool) -> Quartered:
    image = {"size": {"shortest_edge": 30, "longest_edge": 64}, "do_image_splitting": splits}
    return read_quartered(Settings(image, "preprocessor_config.json"), PATCH, 5)


@pytest.mark.parametrize("splits", [False, True])
def test_pixels_are_those_of_the_reference(splits: bool) -> None:
    reference = Idefics2ImageProcessorPil(
        size={"shortest_edge": 30, "longest_edge": 64}, do_image_splitting=splits
    )
    rng = np.random.default_rng(0)
    for _ in range(40):
        height, width = rng.integers(2, 200, 2)
        picture = rng.integers(0, 256, (height, width, 3), np.uint8)
        made = reference(picture, return_tensors="np")
        plan = way(splits).prepare(picture)
        assert plan.tokens == 5 * len(plan.tiles) == (25 if splits else 5)
        expected = zip(made["pixel_values"][0], made["pixel_attention_mask"][0], strict=True)
        for tile, (pixels, mask) in zip(plan.tiles, expected, strict=True):
            rows, columns = (int(mask.any(axis).sum()) // PATCH * PATCH for axis in (1, 0))
            np.testing.assert_array_equal(tile, pixels[:, :rows, :columns])


def test_a_budget_leaves_the_quarters_out() -> None:
    picture = np.zeros((50, 60, 3), np.uint8)
    assert way(True).prepare(picture, Budget(None, 10)).tokens == 5
    assert way(True).max_tokens() == 25 and way(True).max_tokens(Budget(None, 10)) == 10
