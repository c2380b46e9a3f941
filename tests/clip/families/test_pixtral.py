"""What is special to Pixtral and Mistral Small 3.1: break tokens, rotary positions, settings,
tensor names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families.pixtral import PixtralVision, from_gguf
from mtmd.clip.families.pixtral import read as read_settings
from mtmd.clip.family import vision_family
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.settings import Settings

TEXT = {"hidden_size": 32, "rms_norm_eps": 1e-5}


def read(
    kind: str = "mistral3",
    vision: dict[str, Any] | None = None,
    image: dict[str, Any] | None = None,
    **top: Any,
) -> PixtralVision:
    more = (
        {}
        if kind == "mistral3"
        else {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    )
    config = {
        "model_type": kind,
        "vision_config": {"model_type": "pixtral", **(vision or {})},
        "text_config": TEXT,
        **more,
        **top,
    }
    result = vision_family(
        kind, Settings(config, "config.json"), Settings(image or {}, "preprocessor_config.json")
    )
    assert isinstance(result, PixtralVision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LlavaConfig, Mistral3Config
    from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig

    new, result = PixtralVisionConfig(), read()
    assert (result.layers, result.width, result.ffn, result.heads, result.patch) == (
        new.num_hidden_layers,
        new.hidden_size,
        new.intermediate_size,
        new.num_attention_heads,
        new.patch_size,
    )
    assert (new.hidden_act, result.act) == ("gelu", "none")
    both = Mistral3Config(), LlavaConfig()
    assert (
        [c.multimodal_projector_bias for c in both]
        == [read(kind).bias for kind in ("mistral3", "llava")]
        == [False, True]
    )
    assert (
        both[0].spatial_merge_size == result.merge
        and result.resolution.factor == result.merge * result.patch
    )
    assert (read("llava").merge, read("llava").resolution.factor) == (None, 16)
    for config, kind in zip(both, ("mistral3", "llava"), strict=True):
        assert config.projector_hidden_act == "gelu" and read(kind).gelu == "none"


def test_each_row_ends_in_a_token_of_its_own() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    family = read(vision={"patch_size": 14})
    plan = family.resolution.prepare(np.zeros((60, 100, 3), np.uint8))
    assert (
        family.prompt(plan)
        == "[IMG][IMG][IMG][IMG][IMG_BREAK]" * 2 + "[IMG][IMG][IMG][IMG][IMG_END]"
    )
    assert (plan.tokens, plan.sizes, plan.grids, plan.order) == (12, ((112, 84),), (), None)
    assert PixtralImageProcessorPil().size["longest_edge"] == read().resolution.longest


def test_angles_are_those_of_the_reference() -> None:
    """Side by side in our layout, half a head apart in the reference's; every angle turns one
    pair.
    """
    from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding

    sizes = {
        "hidden_size": 48,
        "num_attention_heads": 2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
    }
    positions = torch.cartesian_prod(torch.arange(5), torch.arange(7))  # [P, 2]
    cos, sin = PixtralVisionRotaryEmbedding(PixtralVisionConfig(**sizes))(torch.zeros(1), positions)
    published = {key: value for key, value in sizes.items() if key != "rope_parameters"} | {
        "rope_theta": 300.0
    }
    for vision in (sizes, published):
        table = ops.OPS["rope_table"].reference(positions.t(), rotary=read(vision=vision).rotary)
        assert torch.equal(table.repeat(1, 1, 2), torch.stack((cos, sin), 1))


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "activation": (
        "mistral3",
        {"hidden_act": "relu"},
        {},
        "vision_config: hidden_act is 'relu', expected one of silu, ",
    ),
    "rope": (
        "mistral3",
        {"rope_parameters": {"rope_type": "yarn"}},
        {},
        "vision_config: rope_parameters: rope_type is 'yarn', expected one of axial",
    ),
    "heads": (
        "mistral3",
        {"hidden_size": 60, "num_attention_heads": 2},
        {},
        "vision_config: 2 heads of width 60; expected .* each of a multiple of 4",
    ),
    "uneven heads": (
        "mistral3",
        {"hidden_size": 50, "num_attention_heads": 3},
        {},
        "vision_config: 3 heads of width 50; expected heads ",
    ),
    "channels": (
        "mistral3",
        {"num_channels": 1},
        {},
        "vision_config: num_channels is 1, expected one of 3",
    ),
    "layer": (
        "mistral3",
        {},
        {"vision_feature_layer": -2},
        "vision_feature_layer is -2, expected one of -1",
    ),
    "layers": (
        "mistral3",
        {},
        {"vision_feature_layer": [-1, -2]},
        r"vision_feature_layer is \[-1, -2\], expected one of -1",
    ),
    "a default": (
        "llava",
        {},
        {"vision_feature_layer": None},
        "vision_feature_layer is -2, expected one of -1",
    ),
    "strategy": (
        "llava",
        {},
        {"vision_feature_select_strategy": "default"},
        "vision_feature_select_strategy is 'default', expected one of full",
    ),
    "projection": (
        "mistral3",
        {},
        {"projector_hidden_act": "silu"},
        "projector_hidden_act is 'silu', expected one of gelu_pytorch_tanh, ",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    kind, vision, top, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(kind, vision, **top)


def test_llava_with_another_tower_is_another_family() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert not isinstance(
        vision_family(
            "llava", Settings(config, "config.json"), Settings({}, "preprocessor_config.json")
        ),
        PixtralVision,
    )


def test_tensor_names() -> None:
    """As published, and with a prefix as other checkpoints of transformers have; both families'
    projectors.
    """
    merged, plain = (
        read(vision={"num_hidden_layers": 1}).parameters(),
        read("llava", {"num_hidden_layers": 1}).parameters(),
    )
    assert merged["v.blk.0.ffn_gate.weight"].sources == tuple(
        f"{prefix}.transformer.layers.0.feed_forward.gate_proj.weight"
        for prefix in (
            *("vision_tower", "model.vision_tower", "vision_encoder", "model.vision_encoder"),
            "vision_tower.vision_model",  # mlx-vlm's
        )
    )
    assert set(plain) - set(merged) == {"mm.1.bias", "mm.2.bias"}
    assert set(merged) - set(plain) == {"mm.input_norm.weight", "mm.patch_merger.weight"}
    assert merged["mm.patch_merger.weight"].shape == (1024, 4096)


def test_gguf_files_of_pixtral_in_mistrals_own_format() -> None:
    """conversion/pixtral.py: silu always, theta in the file, no merger and no biases."""
    keys = Settings(
        {
            "vision.image_size": 1024,
            "vision.patch_size": 16,
            "vision.embedding_length": 96,
            "vision.feed_forward_length": 128,
            "vision.block_count": 2,
            "vision.attention.head_count": 2,
            "vision.attention.layer_norm_epsilon": 1e-5,
            "vision.projection_dim": 40,
            "use_silu": True,
            "rope.freq_base": 500.0,
            "vision.image_mean": [0.1, 0.2, 0.3],
            "vision.image_std": [0.4, 0.5, 0.6],
        },
        "mmproj: clip",
    )
    config, image = from_gguf(keys, {"mm.1.weight": (40, 96)})
    result = read_settings(Settings(config, "mmproj"), Settings(image, "mmproj"))
    assert (
        result.layers,
        result.width,
        result.ffn,
        result.heads,
        result.act,
        result.text_width,
    ) == (2, 96, 128, 2, "silu", 40)
    assert (
        result.merge,
        result.bias,
        result.resolution.longest,
        result.resolution.normalize.mean,
    ) == (None, False, 1024, (0.1, 0.2, 0.3))
    assert result.rotary.frequencies[12] == pytest.approx(500 ** (-2 / 48))


LIGHTON = {"architectures": ["LightOnOCRForConditionalGeneration"]}


def test_lighton_ocr_is_published_under_another_name() -> None:
    """Its pictures are rounded up to what the image processor's settings say."""
    family = read(
        vision={"patch_size": 14, "hidden_act": None}, image={"patch_size": 14}, **LIGHTON
    )
    assert family == read("lighton_ocr", image={"patch_size": {"height": 14, "width": 14}})
    assert (family.act, family.marker, family.bias, family.merge) == (
        "silu",
        "<|image_pad|>",
        False,
        2,
    )
    plan = family.resolution.prepare(np.zeros((60, 100, 3), np.uint8))
    assert (plan.sizes, family.prompt(plan)) == (((112, 70),), "<|image_pad|>" * 8)
    assert read("lighton_ocr", image={"patch_size": 28}).resolution.step == 28


@pytest.mark.parametrize("size", [20, {"height": 14, "width": 28}, -14, "14"])
def test_lighton_ocr_refuses_pictures_of_no_whole_patches(size: Any) -> None:
    with pytest.raises(ModelError, match=r"^preprocessor_config\.json: patch_size is "):
        read("lighton_ocr", image={"patch_size": size})
