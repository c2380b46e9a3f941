"""Pictures in their own size with zeros around: the reference's sizes and pixels, budgets, settings,
and what no picture has more of.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError
from mtmd.clip.resolution.padded_up import PaddedResolution, read_padded
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings


def read(patches: int = 60, side: int = 512, tensor: bool = True, **image: Any) -> PaddedResolution:
    settings = Settings(image, "preprocessor_config.json")
    return read_padded(settings, 6, 2, patches, side, by_tensor=tensor)


def test_sizes_are_those_of_the_reference() -> None:
    with torchvision_here():
        from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    rng = random.Random(0)
    for _ in range(3000):
        patches, side = rng.choice((7, 60, 900, 4096)), rng.choice((9, 64, 512))
        height, width = (int(10 ** rng.uniform(0, 3.7)) for _ in range(2))
        scaled, padded = navit_resize(height, width, 6, 2, patches, side)
        pictures = read(patches, side)
        assert pictures.size(height, width) == scaled, (height, width, patches, side)
        tokens = padded[0] // 12 * (padded[1] // 12)
        assert tokens <= pictures.max_tokens(), (height, width, patches, side)
        few = pictures.prepare(np.zeros((height, width, 3), np.uint8), Budget(max_tokens=5))
        assert 1 <= few.tokens <= 5


def test_the_largest_picture_is_nearly_reached() -> None:
    """Of 8 whole patches and a little more, 511 and a little more there are 5 x 256 tokens."""
    pictures = read(4096)
    plan = pictures.prepare(np.zeros((8 * 6 + 1, 512 * 6 - 1, 3), np.uint8))
    assert plan.tokens == 5 * 256
    assert plan.tokens <= pictures.max_tokens() <= plan.tokens * 1.1
    _, height, width = pictures.largest_tile_type().shape
    assert height * width // 144 == pictures.max_tokens()


def test_zeros_are_right_and_below() -> None:
    pixels = np.full((7, 20, 3), 255, np.uint8)
    plan = read(tensor=False).prepare(pixels)
    (tile,) = plan.tiles
    assert (plan.tokens, plan.sizes, tile.shape) == (2, ((24, 12),), (3, 12, 24))
    assert (tile[:, :7, :20] == 1).all()
    assert (tile[:, 7:] == -1).all() and (tile[:, :, 20:] == -1).all()


def test_budgets() -> None:
    pictures, pixels = read(), np.zeros((40, 60, 3), np.uint8)
    own = pictures.prepare(pixels)
    few, many = (pictures.prepare(pixels, b) for b in (Budget(max_tokens=6), Budget(min_tokens=30)))
    assert own.tokens == 20 and not own.notes
    assert few.tokens == 6 and "by the image budget" in few.notes[0]
    assert 30 <= many.tokens <= pictures.max_tokens(Budget(min_tokens=30))


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"do_resize": False}, "do_resize false is not supported"),
        ({"resample": 0}, "resample is 0, expected one of 3"),
        ({"image_std": [0, 1, 1]}, "expected 3 numbers above 0"),
        ({"patches": 1 << 30}, "limit is 1073741824"),
        ({"side": 0}, "side is 0"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)
