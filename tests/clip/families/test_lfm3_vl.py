"""LFM3-VL's eye: transformers' defaults, and what cannot be followed."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import lfm3_vl
from mtmd.clip.family import gguf_of, vision_family
from mtmd.clip.packing import Packs
from mtmd.clip.resolution.resolution import prepare_blank
from mtmd.kernels.checkpoint.settings import Settings


def read(
    vision: dict[str, Any] | None = None, image: dict[str, Any] | None = None, **top: Any
) -> lfm3_vl.Lfm3Vision:
    result = vision_family(
        "lfm3_vl",
        Settings({"vision_config": vision or {}, **top}, "config.json"),
        Settings({"patch_size": 16} | (image or {}), "preprocessor_config.json"),
    )
    assert isinstance(result, lfm3_vl.Lfm3Vision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Lfm3VlConfig

    config, result = Lfm3VlConfig(), read()
    c = config.vision_config
    assert (result.width, result.ffn, len(result.kinds)) == (
        c.hidden_size,
        c.intermediate_size,
        c.num_hidden_layers,
    )
    assert (result.heads, result.groups, result.kernel, result.eps) == (
        c.num_attention_heads,
        c.num_key_value_heads,
        c.conv_kernel_size,
        c.norm_eps,
    )
    assert list(result.kinds) == c.layer_types
    assert (result.inner, result.bias) == (config.projector_hidden_size, config.projector_bias)
    assert result.rotary.frequencies[:2] == pytest.approx((1.0, 1e6 ** (-1 / 16)))


def test_positions_are_those_of_text() -> None:
    result = read()
    plan = prepare_blank(result.resolution, 320, 64)
    assert plan.tokens == 20 and not plan.grids
    assert not isinstance(result, Packs)  # a convolution sees across a pack's pictures


@pytest.mark.parametrize(
    ("vision", "image", "top", "words"),
    [
        ({"temporal_patch_size": 1}, {}, {}, "temporal_patch_size is 1, expected one of 2"),
        ({"in_channels": 1}, {}, {}, "in_channels is 1"),
        ({"num_key_value_heads": 5}, {}, {}, "16 heads in 5 groups"),
        ({"conv_kernel_size": 4}, {}, {}, "conv_kernel_size 4, expected"),
        ({"conv_kernel_size": 101}, {}, {}, "conv_kernel_size is 101"),
        ({"num_attention_heads": 24}, {}, {}, "24 heads of width 1024"),
        ({"layer_types": ["conv"]}, {}, {}, "layer_types has to name 14 layers"),
        ({"layer_types": ["mamba"] * 14}, {}, {}, "each conv or full_attention"),
        ({"num_hidden_layers": 10**9}, {}, {}, "num_hidden_layers is 1000000000"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, {}, "rope_type is 'yarn'"),
        ({}, {"patch_size": 14}, {}, "patch_size is 14, expected 16"),
        ({}, {}, {"projector_hidden_act": "relu"}, "projector_hidden_act"),
    ],
)
def test_settings_that_cannot_be_followed(vision, image, top, words) -> None:
    with pytest.raises(ModelError, match=words):
        read(vision, image, **top)


def test_no_gguf_holds_it() -> None:
    with pytest.raises(ModelError, match="no GGUF holds its image encoder"):
        gguf_of(read(), "here")
