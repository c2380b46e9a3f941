"""The rate at which frames were taken, and when their groups are."""

from __future__ import annotations

import pytest

from mtmd.clip.video.choose import chosen, part_between
from mtmd.clip.video.family import ClipShape, group_times, taken_fps
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.clip.video.rules import FrameRule, WholeGroups
from mtmd.clip.video.video import Video, VideoFacts


def taken(facts: VideoFacts, request: FrameRequest) -> Video:
    part = part_between(facts, None, request.start, request.end)
    rule = FrameRule(WholeGroups(2.0, 4, 768, 2))
    indices = tuple(chosen(rule, facts, part, request, 1024, "")[0])
    return Video((), indices, tuple(i / facts.fps for i in indices), facts)


@pytest.mark.parametrize("frames", [1, 7, 50, 333, 9001])
@pytest.mark.parametrize("fps", [10.0, 23.976, 60.0])
def test_of_a_whole_file_as_the_reference_has_it(frames: int, fps: float) -> None:
    video = taken(VideoFacts(frames, fps, frames / fps, 8, 8), FrameRequest())
    assert taken_fps(video) == len(video.indices) / frames * fps


def test_of_a_part_by_its_times() -> None:
    facts = VideoFacts(24000, 24.0, 1000.0, 8, 8)
    video = taken(facts, FrameRequest(start=100, end=130))
    assert taken_fps(video) == pytest.approx(2.0, rel=0.05)


def test_times_of_groups() -> None:
    video = Video((), (0, 5, 10), (0.0, 0.5, 1.25), VideoFacts(20, 10.0, 2.0, 8, 8))
    assert group_times(video, ClipShape((8, 8), 2, 2, 1)) == [(0.0, 0.5), (1.25, 1.25)]
