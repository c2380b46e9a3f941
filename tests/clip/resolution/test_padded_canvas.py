"""Tiles of a padded canvas: sizes and pixels against the reference processor, budgets, settings that
are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.resolution.padded_canvas import PaddedCanvas, read_padded_canvas
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE = 28
GIVEN = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6}


def canvas(**more: Any) -> PaddedCanvas:
    return read_padded_canvas(Settings({**GIVEN, **more}, "preprocessor_config.json"), SIDE, 4)


def sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    random = [tuple(int(edge) for edge in rng.integers(1, 200, 2)) for _ in range(60)]
    return [*random, (1, 1), (28, 28), (56, 28), (29, 28), (500, 3), (3, 500), (84, 56)]


@pytest.mark.parametrize("enlarged", [False, True])
def test_tiles_are_those_of_the_reference_processor(enlarged: bool) -> None:
    with torchvision_here():
        from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
    reference = Llama4ImageProcessor(
        size=GIVEN["size"], max_patches=6, resize_to_max_canvas=enlarged
    )
    rng, ours = np.random.default_rng(1), canvas(resize_to_max_canvas=enlarged)
    for width, height in sizes():
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        expected = reference(pixels, input_data_format="channels_last", return_tensors="pt")
        plan = ours.prepare(pixels)
        assert plan.cut == tuple(expected["aspect_ratios"][0].tolist()), (width, height)
        tiles = expected["pixel_values"].float().numpy()
        assert len(plan.tiles) == len(tiles) and plan.tokens == 4 * len(tiles)
        assert all(np.array_equal(a, b) for a, b in zip(plan.tiles, tiles, strict=True))


def test_a_budget_leaves_fewer_tiles() -> None:
    way, pixels = canvas(), np.zeros((28, 84, 3), np.uint8)
    assert way.prepare(pixels).tokens == 4 * 4 and way.max_tokens() == 7 * 4
    plan = way.prepare(pixels, Budget(max_tokens=15))
    assert (plan.cut, plan.tokens) == ((1, 2), 12)
    assert plan.notes == ("shown in 12 tokens, 16 without limits of its own",)
    assert way.prepare(pixels, Budget(max_tokens=4)).cut == (1, 1)
    with pytest.raises(OptionError, match="a picture takes at least 4 tokens"):
        way.prepare(pixels, Budget(max_tokens=3))
    assert replace(way, maximum=1).max_tokens() == 4


@pytest.mark.parametrize(
    ("more", "reported"),
    [
        ({"size": {"height": 28, "width": 30}}, "expected height and width 28 as"),
        ({"max_patches": 65}, "max_patches is 65, expected an integer from 1 to 64"),
        ({"resample": 0}, "resample is 0, expected one of"),
        ({"do_resize": False}, "do_resize false is not supported"),
    ],
)
def test_settings_that_cannot_be_followed(more: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        canvas(**more)
