"""Files and given frames, in this process and in another."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from videos import animation, number_of, numbered, video

from mtmd.clip.video.footage import GivenFrames, VideoFile, frames_of
from mtmd.clip.video.isolated import no_more_files
from mtmd.clip.video.limits import VideoLimits
from mtmd.kernels.errors import VideoError


@pytest.fixture(scope="module")
def clip() -> bytes:
    return video(36)


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "in a worker"])
def test_frames_of_a_file(clip, isolate, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip)
    for source in (clip, path):
        file = VideoFile(source, isolate=isolate)
        seen = file.video(lambda facts: [0, facts.frames // 2, facts.frames - 1])
        assert [number_of(f) for f in seen.frames] == list(seen.indices) == [0, 18, 35]
        assert seen.times == (0, pytest.approx(1.5), pytest.approx(35 / 12))
        assert file.facts() == seen.facts
    assert VideoFile(clip).sha256 == VideoFile(path).sha256


def test_moving_pictures_in_a_worker():
    seen = VideoFile(animation("WEBP"), isolate=True).video(lambda _: [0, 7])
    assert [number_of(f) for f in seen.frames] == [0, 7]


def test_many_frames_are_made_smaller(clip):
    limits = VideoLimits(held_bytes=9 * 96 * 64 * 3)
    seen = VideoFile(clip, limits).video(lambda _: range(36))
    assert seen.frames[0].shape == (32, 48, 3) and len(seen.frames) == 36
    assert seen.facts.notes == ("frames read at 48 x 32: 36 of 96 x 64 would take 0 MiB",)


def test_one_that_ends_early_is_told():
    data = video(48, index_first=True)
    seen = VideoFile(data[: len(data) * 2 // 3]).video(lambda _: range(0, 48, 4))
    assert 0 < len(seen.frames) < 12 and "not at 4.0 s as it says" in seen.facts.notes[-1]


def test_a_worker_has_no_more_time_than_it_may(clip):
    """A second of the processor's: limits are whole ones."""
    over_and_over = [*range(36)] * 1000
    with pytest.raises(VideoError, match=r"takes more than 0\.01 s of processor time"):
        VideoFile(clip, VideoLimits(cpu_s=0.01), isolate=True).video(lambda _: over_and_over)


def test_errors_of_a_worker_are_those_of_here(clip):
    for isolate in (False, True):
        with pytest.raises(VideoError, match=r"^x: found frames of 96 x 64 pixels, expected at"):
            VideoFile(clip, VideoLimits(max_pixels=10), "x", isolate).facts()


def test_nothing_can_be_opened_where_videos_are_read():
    with no_more_files():
        with pytest.raises(OSError, match="Too many open files"):
            Path("/dev/null").read_bytes()
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
    Path("/dev/null").read_bytes()


@pytest.mark.parametrize(("data", "words"), [(b"", "0 bytes"), (bytes(11), "11 bytes")])
def test_bytes_are_counted_first(data, words):
    with pytest.raises(VideoError, match=words):
        VideoFile(data, VideoLimits(max_bytes=10))


def test_given_frames():
    frames = [numbered(n) for n in range(10)]
    given = GivenFrames(frames, [n / 4 for n in range(10)])
    facts = given.facts()
    assert (facts.frames, facts.fps, facts.seconds, facts.codec) == (10, 4, 2.5, "arrays")
    seen = given.video(lambda _: [2, 9])
    assert [number_of(f) for f in seen.frames] == [2, 9] and seen.times == (0.5, 2.25)
    assert given.sha256 != GivenFrames(frames, range(10)).sha256


@pytest.mark.parametrize(
    ("frames", "times", "words"),
    [
        ([], [], "at least one"),
        ([numbered(0)], [], "a time for each"),
        ([numbered(0)] * 2, [1, 1], "do not ascend"),
        ([numbered(0), numbered(0, 48)], [0, 1], "all of one size"),
    ],
    ids=["none", "no times", "one time twice", "two sizes"],
)
def test_given_frames_that_make_no_video(frames, times, words):
    with pytest.raises(VideoError, match=words):
        GivenFrames(frames, times)


def test_arrays():
    floats = np.linspace(0, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    assert frames_of(floats).dtype == np.uint8
    for wrong in (
        np.zeros((4, 4, 3), np.uint8),
        np.full((1, 2, 2, 3), 255.0),
        np.zeros((0, 2, 2, 3)),
    ):
        with pytest.raises(VideoError, match=r"expected frames .*\[T, Y, X, 3\]"):
            frames_of(wrong)
