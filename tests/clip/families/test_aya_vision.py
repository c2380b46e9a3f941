"""What is special to Aya Vision: the prompt, tiles against the reference processor, settings,
tensor names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import aya_vision
from mtmd.clip.families.aya_vision import AyaVision
from mtmd.kernels.checkpoint.settings import Settings

SIDE = {"size": {"height": 224, "width": 224}}


def read(
    top: dict[str, Any] | None = None, image: dict[str, Any] | None = None, **vision: Any
) -> AyaVision:
    config = {"vision_config": vision, "text_config": {"hidden_size": 32}} | (top or {})
    return aya_vision.read(
        Settings(config, "config.json"), Settings(SIDE | (image or {}), "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import AyaVisionConfig, Cohere2Config, SiglipVisionConfig

    tower, whole = SiglipVisionConfig(), AyaVisionConfig()
    result = aya_vision.read(
        Settings({}, "config.json"), Settings(SIDE, "preprocessor_config.json")
    )
    assert (
        result.vit.layers,
        result.vit.width,
        result.vit.ffn,
        result.vit.heads,
        result.vit.eps,
        result.patch,
        result.resolution.tile,
    ) == (
        tower.num_hidden_layers,
        tower.hidden_size,
        tower.intermediate_size,
        tower.num_attention_heads,
        tower.layer_norm_eps,
        tower.patch_size,
        tower.image_size,
    )
    assert (result.factor, result.inner_eps) == (
        whole.downsample_factor,
        whole.adapter_layer_norm_eps,
    )
    assert result.inner == result.text_width == Cohere2Config().hidden_size
    assert (tower.hidden_act, result.vit.gelu) == ("gelu_pytorch_tanh", "tanh")


@pytest.mark.parametrize("size", [(224, 224), (900, 300), (300, 900), (1, 700), (640, 480)])
@pytest.mark.parametrize("maximum", [1, 2, 12])
def test_prompts_and_tiles_are_the_reference_s(size: tuple[int, int], maximum: int) -> None:
    """Tiles are numbered from 1, the whole comes last, and a picture of one tile is the whole."""
    from transformers import AyaVisionProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    family = read(image={"max_patches": maximum})
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    plan = family.resolution.prepare(pixels)
    images = GotOcr2ImageProcessorPil(**SIDE, max_patches=maximum, crop_to_patches=True)
    expected = images(pixels, return_tensors="np")
    np.testing.assert_array_equal(np.stack(plan.tiles), expected["pixel_values"])

    class Stated(AyaVisionProcessor):  # type: ignore[misc]
        """Without a tokenizer, which the text in place of a picture does not need."""

        def __init__(self) -> None:
            self.img_size, self.patch_size = 224, 32
            self.start_of_img_token, self.end_of_img_token = "<|START_OF_IMG|>", "<|END_OF_IMG|>"
            self.img_patch_token = "<|IMG_PATCH|>"
            self.tile_token, self.tile_global_token = "TILE", "TILE_GLOBAL"

    assert family.prompt(plan) == Stated().replace_image_token(expected, 0)
    assert family.prompt(plan).count(family.image_token) == plan.tokens


def test_command_a_vision_has_sizes_of_its_own() -> None:
    from transformers import Cohere2VisionConfig

    theirs = Cohere2VisionConfig()
    tower = theirs.vision_config
    result = aya_vision.read(
        Settings({"model_type": "cohere2_vision"}, "config.json"),
        Settings({}, "preprocessor_config.json"),
    )
    vit = result.vit
    assert (vit.layers, vit.width, vit.ffn, vit.heads) == (
        tower.num_hidden_layers,
        tower.hidden_size,
        tower.intermediate_size,
        tower.num_attention_heads,
    )
    assert (result.resolution.tile, result.inner, result.inner_eps) == (
        tower.image_size,
        theirs.alignment_intermediate_size,
        None,
    )
    assert "v.post_ln.weight" in result.parameters() and result.marker == result.image_token


def test_published_names() -> None:
    result = read(num_hidden_layers=1, top={"alignment_intermediate_size": 40}).parameters()
    at = "vision_tower.vision_model.encoder.layers.0"
    assert result["v.blk.0.attn_out.weight"].sources[0] == f"{at}.self_attn.out_proj.weight"
    assert result["mm.model.mlp.1.weight"].sources[0] == "multi_modal_projector.linear_1.weight"
    assert (result["mm.model.mlp.1.weight"].shape, result["mm.model.mlp.3.weight"].shape) == (
        (40, 4 * 768),
        (32, 20),
    )
    assert not any("post_ln" in name for name in result)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tower": (
        {"model_type": "clip_vision_model"},
        {},
        "vision_config: model_type is 'clip_vision_model', expected one of siglip_vision_model",
    ),
    "channels": ({"num_channels": 1}, {}, "vision_config: num_channels is 1, expected one of 3"),
    "patch": (
        {"patch_size": 225},
        {},
        "image_size 224, patch_size 225, downsample_factor 2 and alignment_intermediate_size 32 do "
        "not fit together",
    ),
    "groups": ({}, {"downsample_factor": 3}, ".* downsample_factor 3 .* do not fit together"),
    "odd": (
        {},
        {"alignment_intermediate_size": 33},
        ".* alignment_intermediate_size 33 do not fit together",
    ),
    "layer": ({}, {"vision_feature_layer": -2}, "vision_feature_layer is -2, expected one of -1"),
    "layers": (
        {},
        {"vision_feature_layer": [-1, -2]},
        r"vision_feature_layer is \[-1, -2\], expected one of -1",
    ),
    "strategy": (
        {},
        {"vision_feature_select_strategy": "default"},
        "vision_feature_select_strategy is 'default', expected one of full",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    vision, top, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(top, **vision)
