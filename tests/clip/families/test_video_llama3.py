"""VideoLLaMA 3's eye: transformers' defaults, what cannot be followed, and which tokens of frames
are left out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from common import picture
from torchvision_stand_in import torchvision_here

from mtmd.base.errors import ModelError
from mtmd.clip.families.video_llama3 import VideoLlama3Vision
from mtmd.clip.family import vision_family
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.kernels.checkpoint.settings import Settings

SIZE = {"shortest_edge": 12 * 12 * 2, "longest_edge": 12 * 12 * 110}


def read(image: dict[str, Any] | None = None, **vision: Any) -> VideoLlama3Vision:
    result = vision_family(
        "video_llama_3",
        Settings({"vision_config": vision}, "config.json"),
        Settings(image or {}, "preprocessor_config.json"),
    )
    assert isinstance(result, VideoLlama3Vision)
    return result


def reference(**settings: Any) -> Any:
    with torchvision_here():
        from transformers.models.video_llama_3.video_processing_video_llama_3 import (
            VideoLlama3VideoProcessor,
        )
    return VideoLlama3VideoProcessor(**settings)


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.video_llama_3.configuration_video_llama_3 import (
        VideoLlama3VisionConfig,
    )
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
        VideoLlama3ImageProcessorPil,
    )

    c, p, v, result = VideoLlama3VisionConfig(), VideoLlama3ImageProcessorPil(), reference(), read()
    vit, pictures, video = result.vit, result.resolution, result.video
    assert (vit.layers, vit.width, vit.ffn, vit.heads, vit.eps) == (
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.layer_norm_eps,
    )
    assert (pictures.patch, pictures.merge, result.merge) == (
        c.patch_size,
        p.merge_size,
        v.merge_size,
    )
    assert (pictures.minimum, pictures.maximum) == (p.size["shortest_edge"], p.size["longest_edge"])
    assert pictures.normalize.mean == tuple(p.image_mean)
    assert video.normalize.mean == pytest.approx([255 * mean for mean in v.image_mean])
    limits: Any = video.limits
    assert (limits.minimum, limits.maximum) == (v.size["shortest_edge"], v.size["longest_edge"])
    rule: Any = video.rule.pick
    assert (rule.minimum, rule.maximum, video.thins) == (v.min_frames, v.max_frames, True)


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_tokens_that_look_as_before_are_left_out(count: int) -> None:
    """Of frames of which a part stays, nothing changes, or all does by little."""
    rng = np.random.default_rng(count)
    frames = [picture(3, 48, 36)]
    for number in range(1, count):
        frame = frames[-1].copy()
        if number != 2:
            frame[: 12 * number, 9:30] = picture(number, 21, 12 * number)[:36]
        if number == 4:
            frame = frame ^ (rng.random(frame.shape) < 0.05).astype(np.uint8)
        frames.append(frame)
    settings = {"patch_size": 6, "merge_size": 2, "temporal_patch_size": 1, "size": SIZE}
    family = read({"patch_size": 6, "video_processor": settings}, patch_size=6).video
    theirs = reference(**settings)(
        [torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)],
        video_metadata=[
            {"total_num_frames": count, "fps": 1.0, "frames_indices": list(range(count))}
        ],
        do_sample_frames=False,
        return_tensors="pt",
    )
    mask = theirs["video_compression_mask"].view(count, -1).numpy()
    shape = family.shape(48, 36, count)
    scaled = [family.scale(frame, shape) for frame in frames]
    plans = [
        family.thinned(scaled[i : i + 2], scaled[i - 1] if i else None, shape)
        for i in range(0, count, 2)
    ]
    each = shape.tokens // 2
    kept = [np.isin(np.arange(2 * each), plan.order).reshape(2, each) for plan in plans]
    np.testing.assert_array_equal(np.concatenate(kept)[:count], mask)
    assert sum(plan.tokens for plan in plans) == mask.sum() <= shape.all_tokens
    facts = VideoFacts(count, 1.0, float(count), 48, 36)
    times = tuple(map(float, range(count)))
    video = Video((), tuple(range(count)), times, facts)
    text = ",".join(
        f"Time {time:.1f}s:" + family.token * int(row.sum())
        for time, row in zip(times, mask, strict=True)
    )
    assert family.prompt_of(video, plans) == text
    assert len(text) <= len(family.prompt(video, shape))
    if count > 2:
        assert mask[2].sum() == 1  # nothing changed, and one is left
        assert any(0 < a < b for b, a in pairwise(mask.sum(1)))
    if count > 4:
        assert 0 < mask[4].sum() < each


def test_frames_are_whole_where_the_settings_say_so() -> None:
    family = read({"video_processor": {"use_token_compression": False, "merge_size": 2}}).video
    frame = picture(0, 64, 64)
    shape = family.shape(64, 64, 4)
    same = family.scale(frame, shape)
    assert family.thinned([same, same], same, shape).tokens == shape.tokens


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"num_channels": 1}, "vision_config: num_channels is 1, expected one of 3"),
        ({"num_attention_heads": 5}, "vision_config: 5 heads of width 768"),
        ({"image": {"merge_size": 2}}, "merge_size is 2, expected 1"),
        ({"image": {"patch_size": 7}}, "patch_size is 7, expected 16"),
        ({"image": {"temporal_patch_size": 2}}, "temporal_patch_size is 2, expected 1"),
        (
            {"image": {"video_processor": {"merge_size": 4}}},
            "video_processor: merge_size is 4, expected one of 1, 2",
        ),
        (
            {"image": {"video_processor": {"temporal_patch_size": 2}}},
            "video_processor: temporal_patch_size is 2, expected one of 1",
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
