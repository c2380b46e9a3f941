"""The encoders of DeepSeek-OCR, DeepSeek-OCR-2 and Unlimited-OCR: published sizes, the authors'
configurations, settings that are refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.deepseek_ocr.ocr2 import DeepseekOcr2Vision
from mtmd.clip.family import gguf_of, vision_family
from mtmd.kernels.checkpoint.settings import Settings

SAM = {
    "width": 768,
    "layers": 12,
    "heads": 12,
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2, 5, 8, 11],
}
CLIP = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}
AUTHORS = {
    "vision_config": {"image_size": 1024, "width": {"sam_vit_b": SAM, "clip-l-14-224": CLIP}},
    "language_config": {"hidden_size": 1280},
    "projector_config": {"projector_type": "linear"},
}
AUTHORS_2 = {
    "vision_config": {
        "image_size": 1024,
        "width": {
            "sam_vit_b": SAM | {"downsample_channels": [512, 896]},
            "qwen2-0-5b": {"dim": 896},
        },
    },
    "language_config": {"hidden_size": 1280},
}


def read(kind: str, config: dict[str, Any], image: dict[str, Any] | None = None) -> Any:
    settings = Settings({"model_type": kind} | config, "config.json")
    return vision_family(kind, settings, Settings(image or {}, "preprocessor_config.json"))


@pytest.mark.parametrize(
    ("kind", "tile", "most"), [("deepseek_vl_v2", 640, 9), ("unlimited_ocr", 640, 32)]
)
def test_the_authors_configuration_says_what_transformers_takes_for_granted(kind, tile, most):
    theirs, ours = read(kind, AUTHORS), read(kind, {})
    assert theirs == ours
    assert (ours.resolution.tile, ours.resolution.maximum) == (tile, most)
    assert ours.resolution.tokens((0, 0)) == 273 and ours.resolution.tokens((2, 3)) == 903
    names = {s for p in ours.parameters().values() for w in p.ways("", False) for s in w.names}
    assert "model.sam_model.blocks.11.attn.rel_pos_w" in names
    assert "model.vision_model.transformer.layers.23.self_attn.qkv_proj.weight" in names


def test_deepseek_ocr2_has_the_same_model_type_at_its_authors():
    theirs, ours = read("deepseek_vl_v2", AUTHORS_2), read("deepseek_ocr2", {})
    assert isinstance(theirs, DeepseekOcr2Vision)
    assert theirs.sam == ours.sam and theirs.resolution == ours.resolution
    assert ours.resolution.tokens((0, 0)) == 257 and ours.resolution.tokens((2, 3)) == 257 + 864


@pytest.mark.parametrize("kind", ["deepseek_vl_v2", "unlimited_ocr", "deepseek_ocr2"])
def test_keys_of_a_gguf(kind):
    metadata, _ = gguf_of(read(kind, {}), "here")
    projector = "deepseekocr2" if kind == "deepseek_ocr2" else "deepseekocr"
    assert metadata["clip.projector_type"] == projector
    assert metadata["clip.vision.sam.block_count"] == 12
    assert metadata["clip.vision.window_size"] == 14


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("unlimited_ocr", "sam_config.global_attn_indexes", [2, 99], "numbers of layers below 12"),
        ("unlimited_ocr", "sam_config.global_attn_indexes", "all", "global_attn_indexes is 'all'"),
        ("unlimited_ocr", "sam_config.use_rel_pos", False, "use_rel_pos"),
        ("unlimited_ocr", "sam_config.hidden_size", 100, "12 heads of width 100"),
        ("unlimited_ocr", "sam_config.image_size", 1000, "expected heads that divide"),
        ("unlimited_ocr", "sam_config.image_size", 1 << 20, "at most 1024"),
        ("unlimited_ocr", "sam_config.downsample_channels", [512], "expected two counts"),
        ("unlimited_ocr", "sam_config.num_hidden_layers", 10**9, "num_hidden_layers"),
        ("unlimited_ocr", "encoder_config.hidden_size", 512, "width 512 behind 1024 channels"),
        ("unlimited_ocr", "encoder_config.image_size", 225, "whole patches"),
        ("deepseek_ocr2", "encoder_config.num_attention_heads", 13, "13 heads in 2 groups"),
        ("deepseek_ocr2", "encoder_config.use_sliding_window", True, "use_sliding_window"),
    ],
)
def test_settings_that_are_refused(kind, path, value, words):
    with pytest.raises(ModelError, match=words):
        read(kind, {"vision_config": nested(path, value)})


def test_pictures_without_queries_are_refused():
    with pytest.raises(ModelError, match="512 pixels a side give 64 patches, expected 144 or 256"):
        read("deepseek_ocr2", {}, {"tile_size": 512})


def test_another_projector_is_refused():
    with pytest.raises(ModelError, match="projector_type"):
        read("deepseek_vl_v2", AUTHORS | {"projector_config": {"projector_type": "mlp_gelu"}})
