"""Files and given frames, in this process and in another."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import asdict
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest
from clips import animation, number_of, numbered, video
from PIL import Image

from mtmd.base.cancellation import cancel_if
from mtmd.base.errors import LeftError, OptionError, VideoError
from mtmd.base.isolation.fork_server import Reason, WorkerFailed
from mtmd.base.isolation.limits import Limits
from mtmd.clip.video.footage import GivenFrames, VideoFile, frames_of
from mtmd.clip.video.isolated import MEMORY_BYTES, MEMORY_BYTES_A_PIXEL, Remote, no_more_files
from mtmd.clip.video.limits import VideoLimits
from mtmd.clip.video.video import Part, VideoFacts


def seen(footage, *indices):
    """(number, time, what stands in the frame), and the facts."""
    with footage.opened() as reader:
        size = reader.facts.width, reader.facts.height
        taken = [(i, round(t, 2), number_of(f)) for i, t, f in reader.take(indices, size)]
        return taken, reader.facts


@pytest.fixture(scope="module")
def clip() -> bytes:
    return video(36)


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "in a worker"])
def test_frames_of_a_file(clip, isolate, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip)
    for source in (clip, path):
        taken, facts = seen(VideoFile(source, isolate=isolate), 0, 18, 35)
        assert taken == [(0, 0, 0), (18, 1.5, 18), (35, 2.92, 35)] and facts.frames == 36
    assert VideoFile(clip).sha256 == VideoFile(path).sha256


def test_frames_are_asked_for_more_than_once_of_one_worker(clip):
    with VideoFile(clip, isolate=True).opened() as reader:
        for requested in ([3, 5], [1], [0, 30]):
            assert [i for i, *_ in reader.take(requested, (48, 32))] == requested


@pytest.mark.parametrize("isolate", [False, True], ids=["here", "in a worker"])
@pytest.mark.parametrize("format", ["mp4", "matroska", "PNG"])
def test_parts_of_uneven_videos_are_those_of_their_times(format, isolate):
    times = [0.0, 0.1, 0.2, 1.0, 1.1, 3.0, 3.05, 4.0]
    data = uneven_png(times) if format == "PNG" else video(8, times=times, format=format)
    with VideoFile(data, isolate=isolate).opened() as reader:
        part = reader.part(1.0, 3.02)
        assert (part.first, part.frames) == (3, 3)
        assert part.seconds == pytest.approx(2.05) and part.fps == pytest.approx(3 / 2.05)
        ((index, seconds, pixels),) = reader.take([part.first], (96, 64))
        assert (index, round(seconds, 2), number_of(pixels)) == (3, 1.0, 3)
        with pytest.raises(OptionError, match="start: found 60 s"):
            reader.part(60, None)


def uneven_png(times: list[float]) -> bytes:
    frames = [Image.fromarray(numbered(n)) for n in range(len(times))]
    gaps = [round((b - a) * 1000) for a, b in pairwise([*times, times[-1] + 0.5])]
    file = io.BytesIO()
    frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=gaps)
    return file.getvalue()


def test_parts_of_given_frames_are_those_of_their_times():
    given = GivenFrames([numbered(n) for n in range(4)], [100, 101, 105, 106])
    assert given.part(101, None) == Part(1, 101.0, 3, pytest.approx(3 / 7), pytest.approx(7.0))
    assert given.part(102, 103).first == 1 and given.part(None, None).begins == 100
    with pytest.raises(OptionError, match=r"start: found 108 s, expected less .* 108\.0 s"):
        given.part(108, None)


def test_moving_pictures_in_a_worker():
    taken, _ = seen(VideoFile(animation("WEBP"), isolate=True), 0, 7)
    assert [n for *_, n in taken] == [0, 7]


def test_a_worker_has_no_more_time_than_it_may(clip):
    """A second of the processor's: limits are whole ones."""
    over_and_over = [*range(36)] * 1000
    with pytest.raises(VideoError, match=r"takes more than 0\.01 s of processor time"):
        seen(VideoFile(clip, VideoLimits(cpu_s=0.01), isolate=True), *over_and_over)


def test_errors_of_a_worker_are_those_of_here(clip):
    for isolate in (False, True):
        with pytest.raises(VideoError, match=r"^x: found frames of 96 x 64 pixels, expected at"):
            seen(VideoFile(clip, VideoLimits(max_pixels=10), "x", isolate))


@pytest.mark.parametrize("error", [KeyError, ValueError, TypeError])
def test_a_mistake_of_who_takes_frames_is_not_blamed_on_the_file(clip, error):
    footage = VideoFile(clip, isolate=True)
    with pytest.raises(error, match="mine"), footage.opened() as reader:
        for _frame in reader.take([0, 1], (96, 64)):
            raise error("mine")


def test_a_video_is_read_no_further_when_who_asked_has_left(clip):
    left, taken = [], []
    cancel_if(lambda: bool(left))
    try:
        with pytest.raises(LeftError), VideoFile(clip, isolate=True).opened() as reader:
            for index, *_ in reader.take(list(range(36)), (96, 64)):
                taken.append(index)
                left.append(index)
    finally:
        cancel_if(None)
    assert taken == [0] and not reader._worker._end.alive


class Says:
    """In place of a worker: these messages, one after another, then it has no memory left."""

    def __init__(self, *messages: bytes):
        self._messages, self.limits = iter(messages), Limits(300.0, 4 << 30)

    def send(self, *_, **__):
        pass

    def receive(self, _):
        for message in self._messages:
            return message
        raise WorkerFailed(Reason.MEMORY, self.limits)

    def receive_into(self, room):
        return len(room)


FACTS = asdict(VideoFacts(2, 1.0, 2.0, 4, 4, "h264"))


@pytest.mark.parametrize(
    "messages",
    [
        [b"no JSON"],
        [b"[" * 50_000],
        [json.dumps({**FACTS, "frames": 0}).encode()],
        [json.dumps({**FACTS, "fps": inf}).encode()],
        [json.dumps({**FACTS, "frames": 1 << 40}).encode()],
        [json.dumps({**FACTS, "width": 1 << 20, "height": 1 << 20}).encode()],
        [
            json.dumps(FACTS).encode(),
            b'{"first": 1, "begins": 0, "frames": 2, "fps": 1, "seconds": 1}',
        ],
        [json.dumps(FACTS).encode(), b'{"index": 7, "time": 0}'],
        [json.dumps(FACTS).encode(), b'{"index": 0, "time": NaN}'],
        [json.dumps(FACTS).encode(), *[b'{"index": 0, "time": 0}'] * 2],
    ],
    ids=[
        "no JSON",
        "too deep",
        "no frames",
        "an endless rate",
        "too many frames",
        "too large frames",
        "a part too long",
        "another frame",
        "no time",
        "a frame too many",
    ],
)
def test_what_a_worker_says_is_checked(messages):
    with pytest.raises(VideoError, match=r"senselessly|expected at most"):
        remote = Remote(Says(*messages), 0, 1, VideoLimits(), "x")
        if b"first" in messages[-1]:
            remote.part(1, 2)
        list(remote.take([0], (4, 4)))


def test_the_limit_that_is_told_is_the_one_that_was_kept(clip):
    with VideoFile(clip, isolate=True).opened() as reader:
        pixels = reader.facts.width * reader.facts.height
        assert reader._worker.limits.memory_bytes == MEMORY_BYTES + MEMORY_BYTES_A_PIXEL * pixels
    for reported, words in (
        (b'{"memory": 734003200}', "700 MiB"),
        (b'{"memory": 1e12}', "4,096 MiB"),
    ):
        with pytest.raises(VideoError, match=f"takes more than {words} of memory to read"):
            Remote(Says(reported), 0, 1, VideoLimits(), "x")


def test_each_video_has_a_worker_of_its_own(clip):
    pids = []
    for _ in range(2):
        with VideoFile(clip, isolate=True).opened() as reader:
            pids.append(reader._worker._number)
    assert len(set(pids)) == 2


def test_frames_that_are_here_stay_when_their_worker_ends(clip):
    with VideoFile(clip, isolate=True).opened() as reader:
        taken = list(reader.take([0, 5], (96, 64)))
        reader._worker.end()
    assert [i for i, *_ in taken] == [0, 5]


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
    taken, facts = seen(given, 2, 9)
    assert (facts.frames, facts.fps, facts.seconds, facts.codec) == (10, 4, 2.5, "arrays")
    assert taken == [(2, 0.5, 2), (9, 2.25, 9)]
    assert given.sha256 != GivenFrames(frames, range(10)).sha256


@pytest.mark.parametrize(
    ("frames", "times", "words"),
    [
        ([], [], "at least one"),
        ([numbered(0)], [], "a time for each"),
        ([numbered(0)] * 2, [1, 1], "do not ascend"),
        ([numbered(0)] * 2, [0, 5e-324], "do not ascend"),
        ([numbered(0), numbered(0, 48)], [0, 1], "all of one size"),
    ],
    ids=["none", "no times", "one time twice", "no time between", "two sizes"],
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
