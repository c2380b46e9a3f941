"""Values go to the other process and come back as they were; what is not known does not go."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import typing
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest

from mtmd.base import errors
from mtmd.clip.audio.limits import AudioLimits
from mtmd.clip.audio.recording import AudioFile, GivenSamples
from mtmd.clip.image.decode import Picture
from mtmd.clip.video.footage import VideoFile
from mtmd.clip.video.limits import VideoLimits
from mtmd.engine_process.codec import KNOWN, CodecError, Parts, decode, encode
from mtmd.engine_process.link import Link, LinkClosedError
from mtmd.engine_process.messages import Call
from mtmd.service.latencies import Histogram


def sent(value: Any) -> Any:
    """As the other process has it."""
    parts: Parts = []
    text = json.dumps(encode(value, parts))
    return decode(json.loads(text), [bytearray(part) for part in parts])


def example(hint: Any) -> Any:
    """A value of a field's type, with something in it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name]) for f in dataclasses.fields(hint)})
    if hint is Any or hint is errors.MtmdError:
        return "any"
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return tuple(example(a) for a in arguments if a is not Ellipsis)
    if origin is list:
        return [example(arguments[0])]
    if origin is dict:
        return {"a name": example(arguments[1])}
    if origin is np.ndarray:
        return np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    if arguments:  # one of several
        return example(arguments[0]) if arguments[0].__name__ != "View" else None
    if hint is Histogram:
        return Histogram.of((0.5, 1), (1, 2, 2), 1.25)
    return {str: 'text \ud800 "\n', int: -(1 << 60), float: 0.1, bool: True}[hint]


def same(one: Any, other: Any) -> bool:
    """Also of what does not compare by its values."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Histogram):
        return vars(one) == vars(other)
    if dataclasses.is_dataclass(one):
        names = [f.name for f in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, n), getattr(other, n)) for n in names
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", KNOWN)
def test_every_class_comes_back_as_it_was(name: str) -> None:
    value = example(KNOWN[name])
    assert same(sent(value), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, (2.5, [True, "list"]), ["list"]],
        {"a": {"b": [{}]}, "": ()},
        float("-inf"),
        (b"", b"bytes", b"\0" * 100),
        np.empty((0, 4), np.float32),
        np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1],
    ],
    ids=repr,
)
def test_plain_values(value: Any) -> None:
    assert same(sent(value), value)


def test_errors_are_of_the_same_class_with_what_they_tell() -> None:
    full = sent(errors.ContextError("too long", 70, 64, "shorten it"))
    assert type(full) is errors.ContextError and (full.tokens, full.context) == (70, 64)
    assert (str(full), full.advice) == ("too long; shorten it", "shorten it")
    busy = sent(errors.BusyError("later", 2.5))
    assert (type(busy), str(busy), busy.retry_after_s) == (errors.BusyError, "later", 2.5)
    for kind in (errors.MtmdError, errors.DeviceError, errors.VideoError, errors.LeftError):
        assert type(sent(kind("why"))) is kind

    class Own(errors.ModelError):
        pass

    assert type(sent(Own("why"))) is errors.ModelError, "the nearest that is known there"


def test_a_video_goes_with_its_bytes() -> None:
    video = sent(VideoFile(b"a film", VideoLimits(max_frames=5), "clip.mp4", True))
    assert (video.file.source, video.limits.max_frames, video.name, video.isolate) == (
        b"a film",
        5,
        "clip.mp4",
        True,
    )


def test_audio_goes_with_its_bytes_or_samples() -> None:
    audio = sent(AudioFile(b"a talk", AudioLimits(max_seconds=5), "talk.wav", True))
    assert (audio.file.source, audio.limits.max_seconds) == (b"a talk", 5)
    assert (audio.name, audio.isolate) == ("talk.wav", True)
    samples = sent(GivenSamples(np.arange(4, dtype=np.int16), 8000))
    assert samples.rate == 8000 and samples.samples.tolist() == [[0, 1, 2, 3]]


class Unknown:
    pass


@dataclasses.dataclass
class Answer:
    """Not the one of that name that is known."""


@pytest.mark.parametrize(
    "value",
    [Unknown(), Answer(), {1: "a"}, {3}, [Unknown()], ValueError("x"), np.array([Unknown()])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_known_does_not_go(value: Any) -> None:
    with pytest.raises(CodecError):
        encode(value, [])


@pytest.mark.parametrize(
    "text",
    [
        '["Unknown"]',
        '["Progress", "encode"]',
        '["Progress", "encode", 1, 2, 3]',
        "[]",
        '[["list"]]',
        '["os.system", "x"]',
        '["array", 0, "|u1", 9]',
        '["array", 0, "|O", 1]',
        '["array", 1, "|u1", 1]',
        '["bytes", 1]',
    ],
)
def test_what_was_not_written_by_the_other_side_is_refused(text: str) -> None:
    with pytest.raises(CodecError):
        decode(json.loads(text), [bytearray(b"12345678")])


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    ends = tuple(Link(end) for end in socket.socketpair())
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_pixels_and_files_go_beside_the_text(links: tuple[Link, Link]) -> None:
    picture = Picture(
        np.random.default_rng(1).integers(0, 256, (500, 700, 3), np.uint8), (700, 500)
    )
    call = Call(1, "submit", "me", (picture, picture, b"file"))
    thread = Thread(target=lambda: links[0].send([call]))
    thread.start()
    (received,) = links[1].receive()
    thread.join()
    first, second, data = received.arguments
    assert (received.number, received.name, received.owner) == (1, "submit", "me")
    assert data == b"file" and first.sha256 == picture.sha256
    second.pixels[:] = 0  # it may be written to
    assert first.pixels.any() and picture.pixels.any()


def test_nothing_is_no_message(links: tuple[Link, Link]) -> None:
    links[0].send([])
    links[0].send([b""])
    assert links[1].receive() == [b""]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IQ", 1, 11) + b'["Unknown"]',
        struct.pack("<IQ", 1, 1) + b"[",
        struct.pack("<I", 0),
        struct.pack("<IQ", 1, 9),
    ],
    ids=["unknown", "no JSON", "empty", "cut off"],
)
def test_what_is_no_message_ends_the_link(links: tuple[Link, Link], data: bytes) -> None:
    links[0]._socket.sendall(data)
    links[0].end()
    with pytest.raises(LinkClosedError):
        links[1].receive()
    with pytest.raises(LinkClosedError):
        links[0].send([b""])
