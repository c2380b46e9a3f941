"""Which frames are taken: as transformers' video processors choose them, and within what was asked
for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
from torchvision_stand_in import torchvision_here

from mtmd.clip.families.glm4v import MAX_FRAMES, RATES
from mtmd.clip.video.choose import MAXIMUM
from mtmd.clip.video.rules import (
    AllWithin,
    AtRate,
    Beginnings,
    ByLength,
    EachSecond,
    EveryInterval,
    FirstToLast,
    FrameRule,
    Middles,
    SecondsOrMiddles,
    SpreadMiddles,
    WholeGroups,
    WithoutEnds,
)
from mtmd.clip.video.video import VideoFacts

Chosen = "list[int] | None"
TRIPLES = 1000


def facts(frames: int, fps: float) -> VideoFacts:
    return VideoFacts(frames, fps, frames / fps, 64, 48)


@lru_cache
def reference(module: str, kind: str, **settings: Any) -> Any:
    with torchvision_here():
        result = import_module(f"transformers.models.{module}.video_processing_{module}")
    return getattr(result, kind)(**settings)


def requested(processor: Any, video: VideoFacts, **options: Any) -> Chosen:
    """What the reference takes; None where it fails."""
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(video.frames, fps=video.fps, duration=video.seconds)
    try:
        result = [int(i) for i in processor.sample_frames(metadata, **options)]
    except (ValueError, ZeroDivisionError, RuntimeError, TypeError):
        return None
    return None if not result or result[-1] >= video.frames else result


def whole_groups(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    processor = reference("qwen2_vl", "Qwen2VLVideoProcessor")
    return requested(processor, video, fps=fps, max_frames=maximum)


def all_within(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    processor = reference("ernie4_5_vl_moe", "Ernie4_5_VLMoeVideoProcessor")
    return requested(processor, video, max_frames=maximum)


def all_within_at_a_rate(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    processor = reference("ernie4_5_vl_moe", "Ernie4_5_VLMoeVideoProcessor")
    return requested(processor, video, fps=fps, max_frames=maximum)


def first_to_last(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    processor = reference("qwen3_vl", "Qwen3VLVideoProcessor")
    processor.max_frames = maximum
    return requested(processor, video, fps=fps)


def every_interval(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    """`maximum` is the longest clip whose rate is kept; a last frame that comes twice counts once."""
    processor = reference("glm4v", "Glm4vVideoProcessor")
    processor.max_duration = maximum
    result = requested(processor, video, fps=fps)
    return result and list(dict.fromkeys(result))


def without_ends(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    processor = reference("smolvlm", "SmolVLMVideoProcessor")
    return requested(processor, video, fps=fps, num_frames=maximum)


def middles(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    return requested(reference("internvl", "InternVLVideoProcessor"), video, num_frames=maximum)


def middles_at_a_rate(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    return requested(reference("internvl", "InternVLVideoProcessor"), video, fps=fps)


def beginnings(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    return requested(reference("gemma4", "Gemma4VideoProcessor"), video, num_frames=maximum)


def each_second(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    processor = reference("minicpmv4_6", "MiniCPMV4_6VideoProcessor")
    return requested(processor, video, max_num_frames=maximum)


def seconds_or_middles(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    """As the example of MiniCPM-V 2.6 has it, which takes one frame a second."""
    every = list(range(0, video.frames, max(round(video.fps / fps), 1)))
    gap = max(len(every) / maximum, 1)
    return [every[int(i * gap + gap / 2)] for i in range(min(maximum, len(every)))]


def spread_middles(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    """As the example of MiniCPM-V 4.5 has it."""
    count = min(round(min(fps, round(video.fps)) * video.seconds), maximum, video.frames)
    if count == 0:
        return None
    return [int(i * (video.frames / count) + video.frames / count / 2) for i in range(count)]


def by_length(video: VideoFacts, fps: float, maximum: int) -> Chosen:  # noqa: ARG001
    result = requested(reference("glm46v", "Glm46VVideoProcessor"), video)
    return result and list(dict.fromkeys(result))


def at_rate(video: VideoFacts, fps: float, maximum: int) -> Chosen:
    processor = reference("glmga", "GlmgaVideoProcessor")
    processor.max_frames = maximum
    result = requested(processor, video, fps=fps)
    return result and list(dict.fromkeys(result))


WAYS: dict[str, tuple[Callable[..., Chosen], Callable[[int], Any], tuple[str, ...]]] = {
    "whole groups": (whole_groups, lambda _: WholeGroups(2.0, 4, 768, 2), ("fps", "max_frames")),
    "all within": (all_within, lambda _: AllWithin(None, 16, 180), ("max_frames",)),
    "all within, at a rate": (
        all_within_at_a_rate,
        lambda _: AllWithin(None, 16, 180),
        ("fps", "max_frames"),
    ),
    "first to last": (first_to_last, lambda _: FirstToLast(2.0, 4, 768), ("fps", "max_frames")),
    "every interval": (every_interval, lambda maximum: EveryInterval(2.0, maximum), ("fps",)),
    "at a rate": (at_rate, lambda _: AtRate(2.0, 640), ("fps", "max_frames")),
    "by length": (by_length, lambda _: ByLength(RATES, MAX_FRAMES), ()),
    "without ends": (without_ends, lambda _: WithoutEnds(1.0, 64), ("fps", "max_frames")),
    "middles": (middles, Middles, ()),
    "middles, at a rate": (middles_at_a_rate, lambda _: Middles(8), ("fps",)),
    "beginnings": (beginnings, Beginnings, ()),
    "seconds or middles": (
        seconds_or_middles,
        lambda _: SecondsOrMiddles(1.0, 64),
        ("fps", "max_frames"),
    ),
    "spread middles": (spread_middles, lambda _: SpreadMiddles(3.0, 180), ("fps", "max_frames")),
    "each second": (each_second, lambda _: EachSecond(128), ("max_frames",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_indices_are_the_references(way: str) -> None:
    theirs, rule, options = WAYS[way]
    rng = random.Random(7)
    compared = 0
    for _ in range(TRIPLES):
        rate = rng.choice([23.976, 24.0, 25.0, 29.97, 30.0, 60.0, rng.uniform(1, 120)])
        video = facts(int(min(rng.lognormvariate(6, 2), 20000)) + 1, rate)
        fps = rng.choice([0.5, 1.0, 2.0, 4.0, rng.uniform(0.05, 12)])
        maximum = rng.choice([4, 16, 64, 768, rng.randint(1, 400)])
        requested = fps if "fps" in options else None, maximum if "max_frames" in options else None
        expected = theirs(video, fps, maximum)
        actual = FrameRule(rule(maximum)).choose(video, *requested)
        assert (
            actual and actual == sorted(set(actual)) and 0 <= actual[0] <= actual[-1] < video.frames
        )
        if expected is not None and len(expected) <= MAXIMUM:
            compared += 1
            assert actual == expected, (video, requested)
    assert compared > TRIPLES // 2


def test_a_header_that_says_nothing() -> None:
    """Neither rate nor number of frames: one frame, which is always there."""
    for _, rule, _ in WAYS.values():
        assert FrameRule(rule(8)).choose(VideoFacts(0, 0.0, 0.0, 64, 48)) == [0]
