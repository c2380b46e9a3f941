"""Which frames are taken."""

from __future__ import annotations

import pytest

from mtmd.clip.video.choose import Evenly, check_request, chosen
from mtmd.clip.video.video import FrameRequest, VideoFacts
from mtmd.kernels.errors import OptionError


def facts(frames: int = 240, fps: float = 24.0) -> VideoFacts:
    return VideoFacts(frames, fps, frames / fps, 64, 48, "h264")


def taken(request: FrameRequest, most: int = 1000, **size) -> list[int]:
    return chosen(Evenly(), facts(**size), request, most, "")[0]


def test_one_a_second_where_nothing_is_said():
    assert taken(FrameRequest()) == [24 * i for i in range(10)]


def test_a_long_video_is_seen_from_its_first_frame_to_its_last():
    got = taken(FrameRequest(), frames=24 * 3600)
    assert (len(got), got[0], got[-1]) == (32, 0, 24 * 3600 - 1)


def test_a_rate_is_kept_and_no_frame_comes_twice():
    assert taken(FrameRequest(fps=2), frames=48) == [0, 12, 24, 36]
    assert taken(FrameRequest(fps=200), frames=5) == [0, 1, 2, 3, 4]
    assert taken(FrameRequest(fps=10, max_frames=3), frames=48) == [0, 24, 47]


def test_a_part_of_a_video():
    assert taken(FrameRequest(start=2, end=4)) == [48, 72, 96]
    assert taken(FrameRequest(start=9.99)) == [239]
    assert taken(FrameRequest(end=0)) == [0]


def test_no_more_than_there_is_room_for_and_it_is_said():
    indices, notes = chosen(Evenly(), facts(), FrameRequest(), 4, "no room")
    assert indices == [0, 80, 159, 239] and notes == ("4 of 10 frames: no room",)


def test_a_rule_that_gives_more_than_asked_is_thinned():
    class Stubborn:
        def choose(self, *_):
            return list(range(0, 100, 10))

    assert chosen(Stubborn(), facts(), FrameRequest(), 2, "")[0] == [0, 90]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (FrameRequest(fps=0), "fps"),
        (FrameRequest(fps=float("nan")), "fps"),
        (FrameRequest(max_frames=0), "max_frames"),
        (FrameRequest(start=-1), "start"),
        (FrameRequest(start=3, end=2), "end"),
    ],
    ids=["none", "not a number", "no frames", "before the beginning", "backwards"],
)
def test_senseless_requests(request_, words):
    with pytest.raises(OptionError, match=f"^{words}:"):
        check_request(request_)


def test_what_lies_after_the_end():
    with pytest.raises(OptionError, match="start: found 11 s"):
        taken(FrameRequest(start=11))
