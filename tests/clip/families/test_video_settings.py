"""What checkpoints say of videos, and what stands where they say nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtmd.base.errors import ModelError
from mtmd.clip.family import VisionFamily, vision_family
from mtmd.clip.video.pairs import AllFrames, EachFrame
from mtmd.clip.video.rules import (
    Beginnings,
    EveryInterval,
    FirstToLast,
    Middles,
    Pick,
    WholeGroups,
    WithoutEnds,
)
from mtmd.clip.video.video import Video, VideoFacts
from mtmd.kernels.checkpoint.settings import Settings

QWEN = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
SMOL = {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}}
CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    "idefics3": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
}
IMAGES: dict[str, dict[str, Any]] = {
    "smolvlm": SMOL,
    "idefics3": SMOL,
    "internvl": {"size": {"height": 448, "width": 448}},
    "qwen3_vl": {"patch_size": 16, **QWEN},
}


def family(kind: str, **video: Any) -> VisionFamily:
    config = {"model_type": kind, **CONFIGS.get(kind, {})}
    image = {**IMAGES.get(kind, {}), "video_processor": video}
    return vision_family(kind, Settings(config, "config"), Settings(image, "image"))


def rule(kind: str, **video: Any) -> Pick:
    result = family(kind, **video).video
    assert result is not None
    return result.rule.pick


@pytest.mark.parametrize(
    ("kind", "usual", "settings", "reported"),
    [
        (
            "qwen2_vl",
            WholeGroups(2.0, 4, 768, 2),
            {"fps": 1, "min_frames": 2, "max_frames": 60},
            WholeGroups(1.0, 2, 60, 2),
        ),
        ("qwen2_5_vl", WholeGroups(2.0, 4, 768, 2), {"max_frames": 60}, WholeGroups(2.0, 4, 60, 2)),
        (
            "qwen3_vl",
            FirstToLast(2.0, 4, 768),
            {"fps": 4, "max_frames": 60},
            FirstToLast(4.0, 4, 60),
        ),
        (
            "glm4v",
            EveryInterval(2.0, 300.0),
            {"fps": 1, "max_duration": 60},
            EveryInterval(1.0, 60.0),
        ),
        (
            "smolvlm",
            WithoutEnds(1.0, 64),
            {"video_sampling": {"fps": 2, "max_frames": 8}},
            WithoutEnds(2.0, 8),
        ),
        ("internvl", Middles(8), {"num_frames": 16, "initial_shift": 0.5}, Middles(16, 0.5)),
        ("gemma4", Beginnings(32), {"num_frames": 8}, Beginnings(8)),
    ],
)
def test_which_frames_are_taken(
    kind: str, usual: Pick, settings: dict[str, Any], reported: Pick
) -> None:
    assert rule(kind) == usual
    assert rule(kind, **settings) == reported


def test_limits_of_pixels() -> None:
    def limits(kind: str, **video: Any) -> object:
        return family(kind, **video).video.limits  # type: ignore[union-attr]

    each = {"shortest_edge": 1000, "longest_edge": 90000}
    assert limits("qwen2_vl") == EachFrame(128 * 28 * 28, 768 * 28 * 28)
    assert limits("qwen2_vl", size=each) == EachFrame(1000, 90000)
    assert limits("qwen2_vl", size=each, max_pixels=80000) == EachFrame(1000, 80000)
    assert limits("qwen2_vl", cap_pixels_per_frame=True) == EachFrame(
        128 * 28 * 28, 768 * 28 * 28, 128000
    )
    assert limits("qwen3_vl", size=each, max_pixels=80000) == AllFrames(1000, 90000), (
        "this processor knows `size` alone"
    )
    assert limits("glm4v") == AllFrames(112 * 112, 28 * 28 * 2 * 30000, even=True)


def test_the_longest_edge_beside_sampling_goes_first() -> None:
    def longest(**video: Any) -> int:
        return family("smolvlm", **video).video.how.longest  # type: ignore[union-attr]

    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}
    assert longest(video_sampling=sampling) == 512
    assert longest(video_sampling=sampling, size={"longest_edge": 2048}) == 2048


@pytest.mark.parametrize(
    "settings", [{"size": {"height": 384, "width": 384}}, {"do_center_crop": True}]
)
def test_frames_that_the_tower_has_no_positions_for(settings: dict[str, Any]) -> None:
    assert family("internvl", **settings).video is None


def test_models_of_pictures_alone() -> None:
    assert family("idefics3").video is None


def test_a_tower_of_another_size() -> None:
    with pytest.raises(ModelError, match="max_image_size is 364, expected 512 as for pictures"):
        family("smolvlm", max_image_size={"longest_edge": 364})


def written(kind: str, tokens: int = 2) -> str:
    """Of three frames of a clip of an hour and a bit."""
    video = family(kind).video
    assert video is not None
    times = (0.5, 61.75, 3725.04)
    facts = VideoFacts(89472, 24.0, 3728.0, 64, 48)
    shape = video.shape(64, 48, 3)
    shape = replace(shape, tokens=tokens)
    return video.prompt(Video((), (12, 1482, 89401), times, facts), shape)


def test_what_stands_for_a_video() -> None:
    pads = "<|video_pad|>" * 2
    assert written("qwen2_vl") == written("qwen2_5_vl") == pads * 2
    around = f"<|vision_start|>{pads}<|vision_end|>"
    assert written("qwen3_vl") == f"<31.1 seconds>{around}<3725.0 seconds>{around}"
    frame = "<|begin_of_image|><|image|><|image|><|end_of_image|>"
    assert written("glm4v") == f"{frame}0{frame}3725"
    inside = "<fake_token_around_image>"
    tile = f"{inside}<global-img><image><image>{inside}"
    assert written("smolvlm") == (
        "You are provided the following series of three frames from a 1:02:08 [H:MM:SS] video.\n\n"
        f"Frame from 00:00:{tile}\nFrame from 01:01:{tile}\nFrame from 62:05:{tile}\n\n"
    )
    tile = "<img><IMG_CONTEXT><IMG_CONTEXT></img>"
    assert written("internvl") == f"Frame1: {tile}\nFrame2: {tile}\nFrame3: {tile}"
    tile = "<|image><|video|><|video|><image|>"
    assert written("gemma4") == f"00:00 {tile} 01:01 {tile} 62:05 {tile}"
