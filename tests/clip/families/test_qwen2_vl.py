"""Qwen2-VL's picture settings: transformers' defaults, what cannot be followed, what a GGUF
says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families import qwen2_vl
from mtmd.clip.family import gguf_vision_family
from mtmd.kernels.checkpoint.settings import Settings


def read(**vision: Any) -> qwen2_vl.Qwen2Vision:
    return qwen2_vl.read(
        Settings({"vision_config": vision}, "config.json"), Settings({}, "preprocessor_config.json")
    )


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

    old, result = Qwen2VLVisionConfig(), read()
    assert (
        result.layers,
        result.width,
        result.ffn,
        result.heads,
        result.text_width,
        result.gelu,
    ) == (
        old.depth,
        old.embed_dim,
        old.embed_dim * old.mlp_ratio,
        old.num_heads,
        old.hidden_size,
        "quick",
    )
    assert (result.resolution.patch, result.resolution.merge) == (
        old.patch_size,
        old.spatial_merge_size,
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": (
        {"hidden_act": "silu"},
        "hidden_act is 'silu', expected one of gelu_pytorch_tanh",
    ),
    "grey": ({"in_channels": 1}, "in_channels is 1, expected one of 3"),
    "heads": ({"num_heads": 3}, "3 heads of width 1280; expected heads that divide the width"),
    "rope": (
        {"rope_parameters": {"rope_type": "yarn"}},
        "rope_parameters: rope_type is 'yarn', expected one of axial",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_towers_that_cannot_be(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^config.json: vision_config: {reported}"):
        read(**values)


def test_published_names() -> None:
    """Fused queries, keys and values, and the kernels of two frames, as the hub's files have
    them.
    """
    result = read(depth=1).parameters()
    assert result["v.blk.0.attn_k.weight"].sources[0] == "visual.blocks.0.attn.qkv.weight"
    assert result["v.patch_embd.weight"].sources[0] == "visual.patch_embed.proj.weight"
    width = result["v.post_ln.weight"].shape[0]
    thirds = [
        convert(torch.arange(3 * width))
        for part in "qkv"
        if (convert := result[f"v.blk.0.attn_{part}.bias"].convert)
    ]
    assert [int(t[0]) for t in thirds] == [0, width, 2 * width]


def test_two_kernels_of_a_gguf_are_one() -> None:
    (way,) = read(depth=1).parameters()["v.patch_embd.weight"].gguf
    assert way.names == ("v.patch_embd.weight", "v.patch_embd.weight.1") and way.convert
    assert way.convert(torch.full((2,), 1.0), torch.full((2,), 0.25)).tolist() == [1.25, 1.25]


def test_a_gguf_of_the_old_one() -> None:
    keys = {
        "clip.vision.block_count": 3,
        "clip.vision.embedding_length": 96,
        "clip.vision.feed_forward_length": 131,
        "clip.vision.attention.head_count": 2,
        "clip.vision.patch_size": 14,
        "clip.vision.projection_dim": 72,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.25, 0.25, 0.25],
    }
    result: Any = gguf_vision_family("qwen2vl_merger", keys, {}, "x.gguf")
    assert (
        result.layers,
        result.width,
        result.ffn,
        result.heads,
        result.text_width,
        result.gelu,
    ) == (3, 96, 131, 2, 72, "quick")
    assert result.resolution.normalize.std == (0.25, 0.25, 0.25)
