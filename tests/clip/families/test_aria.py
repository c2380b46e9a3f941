"""Aria's eye: transformers' defaults, what cannot be followed, published names."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.aria import AriaVision
from mtmd.clip.family import vision_family
from mtmd.kernels.checkpoint.settings import Settings

VISION = {"image_size": 980, "patch_size": 14}


def read(
    image: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **vision: Any
) -> AriaVision:
    result = vision_family(
        "aria",
        Settings({"vision_config": VISION | vision, **(top or {})}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, AriaVision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AriaConfig
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil

    top, p, result = AriaConfig(), AriaImageProcessorPil(), read()
    c, vit, pictures = top.vision_config, result.vit, result.resolution
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.layer_norm_eps,
    )
    assert result.text_width == top.text_config.hidden_size
    assert (result.positions, result.queries, pictures.tokens) == (70, 256, 256)
    assert top.projector_patch_to_query_dict[70 * 70] == pictures.tokens
    assert (pictures.side, pictures.shortest) == (p.max_image_size, p.min_image_size)
    assert pictures.normalize.mean == tuple(p.image_mean)
    assert pictures.resample == "bicubic"


def test_queries_of_a_picture_are_the_first_of_the_table() -> None:
    result = read(top={"projector_patch_to_query_dict": {"4900": 64, "1225": 300}})
    assert (result.resolution.tokens, result.queries) == (64, 300)
    parameter = result.parameters()["mm.query"]
    assert parameter.shape == (300, 1152)
    assert "multi_modal_projector.query" in parameter.sources


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"num_channels": 1}, "vision_config: num_channels is 1, expected one of 3"),
        ({"num_attention_heads": 5}, "vision_config: 5 heads of width 1152"),
        ({"image_size": 9}, "image_size 9 is less than patch_size 14"),
        ({"patch_size": 16}, "projector_patch_to_query_dict has no queries for 3721 patches"),
        ({"top": {"vision_feature_layer": -2}}, "vision_feature_layer is -2, expected one of -1"),
        (
            {"top": {"projector_patch_to_query_dict": [1]}},
            r"is \[1\], expected a number of queries",
        ),
        (
            {"top": {"projector_patch_to_query_dict": {"4900": 1 << 20}}},
            "expected a number of queries from 1 to 4096",
        ),
        ({"image": {"min_image_size": 981}}, "edges of 981 to 980 pixels"),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)
