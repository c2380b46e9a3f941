"""Pictures on one square: sizes and pixels against the reference processor, settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.resolution.letterbox import Letterbox, read_letterbox
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

SIDE = 42


def letterbox(**image: Any) -> Letterbox:
    return read_letterbox(Settings(image, "preprocessor_config.json"), SIDE, 9)


def test_pictures_are_those_of_the_reference() -> None:
    from PIL import Image
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.1, 0.5, 0.9]}
    rng = np.random.default_rng(3)
    for smallest in (1, 14):
        theirs, ours = (
            JanusImageProcessorPil(**settings, min_size=smallest),
            letterbox(**settings, min_size=smallest),
        )
        sizes = [(1, 1), (42, 42), (41, 42), (500, 2), (2, 90), *rng.integers(1, 150, (20, 2))]
        for width, height in sizes:
            pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
            expected = theirs(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
            np.testing.assert_array_equal(ours.prepare(pixels).tiles[0], expected)


def test_budgets_are_kept_or_refused() -> None:
    pixels = np.zeros((4, 9, 3), np.uint8)
    assert letterbox().prepare(pixels).tokens == letterbox().max_tokens() == 9
    with pytest.raises(OptionError, match="9 tokens"):
        letterbox().prepare(pixels, Budget(max_tokens=8))


@pytest.mark.parametrize(
    ("image", "reported"),
    [
        ({"do_pad": False}, "do_pad is False, expected one of True"),
        ({"size": {"height": 40}}, "size: height is 40, expected one of 42"),
        ({"min_size": 43}, "min_size is 43, expected at most 42"),
    ],
)
def test_settings_that_cannot_be_followed(image: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        letterbox(**image)
