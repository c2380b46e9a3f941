"""What is special to LLaVA-NeXT-Video, Video-LLaVA and ViP-LLaVA: frames in pairs, towers, features
of several depths, settings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.families.llava.video import LlavaVideo
from mtmd.clip.families.llava.vision import LlavaVision
from mtmd.clip.family import vision_family
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.kernels.checkpoint.settings import Settings

VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
SQUARE = {"height": 28, "width": 28}
NEXT, TWO = "llava_next_video", "video_llava"


def family(
    kind: str = NEXT,
    vision: dict[str, Any] | None = None,
    video: dict[str, Any] | None = None,
    **top: Any,
) -> LlavaVision:
    pinpoints = {"image_grid_pinpoints": [[28, 56]]} if kind == NEXT else {}
    size = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
    config = {
        "model_type": kind,
        "vision_config": VISION | (vision or {}),
        "text_config": {"hidden_size": 24},
    }
    settings = size | {"video_processor": size | (video or {})} | pinpoints
    return vision_family(
        kind,
        Settings(config | pinpoints | top, "config.json"),
        Settings(settings, "preprocessor_config.json"),
    )  # type: ignore[return-value]


def videos(kind: str = NEXT, **more: Any) -> LlavaVideo:
    result = family(kind, **more)
    assert isinstance(result, LlavaVideo)
    return result


@pytest.mark.parametrize(("kind", "tokens", "frames"), [(NEXT, 4, 32), (TWO, 17, 8)])
def test_frames(kind: str, tokens: int, frames: int) -> None:
    """Two in a tile; of an odd one its tokens alone, although the tile has it twice."""
    video = videos(kind).video
    assert video and video.rule == FrameRule(Beginnings(frames))
    shape = video.shape(64, 48, 5)
    assert (shape.frames, shape.groups, shape.tokens) == (2, 3, 2 * tokens)
    assert shape.all_tokens == 5 * tokens
    frame = video.scale(np.zeros((48, 64, 3), np.uint8), shape)
    both, one = video.group([frame, frame], shape), video.group([frame], shape)
    assert both.tiles[0].shape == one.tiles[0].shape == (6, 28, 28)
    assert both.order is None and one.order is not None
    assert (both.tokens, one.order.tolist()) == (2 * tokens, list(range(tokens)))
    with pytest.raises(ImageError, match="scaled to its shorter edge"):
        video.shape(1, 10**7, 1)


def test_frames_are_cut_as_the_reference_cuts_them() -> None:
    with torchvision_here():
        from transformers.models.llava_next_video.video_processing_llava_next_video import (
            LlavaNextVideoVideoProcessor,
        )
    edge = {"size": {"shortest_edge": 31}, "crop_size": SQUARE}
    theirs, video = LlavaNextVideoVideoProcessor(**edge), videos(video=edge).video
    assert video
    rng = np.random.default_rng(3)
    for width, height in [(31, 31), (28, 300), (200, 20), *rng.integers(1, 150, (20, 2)).tolist()]:
        frame = rng.integers(0, 256, (height, width, 3), np.uint8)
        expected = theirs([frame[None]], return_tensors="np")["pixel_values_videos"][0][0]
        tile = video.scale(frame, video.shape(width, height, 1)).transpose(2, 0, 1)
        np.testing.assert_array_equal(video.pixels(tile), expected)


def test_towers() -> None:
    """One for both in LLaVA-NeXT-Video; layers that give no features are not read."""
    one, two = set(videos().parameters()), videos(TWO)
    names = two.parameters()
    assert {name for name in names if not name.startswith("v.frames.")} | {"v.image_newline"} == one
    assert sum(name.startswith("v.frames.") for name in names) == sum(
        name.startswith("v.") for name in names if not name.startswith("v.frames.")
    )
    sources = names["v.frames.blk.0.ln1.weight"].sources
    assert "video_tower.vision_model.encoder.layers.0.layer_norm1.weight" in sources
    assert any("video_tower" in pattern for pattern in two.unused)
    assert any("image_tower" in pattern for pattern in two.unused)


@pytest.mark.parametrize(
    ("top", "features"),
    [
        ({"vision_feature_layers": [-2, 1]}, (11, 1)),
        ({"vision_feature_layer": [3]}, (3,)),
        (
            {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
            (11, 8, 5, 2, 6),
        ),
    ],
    ids=["as published", "as saved", "as the first 7B"],
)
def test_depths(top: dict[str, Any], features: tuple[int, ...]) -> None:
    vip = family("vipllava", projector_layernorm_eps=0.5, **top)
    assert vip.tower.features == features and vip.tower.norm_eps == 0.5 and vip.tower.skip_first
    assert vip.parameters()["mm.norm.weight"].shape == (32 * len(features),)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "maxima": ({"spatial_pool_mode": "max"}, "config.json: spatial_pool_mode is 'max', expected"),
    "other neighbours": (
        {"spatial_pool_stride": 3},
        "config.json: spatial_pool_stride is 3, expected one of 2",
    ),
    "odd patches": (
        {"vision": {"patch_size": 4}},
        "config.json: spatial_pool_stride 2 does not divide the 7 patches a side",
    ),
    "frames stretched": (
        {"video": {"size": SQUARE}},
        "preprocessor_config.json: video_processor: frames of 28 pixels a side",
    ),
    "larger frames": (
        {"video": {"crop_size": {"height": 30, "width": 30}, "size": {"shortest_edge": 30}}},
        "preprocessor_config.json: video_processor: size 30 and crop_size 30 does not give 28",
    ),
    "parts of patches": (
        {"kind": TWO, "vision": {"patch_size": 5}},
        "preprocessor_config.json: video_processor: frames of 28 pixels a side in patches of 5",
    ),
    "no depths": (
        {"kind": "vipllava", "vision_feature_layers": []},
        r"config.json: vision_feature_layer is \[\], expected a number from -13 to 12",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_cannot_be_followed(case: str) -> None:
    values, reported = WRONG[case]
    with pytest.raises(ModelError, match=f"^{reported}"):
        family(**values)
