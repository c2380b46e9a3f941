"""Llama 4's tower: transformers' defaults, the text of a picture, settings that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import llama4
from mtmd.kernels.checkpoint.settings import Settings

# The published sizes; transformers' own defaults do not fit together.
PUBLISHED = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}


def read(vision: dict[str, Any] | None = None, **image: Any) -> llama4.Llama4Vision:
    values = {"vision_config": PUBLISHED | (vision or {}), "text_config": {"hidden_size": 5120}}
    return llama4.read(Settings(values, "config.json"), Settings(image, "preprocessor_config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig

    old, family = Llama4VisionConfig(), read()
    assert (family.vit.layers, family.vit.heads, family.vit.ffn, family.vit.eps) == (
        old.num_hidden_layers,
        old.num_attention_heads,
        old.intermediate_size,
        old.norm_eps,
    )
    assert (family.patch, 1 / family.factor, family.out) == (
        old.patch_size,
        old.pixel_shuffle_ratio,
        old.projector_output_dim,
    )
    assert (family.resolution.maximum, family.resolution.tile_tokens) == (16, 144)


def test_text_of_a_picture() -> None:
    family = read(
        {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28},
        size={"height": 28, "width": 28},
    )
    wide = family.resolution.prepare(np.zeros((28, 56, 3), np.uint8))
    one, across, down = "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
    assert family.prompt(wide) == (
        f"<|image_start|>{one}{across}{one}{down}<|image|>{one}<|image_end|>"
    )
    single = family.resolution.prepare(np.zeros((28, 28, 3), np.uint8))
    assert family.prompt(single) == f"<|image_start|><|image|>{one}<|image_end|>"


@pytest.mark.parametrize(
    ("vision", "reported"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'"),
        ({"pixel_shuffle_ratio": 0.3}, "do not fit together"),
        ({"image_size": 340}, "do not fit together"),
        ({"hidden_size": 1400}, "heads of width 1400; expected heads that divide"),
        ({"hidden_size": 1440}, "heads of 90, expected a multiple of 4"),
        ({"projector_input_dim": 64}, "projector_input_dim is 64, expected 4096"),
        ({"vision_output_dim": 64}, "vision_output_dim is 64, expected 4096"),
        ({"intermediate_size": 5000}, "intermediate_size is 5000, expected 5632"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
    ],
)
def test_settings_that_cannot_be_followed(vision: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(vision)
