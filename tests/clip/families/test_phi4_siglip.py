"""Phi-4-reasoning-vision's eye: sizes, what cannot be followed, names, what a GGUF says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families import phi4_siglip
from mtmd.clip.family import gguf_vision_family, vision_family
from mtmd.clip.token_budget import Budget
from mtmd.kernels.checkpoint.settings import Settings

CONFIG = {"hidden_size": 5120, "mm_projector_type": "mlp2x_gelu"}


def read(
    image: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **top: Any
) -> phi4_siglip.Phi4Vision:
    config = {**CONFIG, "vision_config": {"hidden_act": "gelu_pytorch_tanh", **(vision or {})}}
    result = vision_family(
        "phi4-siglip",
        Settings(config | top, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, phi4_siglip.Phi4Vision)
    return result


def test_published_sizes() -> None:
    family = read()
    assert (family.vit.layers, family.vit.width, family.vit.heads) == (26, 1152, 16)
    assert (family.positions, family.text_width) == (16, 5120)
    limit = family.resolution
    assert (limit.patch, limit.minimum, limit.maximum) == (16, 256, 3600)


@pytest.mark.parametrize(
    "size, tokens", [((640, 480), 1200), ((100, 100), 256), ((4000, 3000), 3588)]
)
def test_pictures_keep_their_size_within_two_bounds(size: tuple[int, int], tokens: int) -> None:
    plan = read().resolution.prepare(np.zeros((size[1], size[0], 3), np.uint8))
    assert plan.tokens == tokens
    few = read().resolution.prepare(
        np.zeros((size[1], size[0], 3), np.uint8), Budget(max_tokens=100)
    )
    assert few.tokens <= 100


def test_pictures_stand_where_the_vocabularys_padding_does() -> None:
    assert read().image_token == "<|dummy_85|>"
    for padding in ("<|pad|>", {"content": "<|pad|>", "special": True}):
        assert read({"tokens": {"pad_token": padding}}).image_token == "<|pad|>"


def test_what_is_not_read() -> None:
    tower = "model.vision_tower.vision_tower.vision_model"
    left_out = ("head.probe", "post_layernorm.bias", "encoder.layers.26.mlp.fc1.weight")
    for name in left_out:
        assert any(re.fullmatch(pattern, f"{tower}.{name}") for pattern in read().unused)
    assert f"{tower}.encoder.layers.25.mlp.fc1.weight" in {
        name for p in read().parameters().values() for name in p.sources
    }


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "projector": ({"mm_projector_type": "linear"}, "mm_projector_type is 'linear', expected one"),
    "layer": ({"mm_vision_select_layer": -1}, "mm_vision_select_layer is -1, expected one of -2"),
    "one layer": (
        {"vision": {"num_hidden_layers": 1}},
        "num_hidden_layers is 1, expected at least",
    ),
    "table": ({"vision": {"num_patches": 250}}, "num_patches is 250, expected a square number"),
    "patch": ({"image": {"patch_size": 14}}, "patch_size is 14, expected 16 as config.json says"),
    "bounds": ({"min_num_patches": 4000}, "min_num_patches is 4000, expected at most"),
    "patches": ({"max_num_patches": 10**9}, "max_num_patches is 1000000000, expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_what_a_gguf_says() -> None:
    said = phi4_siglip.to_gguf(family := read())
    keys = {f"clip.{key}": value for key, value in said.keys.items()}
    assert keys["clip.vision.block_count"] == 26
    assert keys["clip.vision.image_max_pixels"] == 3600 * 256
    keys |= {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    shapes = {name: p.shape for name, p in family.parameters().items()}
    assert gguf_vision_family("phi4", keys, shapes, "file") == family
    other = gguf_vision_family("phi4", keys | {"clip.vision.image_min_pixels": 512}, shapes, "file")
    assert other == replace(family, resolution=replace(family.resolution, minimum=2))  # type: ignore[attr-defined]
