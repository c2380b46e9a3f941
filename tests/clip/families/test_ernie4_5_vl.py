"""ERNIE 4.5 VL's eye: transformers' defaults, what cannot be followed, published names."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.families.ernie4_5_vl import Ernie45Vision
from mtmd.clip.family import vision_family
from mtmd.clip.video.pairs import EachFrame
from mtmd.clip.video.rules import AllWithin
from mtmd.kernels.checkpoint.settings import Settings


def read(image: dict[str, Any] | None = None, **vision: Any) -> Ernie45Vision:
    result = vision_family(
        "ernie4_5_vl_moe",
        Settings({"vision_config": vision}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, Ernie45Vision)
    return result


def test_defaults_are_those_of_transformers() -> None:
    from torchvision_stand_in import torchvision_here
    from transformers import Ernie4_5_VLMoeConfig
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )

    with torchvision_here():
        from transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe import (
            Ernie4_5_VLMoeVideoProcessor,
        )

    top, p = Ernie4_5_VLMoeConfig(), Ernie4_5_VLMoeImageProcessorPil()
    c, result, v = top.vision_config, read(), Ernie4_5_VLMoeVideoProcessor
    assert (result.layers, result.width, result.ffn, result.heads, result.eps) == (
        c.depth,
        c.hidden_size,
        c.intermediate_size,
        c.num_heads,
        c.rms_norm_eps,
    )
    assert (result.text_width, result.text_eps) == (
        top.text_config.hidden_size,
        top.text_config.rms_norm_eps,
    )
    pictures, video = result.resolution, result.video
    assert (pictures.minimum, pictures.maximum) == (p.size["shortest_edge"], p.size["longest_edge"])
    assert pictures.normalize.mean == tuple(p.image_mean)
    assert video.normalize.mean == pytest.approx([255 * mean for mean in v.image_mean])
    assert (pictures.resample, pictures.factor, video.factor) == ("bicubic", 28, 28)
    assert video.limits == EachFrame(v.size["shortest_edge"], v.size["longest_edge"])
    assert video.rule.pick == AllWithin(None, v.min_frames, v.max_frames)


def test_times_that_are_not_drawn_are_in_the_receipt() -> None:
    notes = read().video.shape(64, 48, 4).notes
    assert "times are not drawn on the frames" in notes[-1]
    assert not read({"video_processor": {"draw_on_frames": False}}).video.shape(64, 48, 4).notes


def test_published_names() -> None:
    parameters = read().parameters()
    assert "vision_model.blocks.31.attn.qkv.weight" in parameters["v.blk.31.attn_k.weight"].sources
    assert parameters["mm.time.up.weight"].sources == (
        "model.resampler_model.temporal_linear.0.weight",
    )
    assert parameters["mm.time.up.weight"].shape == (5120, 10240)
    assert parameters["v.patch_embd.weight"].stored == (1280, 588)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"in_channels": 1}, "vision_config: in_channels is 1, expected one of 3"),
        ({"temporal_merge_size": 3}, "temporal_merge_size is 3, expected one of 2"),
        ({"num_heads": 7}, "vision_config: 7 heads of width 1280"),
        ({"hidden_act": "relu6"}, "hidden_act is 'relu6', expected one of"),
        ({"depth": 10**9}, "depth is 1000000000, expected"),
        ({"image": {"merge_size": 3}}, "preprocessor_config.json: merge_size is 3, expected 2"),
        ({"image": {"temporal_patch_size": 2}}, "temporal_patch_size is 2, expected 1"),
        (
            {"image": {"video_processor": {"temporal_patch_size": 3}}},
            "video_processor: temporal_patch_size is 3, expected one of 1, 2",
        ),
        (
            {"image": {"video_processor": {"size": {"shortest_edge": 9, "longest_edge": 8}}}},
            "9 to 8 pixels, expected limits",
        ),
    ],
)
def test_settings_that_cannot_be_followed(values: dict[str, Any], reported: str) -> None:
    with pytest.raises(ModelError, match=reported):
        read(**values)
