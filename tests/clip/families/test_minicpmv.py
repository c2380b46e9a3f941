"""MiniCPM-V's eye with a resampler: what cannot be followed, names, videos, what a GGUF says."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.families import minicpmv
from mtmd.clip.family import Numbered, gguf_vision_family, vision_family
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.family import text_family

VISION = {"hidden_size": 1152, "image_size": 980, "num_attention_heads": 16, "patch_size": 14}
CONFIG = {"version": 4.5, "hidden_size": 4096, "query_num": 64, "patch_size": 14}
IMAGE = {"use_image_id": True, "norm_mean": [0.5, 0.5, 0.5], "version": 4.5}


def read(
    image: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    kind: str = "minicpmv",
    **top: Any,
) -> minicpmv.MiniCpmVision:
    config = {"model_type": kind, "vision_config": VISION | (vision or {}), **CONFIG, **top}
    result = vision_family(
        kind,
        Settings(config, "config.json"),
        Settings(IMAGE | (image or {}), "preprocessor_config.json"),
    )
    assert isinstance(result, minicpmv.MiniCpmVision)
    return result


def test_pictures_are_counted_and_videos_are_not() -> None:
    family = read()
    assert isinstance(family, Numbered)
    assert family.numbered(2, video=False) == "<image_id>2</image_id>"
    assert family.numbered(2, video=True) == ""
    assert read({"use_image_id": False}).numbered(2, video=False) == ""


def test_a_picture_is_itself_and_its_slices() -> None:
    plan = read().resolution.prepare(np.zeros((900, 1300, 3), np.uint8))
    assert plan.cut == (2, 3) and plan.tokens == 7 * 64
    assert read().prompt(plan).replace("<unk>" * 64, "*") == (
        "<image>*</image>" + "<slice>*</slice>" * 3 + "\n" + "<slice>*</slice>" * 3
    )


def test_frames_are_whole_pictures_below_each_other() -> None:
    family = read()
    facts = VideoFacts("a.mp4", 1300, 900, 30.0, 90, 3.0)
    shape = family.video.shape(1300, 900, 2)
    assert (shape.tokens, shape.groups) == (64, 2)
    frame = np.random.default_rng(0).integers(0, 256, (900, 1300, 3), np.uint8)
    scaled = family.video.scale(frame, shape)
    tile = family.video.pixels(family.video.group([scaled], shape).tiles[0])
    np.testing.assert_array_equal(tile, family.resolution.prepare(frame).tiles[0])
    written = family.video.prompt(Video((), (0, 30), (0.0, 1.0), facts), shape)
    assert written.replace("<unk>" * 64, "*") == "<image>*</image>\n<image>*</image>"


def test_a_frames_time_changes_nothing_where_it_is_alone() -> None:
    """What is added to all keys alike drops out of attention: so the authors' temporal positions
    matter to frames that are put together, and to no other.
    """
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(16, 2)
    query, key, time = (torch.randn(n, 1, 16) for n in (3, 7, 1))
    alone, timed = (attention(query, k, key)[0] for k in (key, key + time))
    torch.testing.assert_close(timed, alone)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": "2.5"}, "config.json: version is 2.5, expected one of 2.6, 4.0, 4.5"),
    "no version": ({"version": None}, "config.json: version is None, expected one of"),
    "width": (
        {"hidden_size": 1000},
        "config.json: hidden_size is 1000, expected a multiple of 128",
    ),
    "tokens": ({"query_num": 10**6}, "config.json: query_num is 1000000, expected"),
    "layer": ({"drop_vision_last_layer": True}, "drop_vision_last_layer is True, expected one of"),
    "other tokens": ({"image": {"image_feature_size": 32}}, "image_feature_size is 32, expected"),
    "patch": ({"image": {"patch_size": 16}}, "patch_size is 16, expected 14 as config.json says"),
    "table": ({"vision": {"image_size": 7}}, "vision_config: image_size 7 is less than patch_size"),
    "heads": ({"vision": {"num_attention_heads": 7}}, "vision_config: 7 heads of width 1152"),
    "slices": ({"image": {"slice_mode": False}}, "slice_mode is False, expected one of True"),
    "std": ({"image": {"norm_std": [0, 1, 1]}}, "image_std is .*, expected 3 numbers above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=reported):
        read(**values)


def test_decoders_go_by_the_version() -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    for kind, version, family in (
        ("minicpmv", 2.6, "Qwen2Text"),
        ("minicpmo", "2.6", "Qwen2Text"),
        ("minicpmv", 4.0, "LlamaText"),
        ("minicpmv", 4.5, "Qwen3Text"),
    ):
        config = Settings({"model_type": kind, "version": version, **sizes}, "config.json")
        assert type(text_family(f"{kind}_text", config)).__name__ == family
    with pytest.raises(ModelError, match="model_type 'minicpmv_text' is not supported for text"):
        text_family("minicpmv_text", Settings({"version": 2.5, **sizes}, "config.json"))


def test_what_omni_models_hear_and_say_is_not_read() -> None:
    family = read(kind="minicpmo", version="2.6")
    for name in ("apm.conv1.weight", "audio_projection_layer.linear1.bias", "tts.dvae.coef"):
        assert any(re.fullmatch(pattern, name) for pattern in family.unused)


@pytest.mark.parametrize("kind, version", minicpmv.VERSIONS.values())
def test_what_a_gguf_says(kind: str, version: str) -> None:
    said = minicpmv.to_gguf(family := read(kind=kind, version=version))
    keys = {f"clip.{key}": value for key, value in said.keys.items()}
    keys |= {"clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    shapes = {name: p.shape for name, p in family.parameters().items()}
    back = gguf_vision_family("resampler", keys, shapes, "file")
    assert back == replace(family, video=back.video)  # type: ignore[attr-defined]
    assert said.tensors["resampler.pos_embed_k"].shape == (4900, 4096)
    keys["clip.minicpmv_version"] = 2
    with pytest.raises(ModelError, match=r"file: clip: minicpmv_version is 2, expected one of 3"):
        gguf_vision_family("resampler", keys, shapes, "file")
