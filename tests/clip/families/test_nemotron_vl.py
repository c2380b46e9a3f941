"""Nemotron 3 Nano Omni's eye: published sizes, positions against torch's interpolation, what cannot
be followed, what a GGUF says.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mtmd.base.errors import ModelError
from mtmd.clip.families import nemotron_vl
from mtmd.clip.family import gguf_of, gguf_vision_family, vision_family
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.kernels.checkpoint.settings import Settings


def read(
    vision: dict[str, Any] | None = None, image: dict[str, Any] | None = None, **top: Any
) -> nemotron_vl.NemotronVision:
    result = vision_family(
        "nemotron_h_omni",
        Settings({"vision_config": vision or {}, **top}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, nemotron_vl.NemotronVision)
    return result


def test_published_sizes() -> None:
    result = read(llm_config={"hidden_size": 2688}, vit_hidden_size=1280)
    vit = result.vit
    assert (vit.layers, vit.width, vit.ffn, vit.heads) == (32, 1280, 5120, 16)
    assert (result.first, result.side, result.text_width) == (10, 128, 2688)
    assert (result.resolution.minimum, result.resolution.maximum) == (1024, 13312)
    parameters = sum(math.prod(p.shape) for p in result.parameters().values())
    assert 6.5e8 < parameters < 7.2e8  # C-RADIO H, and the projection


@pytest.mark.parametrize("grid", [(5, 9), (9, 5), (13, 13), (20, 3), (1, 7)])
def test_positions_are_cut_out_of_a_square(grid: tuple[int, int]) -> None:
    side, longer = 13, max(grid)
    table = torch.randn(side, side, 4, generator=torch.Generator().manual_seed(0))
    square = F.interpolate(
        table.permute(2, 0, 1)[None], (longer, longer), mode="bilinear", align_corners=False
    )
    expected = square[0, :, : grid[0], : grid[1]].permute(1, 2, 0)
    (top, bottom, down), (left, right, across) = (
        nemotron_vl._between(count, longer, side) for count in grid
    )
    down, across = down[:, None, None], across[None, :, None]
    upper = table[top][:, left] * (1 - across) + table[top][:, right] * across
    lower = table[bottom][:, left] * (1 - across) + table[bottom][:, right] * across
    assert torch.allclose(upper * (1 - down) + lower * down, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("vision", "top", "words"),
    [
        ({"use_swiglu_ffn": True}, {}, "use_swiglu_ffn is True, expected one of False"),
        ({"qkv_bias": False}, {}, "qkv_bias is False"),
        ({"layerscale_value": 0.1}, {}, "layerscale_value is 0.1"),
        ({"hidden_act": "relu"}, {}, "hidden_act"),
        ({"num_attention_heads": 7}, {}, "7 heads of width 1280"),
        ({"num_registers": 10**9}, {}, "num_registers is 1000000000"),
        ({"max_img_size": 100}, {}, "max_img_size 100 and patch_size 16"),
        ({}, {"downsample_ratio": 0.4}, "downsample_ratio is 0.4"),
        ({}, {"downsample_ratio": 1e-300}, "downsample_ratio is 1e-300"),
        ({}, {"vision_hidden_size": 1024}, "vision_hidden_size is 1024"),
    ],
)
def test_settings_that_cannot_be_followed(vision, top, words) -> None:
    with pytest.raises(ModelError, match=words):
        read(vision, **top)


def test_a_gguf_shows_one_square() -> None:
    keys = {
        "clip.vision.block_count": 2,
        "clip.vision.embedding_length": 48,
        "clip.vision.feed_forward_length": 90,
        "clip.vision.attention.head_count": 3,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_size": 64,
        "clip.vision.patch_size": 8,
        "clip.vision.projection_dim": 36,
        "clip.vision.projector.scale_factor": 2,
        "clip.use_gelu": True,
    }
    shapes = {"v.class_embd": (5, 48), "mm.model.mlp.1.weight": (70, 192)}
    family = gguf_vision_family("nemotron_v2_vl", keys, shapes, "file")
    assert isinstance(family, nemotron_vl.NemotronVision)
    assert (family.first, family.side, family.inner, family.vit.ffn) == (5, 8, 70, 90)
    assert isinstance(family.resolution, FixedSquare) and family.resolution.tokens == 16
    assert family.parameters()["v.class_embd"].shape == (5, 48)


def test_no_gguf_is_written() -> None:
    with pytest.raises(ModelError, match="no GGUF holds its image encoder"):
        gguf_of(read(), "here")
