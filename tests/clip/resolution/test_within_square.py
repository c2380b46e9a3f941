"""Sizes and pixels against Aria's image processor."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.resolution.within_square import WithinSquare, read_within_square
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

PATCH = 49


def way(shortest: int = 336, side: int = 490) -> WithinSquare:
    image = Settings({"min_image_size": shortest}, "preprocessor_config.json")
    return read_within_square(image, side, PATCH, 5)


@pytest.mark.parametrize("shortest", [1, 100, 336])
def test_pixels_are_those_of_the_reference(shortest: int) -> None:
    """Those of patches that see one of the picture; the others see nothing of it."""
    reference = AriaImageProcessorPil(max_image_size=490, min_image_size=shortest)
    rng = np.random.default_rng(shortest)
    for _ in range(12):
        height, width = rng.integers(2, 700, 2)
        picture = rng.integers(0, 256, (height, width, 3), np.uint8)
        made = reference(picture, return_tensors="np")
        plan = way(shortest).prepare(picture)
        (mask,) = made["pixel_mask"]
        rows, columns = (-(-int(mask.any(axis).sum()) // PATCH) * PATCH for axis in (1, 0))
        np.testing.assert_array_equal(plan.tiles[0], made["pixel_values"][0][:, :rows, :columns])
        assert plan.sizes == ((columns, rows),) and plan.tokens == 5


def test_a_budget_that_cannot_be_kept() -> None:
    with pytest.raises(OptionError, match="every picture takes 5 tokens"):
        way().prepare(np.zeros((50, 60, 3), np.uint8), Budget(None, 4))
    assert way().max_tokens() == 5


@pytest.mark.parametrize(("shortest", "side"), [(491, 490), (336, 500)])
def test_edges_that_do_not_fit(shortest: int, side: int) -> None:
    with pytest.raises(ModelError, match=f"edges of {shortest} to {side} pixels in patches of 49"):
        way(shortest, side)
