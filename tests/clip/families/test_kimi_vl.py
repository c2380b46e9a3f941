"""MoonViT's settings: transformers' defaults, those of published checkpoints, what a GGUF says, what
cannot be followed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families import kimi_vl
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.kernels.checkpoint.settings import Settings

TEXT = {"text_config": {"hidden_size": 96}}


def read(kind: str = "kimi_k25", image: dict[str, Any] | None = None, **config: Any) -> Any:
    settings = Settings({"model_type": kind, **TEXT, **config}, "config.json")
    return vision_family(kind, settings, Settings(image or {}, "preprocessor_config.json"))


def test_defaults_are_those_of_transformers() -> None:
    from transformers import Kimi_K25Config

    config = Kimi_K25Config()
    old, ours = config.vision_config, read()
    vit = ours.vit
    assert (vit.layers, vit.width, vit.ffn, vit.heads, ours.side, ours.resolution.patch) == (
        old.num_hidden_layers,
        old.hidden_size,
        old.intermediate_size,
        old.num_attention_heads,
        old.pos_emb_height,
        old.patch_size,
    )
    assert (vit.gelu, ours.projector_eps) == ("tanh", config.projection_layer_norm_eps)
    assert (ours.resolution.patches, ours.resolution.side) == (16384, 512)


def test_settings_of_published_checkpoints() -> None:
    """The authors' names, and their pictures' settings below a name of their own."""
    authors = {
        "vision_config": {
            "vt_num_hidden_layers": 5,
            "vt_hidden_size": 64,
            "vt_intermediate_size": 100,
            "vt_num_attention_heads": 4,
            "init_pos_emb_height": 32,
            "init_pos_emb_width": 32,
            "merge_kernel_size": [2, 2],
            "projector_ln_eps": 1e-4,
        }
    }
    media = {"in_patch_limit": 900, "patch_size": 14, "patch_limit_on_one_side": 80}
    ours = read(image={"media_proc_cfg": media}, **authors)
    assert (ours.vit.layers, ours.vit.width, ours.vit.ffn, ours.vit.heads) == (5, 64, 100, 4)
    assert (ours.side, ours.projector_eps) == (32, 1e-4)
    assert (ours.resolution.patches, ours.resolution.side) == (900, 80)
    assert ours.resolution.by_tensor


def test_a_gguf_says_the_same() -> None:
    ours = read(vision_config={"hidden_size": 64, "num_attention_heads": 4})
    described = kimi_vl.to_gguf(ours)
    keys = {f"clip.{key}": value for key, value in described.keys.items()}
    keys |= {"clip.projector_type": described.projector, "clip.has_vision_encoder": True}
    keys |= {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    shapes = {"v.position_embd.weight": (64, 64, 64)}
    back = gguf_vision_family(described.projector, keys, shapes, "file")
    assert back == ours


def test_pairs_of_a_gguf_go_by_columns_before_rows() -> None:
    """As llama.cpp's converter turns the rows of queries and keys, and leaves those of values."""
    rows = torch.arange(3 * 16).view(48, 1)
    turned = kimi_vl._by_axes(2, rows).flatten().tolist()
    assert turned[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert turned[16:24] == [16, 17, 20, 21, 18, 19, 22, 23]
    assert turned[32:] == list(range(32, 48))


@pytest.mark.parametrize(
    ("config", "image", "reported"),
    [
        ({"vision_config": {"pos_emb_width": 32}}, {}, "pos_emb_width is 32, expected one of 64"),
        ({"vision_config": {"merge_kernel_size": [2, 3]}}, {}, "merge_kernel_size is"),
        ({"vision_config": {"num_attention_heads": 5}}, {}, "5 heads of width 1152"),
        ({"vision_config": {"patch_size": 0}}, {}, "patch_size is 0"),
        ({}, {"patch_size": 16}, "patch_size is 16, expected one of 14"),
        ({}, {"pad_input": False}, "pad_input is False"),
        ({}, {"max_patches": 1 << 22}, "limit is 4194304"),
        ({}, {"fixed_output_tokens": 64}, "fixed_output_tokens is 64"),
    ],
)
def test_settings_that_cannot_be_followed(
    config: dict[str, Any], image: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ModelError, match=reported):
        read(image=image, **config)
