"""dots.ocr's eye: published settings, sizes against the reference processor, what cannot be
followed, names, what a GGUF says.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import dots_ocr
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.kernels.checkpoint.settings import Settings

PUBLISHED = {"patch_size": 14, "temporal_patch_size": 1, "merge_size": 2}


def read(image: dict[str, Any] | None = None, **vision: Any) -> dots_ocr.DotsVision:
    result = vision_family(
        "dots_ocr",
        Settings({"vision_config": vision}, "config.json"),
        Settings(PUBLISHED | (image or {}), "preprocessor_config.json"),
    )
    assert isinstance(result, dots_ocr.DotsVision)
    return result


def test_defaults_are_the_authors() -> None:
    result = read()
    assert (result.layers, result.width, result.ffn, result.heads) == (42, 1536, 4224, 12)
    assert (result.text_width, result.eps) == (1536, 1e-5)
    assert (result.resolution.minimum, result.resolution.maximum) == (3136, 11289600)
    parameters = sum(math.prod(p.shape) for p in result.parameters().values())
    assert 1.2e9 < parameters < 1.3e9  # "1.2B"


def test_sizes_are_those_of_the_reference_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng, compared = random.Random(0), 0
    for _ in range(500):
        minimum = rng.randint(1, 100_000)
        maximum = minimum + 784 + rng.randint(0, 250_000)
        way = read({"min_pixels": minimum, "max_pixels": maximum}).resolution
        height, width = (round(math.exp(rng.uniform(3, 8))) for _ in range(2))
        try:
            expected = smart_resize(height, width, 28, minimum, maximum)
        except ValueError:
            continue
        compared += 1
        assert way.size(height, width) == expected
    assert compared > 300


def test_tokens_of_a_picture_follow_one_another() -> None:
    plan = read().resolution.prepare(np.zeros((100, 60, 3), np.uint8))
    assert plan.tokens == 8 and not plan.grids


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"use_bias": True}, "vision_config: use_bias is True, expected one of False"),
        ({"post_norm": False}, "vision_config: post_norm is False, expected one of True"),
        ({"is_causal": True}, "vision_config: is_causal is True, expected one of False"),
        ({"temporal_patch_size": 2}, "vision_config: temporal_patch_size is 2, expected one of 1"),
        ({"num_attention_heads": 5}, "vision_config: 5 heads of width 1536"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
        ({"image": {"merge_size": 3}}, "preprocessor_config.json: merge_size is 3, expected 2"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    made = dots_ocr.to_gguf(family := read({"min_pixels": 4000, "max_pixels": 90000}))
    keys = {f"clip.{key}": value for key, value in made.keys.items()}
    normalize = family.resolution.normalize
    keys |= {
        "clip.vision.image_mean": [m / 255 for m in normalize.mean],
        "clip.vision.image_std": [s / 255 for s in normalize.std],
    }
    shapes = {name: p.shape for name, p in family.parameters().items()}
    back = gguf_vision_family("dots_ocr", keys, shapes, "file")
    assert back.parameters() == family.parameters()
    assert (back.resolution.minimum, back.resolution.maximum) == (4000, 90000)
