"""HunyuanOCR's eye: transformers' defaults, tokens of pictures within budgets, what cannot be
followed, what a GGUF says.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError, OptionError
from mtmd.clip.families import hunyuan_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings


def read(image: dict[str, Any] | None = None, **vision: Any) -> hunyuan_vl.HunyuanVision:
    result = vision_family(
        "hunyuan_vl",
        Settings({"vision_config": vision}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, hunyuan_vl.HunyuanVision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    with torchvision_here():
        from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
            HunYuanVLImageProcessorPil,
        )
    from transformers.models.hunyuan_vl.configuration_hunyuan_vl import (
        HunYuanVLTextConfig,
        HunYuanVLVisionConfig,
    )

    c, p, result = HunYuanVLVisionConfig(), HunYuanVLImageProcessorPil(), read()
    vit, pictures = result.vit, result.resolution
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.rms_norm_eps,
    )
    assert (result.side, result.text_width) == (
        c.max_image_size // c.patch_size,
        HunYuanVLTextConfig().hidden_size,
    )
    assert (pictures.patch, pictures.minimum, pictures.maximum) == (
        p.patch_size,
        p.size["shortest_edge"],
        p.size["longest_edge"],
    )
    assert read({"resample": 1}).resolution.resample == "bicubic"


def test_tokens_keep_to_budgets() -> None:
    way, rng = read({"min_pixels": 4 * 1024, "max_pixels": 60 * 1024}).resolution, random.Random(0)
    for _ in range(300):
        width, height = rng.randint(8, 900), rng.randint(8, 900)
        maximum = rng.randint(6, 120)
        pixels = np.zeros((height, width, 3), np.uint8)
        plan = way.prepare(pixels)
        assert plan.tokens == sum(rows * columns for rows, columns in plan.grids)
        assert plan.tokens <= way.max_tokens() and plan.located
        assert way.prepare(pixels, Budget(max_tokens=maximum)).tokens <= maximum
    with pytest.raises(OptionError, match="a picture takes at least 4 tokens with this model, mo"):
        way.prepare(pixels, Budget(max_tokens=3))


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        (
            {"interpolate_mode": "bicubic"},
            "interpolate_mode is 'bicubic', expected one of bilinear",
        ),
        ({"temporal_patch_size": 2}, "vision_config: temporal_patch_size is 2, expected one of 1"),
        ({"num_attention_heads": 5}, "vision_config: 5 heads of width 1152"),
        ({"image": {"merge_size": 3}}, "preprocessor_config.json: merge_size is 3, expected 2"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    made = hunyuan_vl.to_gguf(family := read())
    keys = {f"clip.{key}": value for key, value in made.keys.items()}
    normalize = family.resolution.normalize
    keys |= {
        "clip.vision.image_mean": list(normalize.mean),
        "clip.vision.image_std": list(normalize.std),
    }
    shapes = {name: p.shape for name, p in family.parameters().items()}
    assert gguf_vision_family("hunyuanvl", keys, shapes, "file") == family
