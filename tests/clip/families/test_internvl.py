"""What is special to InternVL: which parameters a tower has, the prompt, settings, tensor names,
what a GGUF says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import internvl
from mtmd.clip.families.internvl import InternVision, from_gguf
from mtmd.kernels.checkpoint.settings import Settings


def read(
    top: dict[str, Any] | None = None, image: dict[str, Any] | None = None, **vision: Any
) -> InternVision:
    config = {"vision_config": vision, "text_config": {"hidden_size": 32}} | (top or {})
    return internvl.read(
        Settings(config, "config.json"),
        Settings(
            {"size": {"height": 448, "width": 448}} | (image or {}), "preprocessor_config.json"
        ),
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers import InternVLConfig, InternVLVisionConfig

    new, result = InternVLVisionConfig(), read()
    assert (
        result.vit.layers,
        result.vit.width,
        result.vit.ffn,
        result.vit.heads,
        result.vit.eps,
        result.qkv_bias,
        result.qk_norm,
    ) == (
        new.num_hidden_layers,
        new.hidden_size,
        new.intermediate_size,
        new.num_attention_heads,
        new.layer_norm_eps,
        new.attention_bias,
        new.use_qk_norm,
    )
    assert (
        (new.hidden_act, result.vit.gelu)
        == (InternVLConfig().projector_hidden_act, result.gelu)
        == ("gelu", "none")
    )
    assert ([result.resolution.tile] * 2, [result.patch] * 2, result.rms) == (
        list(new.image_size),
        list(new.patch_size),
        False,
    )
    assert InternVLConfig().image_seq_length == result.resolution.tile_tokens == 256


def test_sizes_may_be_given_once_or_twice() -> None:
    image = {"size": {"height": 56, "width": 56}}
    for size, patch in ((56, 14), ([56, 56], [14, 14]), ((56, 56), 14)):
        result = read(image=image, image_size=size, patch_size=patch)
        assert (result.resolution.tile, result.patch, result.resolution.tile_tokens) == (56, 14, 4)


def test_the_prompt_has_nothing_between_tiles() -> None:
    family = read(image={"max_patches": 3})
    plan = family.resolution.prepare(np.zeros((40, 80, 3), np.uint8))
    assert family.prompt(plan) == f"<img>{'<IMG_CONTEXT>' * 768}</img>" and plan.tokens == 768
    assert plan.sizes == ((448, 448),) * 3 and len(plan.tiles) == 3


def test_pictures_are_cut_whatever_the_settings_say() -> None:
    pixels = np.zeros((40, 80, 3), np.uint8)
    assert [
        len(read(image={"crop_to_patches": cut}).resolution.prepare(pixels).tiles)
        for cut in (True, False)
    ] == [3, 3]


BIASES = {f"v.blk.0.{part}.bias" for part in ("ln1", "ln2")}
QKV = {f"v.blk.0.attn_{part}.bias" for part in "qkv"}


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_parameters(rms: bool, bias: bool, qk_norm: bool) -> None:
    result = read(
        num_hidden_layers=1,
        norm_type="rms_norm" if rms else "layer_norm",
        attention_bias=bias,
        use_qk_norm=qk_norm,
    ).parameters()
    names = set(result)
    assert names & BIASES == (set() if rms else BIASES) and names & QKV == (QKV if bias else set())
    assert (
        ("v.blk.0.attn_q_norm.weight" in names)
        == ("v.blk.0.attn_k_norm.weight" in names)
        == qk_norm
    )
    assert {
        "v.blk.0.ffn_up.bias",
        "v.blk.0.attn_out.bias",
        "v.blk.0.ls1.weight",
        "mm.model.mlp.0.bias",
    } <= names
    assert (
        result["v.blk.0.attn_out.weight"].sources[0]
        == "vision_tower.encoder.layer.0.attention.projection_layer.weight"
    )


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "oblong": (
        {"image_size": [448, 224]},
        {},
        r"vision_config: image_size is \[448, 224\], expected an integer",
    ),
    "three sides": (
        {"patch_size": [14, 14, 14]},
        {},
        r"vision_config: patch_size is \[14, 14, 14\], expected an integer",
    ),
    "patch": (
        {"patch_size": 15},
        {},
        "image_size 448, patch_size 15 and downsample_ratio 0.5 do not fit together; expected "
        "whole patches",
    ),
    "groups": (
        {},
        {"downsample_ratio": 0.2},
        "image_size 448, patch_size 14 and downsample_ratio 0.2 do not fit together",
    ),
    "no whole group": (
        {},
        {"downsample_ratio": 0.3},
        ".* downsample_ratio 0.3 do not fit together",
    ),
    "spread": ({}, {"downsample_ratio": 2.5}, ".* downsample_ratio 2.5 do not fit together"),
    "norm": (
        {"norm_type": "batch_norm"},
        {},
        "vision_config: norm_type is 'batch_norm', expected one of layer_norm, rms_norm",
    ),
    "positions": (
        {"use_absolute_position_embeddings": False},
        {},
        "vision_config: use_absolute_position_embeddings is False, ",
    ),
    "pooling": (
        {"use_mean_pooling": False},
        {},
        "vision_config: use_mean_pooling is False, expected one of True",
    ),
    "heads": (
        {"num_attention_heads": 3},
        {},
        "vision_config: 3 heads of width 1024; expected heads that divide the width",
    ),
    "activation": (
        {"hidden_act": "silu"},
        {},
        "vision_config: hidden_act is 'silu', expected one of",
    ),
    "layer": ({}, {"vision_feature_layer": -2}, "vision_feature_layer is -2, expected one of -1"),
    "strategy": (
        {},
        {"vision_feature_select_strategy": "full"},
        "vision_feature_select_strategy is 'full', expected one of default",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    vision, top, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: {reported}"):
        read(top, **vision)


def gguf(shapes: dict[str, tuple[int, ...]], **more: Any) -> InternVision:
    keys = {
        "vision.image_size": 56,
        "vision.patch_size": 14,
        "vision.embedding_length": 96,
        "vision.feed_forward_length": 128,
        "vision.block_count": 2,
        "vision.attention.head_count": 2,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "use_gelu": True,
        "vision.projection_dim": 40,
        "vision.image_mean": [0.1, 0.2, 0.3],
        "vision.image_std": [0.4, 0.5, 0.6],
        **more,
    }
    config, image = from_gguf(Settings(keys, "mmproj: clip"), shapes)
    return internvl.read(Settings(config, "mmproj"), Settings(image, "mmproj"))


def test_gguf_files_tell_the_tower_by_its_tensors() -> None:
    plain = gguf({"v.blk.0.ln1.bias": (96,), "v.blk.0.attn_q.bias": (96,)})
    assert (plain.rms, plain.qkv_bias, plain.qk_norm, plain.vit.gelu) == (
        False,
        True,
        False,
        "none",
    )
    large = gguf({"v.blk.0.attn_q_norm.weight": (96,)})
    assert (large.rms, large.qkv_bias, large.qk_norm) == (True, False, True)


def test_gguf_files_say_how_many_tiles_or_leave_it_out() -> None:
    result = gguf({}).resolution
    assert (
        result.tile,
        result.tile_tokens,
        result.fewest,
        result.maximum,
        result.normalize.mean,
    ) == (56, 4, 1, 12, (0.1, 0.2, 0.3))
    result = gguf(
        {},
        **{
            "vision.preproc_min_tiles": 2,
            "vision.preproc_max_tiles": 6,
            "vision.projector.scale_factor": 4,
        },
    ).resolution
    assert (result.tile_tokens, result.fewest, result.maximum) == (1, 2, 6)
