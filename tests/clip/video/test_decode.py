"""Files of every kind, sampled: the frames that were asked for, at their times."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from clips import animation, number_of, numbered, video
from PIL import Image

from mtmd.base.errors import VideoError
from mtmd.clip.video import animation as animations
from mtmd.clip.video.animation import moves
from mtmd.clip.video.decode import open_video
from mtmd.clip.video.limits import VideoLimits

KINDS = {
    "mp4, h264 with b-frames": {"options": {"bf": "2"}},
    "mov, mpeg4": {"format": "mov", "codec": "mpeg4"},
    "mkv, h264": {"format": "matroska"},
    "webm, vp9": {"format": "webm", "codec": "libvpx-vp9"},
    "webm, vp8": {"format": "webm", "codec": "libvpx"},
    "avi, mpeg4": {"format": "avi", "codec": "mpeg4"},
    "avi, mjpeg": {"format": "avi", "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "one key frame": {"gop": 1000},
}


def sampled(data: bytes, indices: list[int]) -> list[tuple[int, float, int]]:
    reader = open_video(io.BytesIO(data))
    size = reader.facts.width, reader.facts.height
    return [(i, round(t, 2), number_of(pixels)) for i, t, pixels in reader.take(indices, size)]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_asked_for(kind):
    requested = [0, 3, 17, 18, 40, 47]
    assert sampled(video(**KINDS[kind]), requested) == [(i, round(i / 12, 2), i) for i in requested]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_pictures_that_move(format):
    data = animation(format)
    reader = open_video(io.BytesIO(data))
    assert (reader.facts.frames, reader.facts.seconds) == (12, pytest.approx(3.0))
    assert sampled(data, [0, 5, 11]) == [(0, 0.0, 0), (5, 1.25, 5), (11, 2.75, 11)]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_frames_of_pictures_that_move_are_taken_any_number_of_times(format):
    reader = open_video(io.BytesIO(animation(format)))
    size = reader.facts.width, reader.facts.height
    for requested in ([0, 3], [0, 3], [11], [1]):
        assert [number_of(pixels) for *_, pixels in reader.take(requested, size)] == requested


@pytest.mark.parametrize(
    ("stated", "frames"), [(10, 4), (2, 2), (0, 1)], ids=["more", "fewer", "none"]
)
def test_a_png_has_the_frames_that_are_there_and_that_it_says_it_has(stated, frames):
    data = bytearray(animation("PNG", 4))
    at = data.index(b"acTL") + 4
    data[at : at + 4] = stated.to_bytes(4, "big")
    data[at + 8 : at + 12] = crc32(data[at - 4 : at + 8]).to_bytes(4, "big")
    assert moves(bytes(data), "PNG") == (frames > 1)
    if frames > 1:
        assert open_video(io.BytesIO(data)).facts.frames == frames
        assert [n for *_, n in sampled(bytes(data), list(range(frames)))] == list(range(frames))


def wide_gif(width: int) -> bytes:
    """Of 96 x 64 by its header, the second of its frames `width` wide."""
    file = io.BytesIO()
    for frame in (numbered(0), numbered(1, width)):
        Image.fromarray(frame).save(parts := io.BytesIO(), "GIF")
        whole = parts.getvalue()
        if not file.tell():
            file.write(whole[:-1])
            continue
        table = 13 + (3 << ((whole[10] & 7) + 1))
        at = whole.index(b",", table)  # its colours become the frame's own
        file.write(
            whole[at : at + 9] + bytes([0x80 | whole[at + 9] | whole[10] & 7]) + whole[13:table]
        )
        file.write(whole[at + 10 :])
    return file.getvalue()


def test_frames_of_a_gif_that_lie_outside_of_its_screen_have_room_and_are_limited():
    data = wide_gif(160)
    reader = open_video(io.BytesIO(data))
    assert (reader.facts.width, reader.facts.height) == (160, 64)
    first, second = (pixels for *_, pixels in reader.take([0, 1], (160, 64)))
    assert (number_of(first), number_of(second)) == (0, 1)
    assert first[:, 96:].min() == 255 and second[:, 96:].max() < 255
    with pytest.raises(
        VideoError, match=r"found frames of 160 x 64 pixels, expected at most 6,144"
    ):
        open_video(io.BytesIO(data), VideoLimits(max_pixels=96 * 64))


def test_a_picture_that_moves_of_which_no_frame_is_there_that_was_asked_for_is_refused():
    data = animation("PNG")
    reader = open_video(io.BytesIO(data[: data.rindex(b"fcTL") + 34]))
    assert [i for i, *_ in reader.take([10, 11], (96, 64))] == [10]
    with pytest.raises(VideoError, match="found a damaged PNG"):
        list(reader.take([11], (96, 64)))


def test_a_picture_of_one_frame_is_no_video():
    with pytest.raises(VideoError, match="of one frame"):
        open_video(io.BytesIO(animation("GIF", frames=1)))


def test_facts():
    facts = open_video(io.BytesIO(video(48, fps=12))).facts
    assert (facts.frames, facts.fps, facts.seconds) == (48, pytest.approx(12), pytest.approx(4))
    assert (facts.width, facts.height, facts.codec, facts.notes) == (96, 64, "h264", ())


@pytest.mark.parametrize("format", ["mp4", "matroska"])
def test_frames_at_uneven_times_are_shown_at_theirs(format):
    times = [0.0, 0.1, 0.2, 1.0, 1.1, 3.0, 3.05, 4.0]
    data = video(8, times=times, format=format)
    assert "variable frame rate" in open_video(io.BytesIO(data)).facts.notes
    assert sampled(data, list(range(8))) == [(i, t, i) for i, t in enumerate(times)]


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turned_videos_are_shown_upright(degrees):
    data = video(2, rotation=degrees)
    reader = open_video(io.BytesIO(data))
    facts = reader.facts
    assert (facts.width, facts.height) == ((96, 64) if degrees == 180 else (64, 96))
    assert any(n.startswith("rotated upright") for n in facts.notes)
    ((_, _, turned),) = reader.take([1], (facts.width, facts.height))
    ((_, _, plain),) = open_video(io.BytesIO(video(2))).take([1], (96, 64))
    assert np.abs(turned.astype(int) - np.rot90(plain, degrees // 90)).mean() < 3


def test_ten_bits_are_told():
    data = video(3, codec="libx265", pix_fmt="yuv420p10le", options={"x265-params": "log-level=0"})
    assert open_video(io.BytesIO(data)).facts.notes == ("10 bit, shown as 8",)
    assert sampled(data, [2])[0][2] == 2


def test_hdr_is_told():
    data = video(2, color_trc=16)
    assert open_video(io.BytesIO(data)).facts.notes == ("HDR (PQ), shown without tone mapping",)


def test_transparent_parts_are_laid_on_white():
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mov") as out:
        stream = out.add_stream("qtrle", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "argb"
        clear = np.zeros((32, 32, 4), np.uint8)
        for _ in range(2):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(clear, format="argb")))
        out.mux(stream.encode())
    reader = open_video(io.BytesIO(file.getvalue()))
    ((_, _, pixels),) = reader.take([1], (32, 32))
    assert reader.facts.notes == ("transparent parts laid on white",) and pixels.min() == 255


def test_frames_are_made_smaller_on_the_way():
    ((_, _, pixels),) = open_video(io.BytesIO(video(4))).take([3], (48, 32))
    assert pixels.shape == (32, 48, 3)


def test_a_stream_recorded_without_its_length_is_read_through():
    """As browsers write WebM: no duration, no index."""
    data = video(30, fps=10, format="webm", codec="libvpx", container_options={"live": "1"})
    facts = open_video(io.BytesIO(data)).facts
    assert (facts.frames, facts.seconds) == (30, pytest.approx(3, abs=0.15))
    assert [n for *_, n in sampled(data, [0, 12, 29])] == [0, 12, 29]


def test_a_file_that_ends_early_gives_what_there_is():
    data = video(48, index_first=True)
    got = sampled(data[: len(data) * 2 // 3], list(range(0, 48, 4)))
    assert 0 < len(got) < 12 and all(i == n for i, _, n in got)


def test_a_file_without_an_index_that_ends_early_is_told():
    data = video(48, format="matroska")
    facts = open_video(io.BytesIO(data[: len(data) // 2])).facts
    assert 0 < facts.frames < 48
    assert facts.notes == (f"ends at {facts.seconds:.1f} s, not at 4.0 s as it says",)


def test_a_file_that_ends_before_its_index_is_told_so():
    with pytest.raises(VideoError, match="found a truncated MP4 or QuickTime video"):
        open_video(io.BytesIO(video(12)[:900]))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (VideoLimits(max_pixels=96 * 63), "expected at most 6,048 in all"),
        (VideoLimits(max_seconds=3), "found 4 seconds, expected at most 3"),
    ],
    ids=["pixels", "seconds"],
)
def test_limits(limits, words):
    with pytest.raises(VideoError, match=words):
        open_video(io.BytesIO(video()), limits)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "plain text"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "plain text"),
        (b"%PDF-1.7", "plain text"),
        (b"\0\0\0\x18ftypisom" + bytes(200), "damaged|no frame|without pictures"),
        (b"\x1aE\xdf\xa3" + bytes(200), "damaged|no frame|without pictures"),
    ],
    ids=["playlist", "list of files", "document", "header alone", "zeros"],
)
def test_what_is_no_video_is_refused_in_one_line(data, words):
    with pytest.raises(VideoError, match=words) as error:
        open_video(io.BytesIO(data), name="a\nb.mp4")
    assert "\n" not in str(error.value)


def test_without_the_library_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr("mtmd.clip.video.container.find_spec", lambda _: None)
    with pytest.raises(VideoError, match=r"clip.mp4: found an MP4 .*pip install.*\[video\]"):
        open_video(io.BytesIO(b"\0\0\0\x18ftypisom" + bytes(99)), name="clip.mp4")
    assert open_video(io.BytesIO(animation("GIF"))).facts.frames == 12


def test_interlaced_frames_show_one_field():
    data = video(4, options={"x264-params": "interlaced=1"})
    reader = open_video(io.BytesIO(data))
    assert "interlaced" in reader.facts.notes
    ((_, _, pixels),) = reader.take([2], (96, 64))
    lines = pixels.astype(int)
    between = (lines[0:-2:2] + lines[2::2]) // 2
    assert np.abs(lines[1:-1:2] - between).max() <= 1


def test_pixels_that_are_not_square():
    data = video(2, sample_aspect_ratio=Fraction(4, 3))
    facts = open_video(io.BytesIO(data)).facts
    assert (facts.width, facts.height) == (128, 64)
    assert facts.notes == ("pixels that are not square: 96 x 64 in the file",)


@pytest.mark.parametrize("stated", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_number_of_frames_that_was_never_filled_in_is_not_believed(stated):
    data = bytearray(video(24, format="avi", codec="mpeg4"))
    for at in (data.index(b"avih") + 8 + 16, data.index(b"strh") + 8 + 32):
        data[at : at + 4] = stated.to_bytes(4, "little")
    assert open_video(io.BytesIO(data)).facts.frames == 24


def test_without_timestamps_frames_are_counted(monkeypatch):
    monkeypatch.setattr("mtmd.clip.video.container._stamp", lambda _: None)
    data = video(24)
    assert (
        "timestamps missing: taken from the frame rate" in open_video(io.BytesIO(data)).facts.notes
    )
    assert sampled(data, [0, 6, 23]) == [(0, 0.0, 0), (6, 0.5, 6), (23, 1.92, 23)]


class Looked(bytes):
    """Counts how often somebody looks into it."""

    times = 0

    def __getitem__(self, at: Any) -> Any:
        Looked.times += 1
        return super().__getitem__(at)


HEADS = {
    "GIF": b"GIF89a" + bytes([1, 0, 1, 0, 0, 0, 0]),
    "WEBP": b"RIFF\0\0\0\0WEBP",
    "PNG": b"\x89PNG\r\n\x1a\n",
}


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("GIF", b"\x21\xfe\x00"),  # an empty comment
        ("GIF", b"\x21\xfe" + b"\x01a" * 300 + b"\x00"),
        ("WEBP", b"ABCD\0\0\0\0"),
        ("PNG", b"\0\0\0\0abcdCRC!"),
    ],
)
def test_tiny_blocks_are_not_looked_through_for_a_second_frame(
    kind: str, block: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked in the process that answers, under the interpreter's lock."""
    monkeypatch.setattr(animations, "MAX_BLOCKS", 100)
    Looked.times = 0
    assert not moves(Looked(HEADS[kind] + block * 2000), kind)
    assert Looked.times <= 600


def test_a_second_frame_is_found_within_so_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    frames = [Image.effect_noise((200, 200), 80 + i) for i in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    data = file.getvalue()
    assert moves(data, "GIF") and len(data) > 64 * 255
    monkeypatch.setattr(animations, "MAX_BLOCKS", 20)
    assert not moves(data, "GIF"), "the first has more"


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("GIF", b"\x21\xfe\x00"),
        ("GIF", b"\x21\xfe" + b"\x01a" * 300 + b"\x00"),
        ("WEBP", b"ABCD\0\0\0\0"),
        ("PNG", b"\0\0\0\0tEXt\0\0\0\0"),
    ],
    ids=["GIF, many", "GIF, long", "WEBP", "PNG"],
)
def test_a_video_of_tiny_blocks_is_refused_before_all_are_looked_at(
    kind: str, block: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(animations, "MAX_BLOCKS_READ", 100)
    data = animation(kind, 4).removesuffix(b";")
    assert moves(data, kind) and open_video(io.BytesIO(data)).facts.frames == 4
    Looked.times = 0
    file = io.BytesIO(data + block * 2000)
    monkeypatch.setattr(file, "read", lambda *_: Looked(file.getvalue()), raising=False)
    with pytest.raises(VideoError, match=r"of more than 100 blocks, expected fewer; encode it"):
        animations.Animation(file, kind, VideoLimits(), "a")
    assert Looked.times <= 900
