"""Files that are made to hurt: an answer or a refusal in one line, no other file opened."""

from __future__ import annotations

import io
import random
import socket
from pathlib import Path

import pytest
from clips import number_of
from damaged_videos import BOMBS, film, many_frames, names_another, sound

from mtmd.base.errors import VideoError
from mtmd.clip.video.choose import Evenly, chosen
from mtmd.clip.video.decode import open_video
from mtmd.clip.video.footage import VideoFile
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.clip.video.limits import VideoLimits

LIMITS = VideoLimits(max_pixels=4_000_000, cpu_s=20)
COUNT = 120


def outcome(data: bytes) -> str:
    """What became of it, in a worker: frames, or one line. Anything else fails."""
    try:
        with VideoFile(data, LIMITS, "film", isolate=True).opened() as reader:
            facts = reader.facts
            requested = sorted({0, facts.frames // 2, facts.frames - 1})
            taken = list(reader.take(requested, (min(facts.width, 64), min(facts.height, 64))))
            return "frames" if taken else "nothing"
    except VideoError as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return "crashed" if "crashed" in str(error) else "refused"


def test_damaged_ones():
    rng = random.Random(1)
    match = [(what, outcome(data)) for what, data in (film(rng) for _ in range(COUNT))]
    outcomes = {result for _, result in match}
    assert outcomes <= {"frames", "refused"}, [
        f for f in match if f[1] not in ("frames", "refused")
    ]
    assert outcomes == {"frames", "refused"}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    assert outcome(BOMBS[name](random.Random(0))) in ("frames", "refused")


def test_a_small_file_that_says_it_has_millions_of_frames_is_bounded():
    """Here and in the worker: what is noted of each there, and how many are asked for."""
    request = FrameRequest(fps=240, max_frames=10**12, start=3600)
    with VideoFile(many_frames(3_000_000), LIMITS, isolate=True).opened() as reader:
        facts, part = reader.facts, reader.part(request.start, request.end)
        assert facts.frames == 3_000_000 and facts.frames - part.first == part.frames
        indices, notes = chosen(Evenly(), facts, part, request, 1024, "limit")
    assert (len(indices), indices[0], indices[-1]) == (1024, part.first, 2_999_999)
    assert notes == ("1024 of 16384 or more frames: limit",)


def test_more_frames_than_any_video_has_are_refused(monkeypatch):
    monkeypatch.setattr("mtmd.clip.video.limits.MAX_FRAMES", 10)
    for index in (0, 4):  # by its table, and by its packets
        with pytest.raises(VideoError, match="found 12 frames, expected at most 10; cut"):
            open_video(io.BytesIO(sound(index)))


def test_a_film_that_lies_in_another_file_is_not_read_from_there(tmp_path, monkeypatch):
    """Neither opened nor asked for: with the frames of this very file it would have a picture."""
    other = tmp_path / "other.mp4"
    other.write_bytes(sound(0))
    requested = []
    monkeypatch.setattr(
        "mtmd.clip.video.container.refuse_other_files", lambda *a: requested.append(a) or 1 / 0
    )
    data = names_another(str(other).encode())
    try:
        reader = open_video(io.BytesIO(data))
        ((_, _, pixels),) = reader.take([3], (96, 64))
        assert number_of(pixels) == 3  # its own frames
    except VideoError:
        pass
    assert not requested


@pytest.mark.parametrize("kind", ["hls", "concat", "rtsp", "dash"])
def test_playlists_reach_no_other_file_and_no_address(kind, tmp_path):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(sound(0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port = server.getsockname()[1]
        text = {
            "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret}\n#EXTINF:1,\nhttp://127.0.0.1:{port}/\n#EXT-X-ENDLIST\n",
            "concat": f"ffconcat version 1.0\nfile '{secret}'\nfile 'http://127.0.0.1:{port}/a'\n",
            "rtsp": f"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video {port} RTP/AVP 96\n",
            "dash": f'<?xml version="1.0"?><MPD><Period><BaseURL>http://127.0.0.1:{port}/</BaseURL></Period></MPD>',
        }[kind]
        for data in (text.encode(), b"\0\0\0\x14ftypisom" + bytes(8) + text.encode()):
            path = tmp_path / "film.mp4"
            path.write_bytes(data)
            for source in (data, Path(path)):
                with pytest.raises(VideoError), VideoFile(source).opened() as reader:
                    list(reader.take([0], (8, 8)))
        with pytest.raises(TimeoutError):
            server.accept()
