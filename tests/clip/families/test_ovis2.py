"""Ovis2's picture settings, and the grids of its tiles against the reference processor's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.ovis2.image_processing_pil_ovis2 import get_min_tile_covering_grid

from mtmd.base.errors import ModelError
from mtmd.clip.families.ovis2 import Ovis2Vision, read
from mtmd.kernels.checkpoint.settings import Settings

VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
    "hidden_stride": 2,
    "vocab_size": 40,
}
SIZE = {"height": 28, "width": 28}


def family(
    vision: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **image: Any
) -> Ovis2Vision:
    config = {"vision_config": VISION | (vision or {}), "text_config": {"hidden_size": 48}}
    settings = {"size": SIZE, "crop_to_patches": True} | image
    return read(
        Settings(config | (top or {}), "config.json"),
        Settings(settings, "preprocessor_config.json"),
    )


def test_grids_are_those_of_the_reference() -> None:
    way, rng = family().resolution, np.random.default_rng(0)
    found = set()
    for _ in range(300):
        height, width = (int(n) for n in rng.integers(1, 200, 2))
        maximum = int(rng.integers(1, 13))
        grid = way.grid((width, height), maximum)
        assert grid == get_min_tile_covering_grid((height, width), 28, maximum)
        found.add(grid)
    assert len(found) > 15


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "stride": ({"hidden_stride": 3}, {}, {}, "do not fit together"),
    "heads": ({"num_attention_heads": 3}, {}, {}, "do not fit together"),
    "function": ({"tokenize_function": "st_argmax"}, {}, {}, "tokenize_function"),
    "bias": ({"qkv_bias": True}, {}, {}, "qkv_bias"),
    "marks": ({}, {"visual_indicator_token_ids": [1]}, {}, "expected 5 tokens"),
    "ids": ({}, {"visual_indicator_token_ids": [1, 2, 3, 4, -5]}, {}, "no token's id"),
    "words": ({"vocab_size": 5}, {}, {}, "a visual vocabulary of 5"),
    "size": ({}, {}, {"size": {"height": 14, "width": 28}}, "14 x 28, expected 28 x 28"),
    "grid": ({}, {}, {"use_covering_area_grid": False}, "use_covering_area_grid"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_followed(case: str) -> None:
    vision, top, image, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        family(vision, top, **image)
