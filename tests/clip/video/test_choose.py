"""Which frames are taken."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from mtmd.base.errors import OptionError
from mtmd.clip.video.choose import Evenly, Rule, chosen, part_between
from mtmd.clip.video.frame_request import FrameRequest, check_request
from mtmd.clip.video.rules import (
    Beginnings,
    EveryInterval,
    FirstToLast,
    FrameRule,
    Middles,
    WholeGroups,
    WithoutEnds,
)
from mtmd.clip.video.video import Part, VideoFacts


def facts(frames: int = 240, fps: float = 24.0) -> VideoFacts:
    return VideoFacts(frames, fps, frames / fps, 64, 48, "h264")


RULES: dict[str, Rule] = {
    "evenly": Evenly(),
    "whole groups": FrameRule(WholeGroups(2.0, 4, 768, 2)),
    "first to last": FrameRule(FirstToLast(2.0, 4, 768)),
    "every interval": FrameRule(EveryInterval(2.0, 300)),
    "every interval, of a day": FrameRule(EveryInterval(2.0, 86_400)),
    "without ends": FrameRule(WithoutEnds(1.0, 64)),
    "middles": FrameRule(Middles(8)),
    "beginnings": FrameRule(Beginnings(32)),
}


def taken(
    request: FrameRequest, maximum: int = 1000, rule: Rule = RULES["evenly"], **size
) -> list[int]:
    of = facts(**size)
    part = part_between(of, None, request.start, request.end)
    return chosen(rule, of, part, request, maximum, "")[0]


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
    whole = part_between(facts(), None, None, None)
    indices, notes = chosen(Evenly(), facts(), whole, FrameRequest(), 4, "no room")
    assert indices == [0, 80, 159, 239] and notes == ("4 of 10 frames: no room",)


def test_a_rule_that_gives_more_than_asked_is_thinned():
    class Stubborn:
        def choose(self, *_):
            return list(range(0, 100, 10))

    assert taken(FrameRequest(), 2, Stubborn()) == [0, 90]


@pytest.mark.parametrize("name", RULES)
def test_what_is_asked_for_is_kept(name):
    rng = random.Random(3)
    for _ in range(100):
        frames, fps = rng.randint(1, 5000), rng.uniform(5, 60)
        maximum, start = rng.randint(1, 40), rng.uniform(0, frames / fps * 0.8)
        end = start + rng.uniform(0.3, frames / fps)
        request = FrameRequest(rng.uniform(0.1, 9), maximum, start, end)
        result = taken(request, 1000, RULES[name], frames=frames, fps=fps)
        assert 0 < len(result) <= maximum and result == sorted(set(result))
        assert result == [0] or (start * fps <= result[0] + 0.02 and result[-1] <= end * fps + 0.02)


@pytest.mark.parametrize("name", RULES)
def test_a_part_is_chosen_from_as_if_it_were_all(name):
    result = taken(FrameRequest(start=10, end=20), 1000, RULES[name], frames=2400)
    assert result == [240 + i for i in taken(FrameRequest(), 1000, RULES[name], frames=241)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("maximum", [None, 10**12], ids=["no most", "a huge most"])
def test_however_many_frames_a_file_says_it_has_few_are_looked_at(name, maximum):
    """A day at a thousand a second: a list of them would take gigabytes."""
    day = facts(86_400_000, 1000.0)
    part = part_between(day, None, None, None)
    for fps in (None, 240):
        request = FrameRequest(fps=fps, max_frames=maximum)
        tracemalloc.start()
        result, notes = chosen(RULES[name], day, part, request, 1024, "limit")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 1 <= len(result) <= 1024 and result[-1] < day.frames and peak < 16 << 20
        assert len(result) < 1024 or notes[0].startswith(("1024 of", "768 of"))


UNEVEN = np.array([0.0, 0.1, 0.2, 1.0, 1.1, 3.0, 3.05, 4.0])


@pytest.mark.parametrize(
    ("start", "end", "result"),
    [
        (1, None, (3, 5)),
        (None, 1, (0, 4)),
        (0.05, 0.25, (1, 2)),
        (3.0, 3.02, (5, 1)),
        (1.5, 2, (4, 1)),  # nothing begins there: what is shown then
        (4.2, None, (7, 1)),
        (None, 1e300, (0, 8)),
        (0, 0, (0, 1)),
    ],
)
def test_a_part_of_an_uneven_video_is_found_by_its_times(start, end, result):
    of = VideoFacts(8, 1 / (4 / 7), 4 + 4 / 7, 64, 48)
    part = part_between(of, UNEVEN, start, end)
    assert (part.first, part.frames) == result
    later = part_between(of, UNEVEN + 100, *(t if t is None else t + 100 for t in (start, end)))
    assert (later.first, later.frames) == result
    assert later.times([later.first]) == (pytest.approx(100 + UNEVEN[result[0]]),)


def test_a_part_of_an_uneven_video_has_a_rate_of_its_own():
    """Ten seconds of one frame each, then ten of thirty: of the first, two a second are all."""
    times = np.array([*range(10), *(10 + i / 30 for i in range(300))])
    of = VideoFacts(310, 310 / 20, 20.0, 64, 48)
    part = part_between(of, times, None, 9.5)
    assert part == Part(0, 0.0, 10, pytest.approx(1.0), pytest.approx(10.0))
    assert chosen(Evenly(), of, part, FrameRequest(fps=2), 99, "")[0] == list(range(10))


def test_times_that_were_rounded_to_milliseconds_are_met():
    of, times = facts(30, 3.0), np.round(np.arange(30) / 3, 3)
    assert part_between(of, times, 1 / 3, 2 / 3).first == 1
    assert part_between(of, times, 2 / 3 - 1e-4, None).first == 2
    assert part_between(of, times, None, 1 / 3).frames == 2


def test_what_ends_before_a_video_begins():
    of = VideoFacts(8, 2.0, 4.0, 64, 48)
    with pytest.raises(OptionError, match=r"end: found 5 s, expected no less than 100\.0 s"):
        part_between(of, np.arange(8) / 2 + 100, None, 5)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (FrameRequest(fps=0), "fps"),
        (FrameRequest(fps=float("nan")), "fps"),
        (FrameRequest(fps=5e-324), "fps"),
        (FrameRequest(fps=1e9), "fps"),
        (FrameRequest(max_frames=0), "max_frames"),
        (FrameRequest(start=-1), "start"),
        (FrameRequest(start=3, end=2), "end"),
    ],
    ids=[
        "none",
        "not a number",
        "next to none",
        "too many",
        "no frames",
        "before the beginning",
        "backwards",
    ],
)
def test_senseless_requests(request_, words):
    with pytest.raises(OptionError, match=f"^{words}:"):
        check_request(request_)


def test_what_lies_after_the_end():
    with pytest.raises(OptionError, match="start: found 11 s"):
        taken(FrameRequest(start=11))
