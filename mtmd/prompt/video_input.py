"""Describes whatever a user calls a video, made into footage within limits: paths, bytes, open
files, arrays, lists of pictures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import ImageError, OptionError, VideoError
from mtmd.base.isolation.limits import available as can_isolate
from mtmd.base.options import options_of
from mtmd.base.text import shortened
from mtmd.clip.image.decode import Picture, one_line
from mtmd.clip.video.animation import moves
from mtmd.clip.video.footage import Footage, GivenFrames, VideoFile, frames_of
from mtmd.clip.video.frame_request import FrameRequest, check_request
from mtmd.clip.video.limits import DEFAULT_LIMITS, VideoLimits
from mtmd.clip.video.signatures import HEAD_BYTES, is_container, video_format
from mtmd.clip.video.video import VideoFacts
from mtmd.prompt.data_url import URL_BYTES_MAX, base64_of, decoded, read_data_url
from mtmd.prompt.fetch_url import RemoteMedia
from mtmd.prompt.load_image import ImageSource, load_image
from mtmd.prompt.picture_paths import VIDEO_SUFFIXES, check_path, user_path
from mtmd.prompt.url_kinds import is_address, is_data_url, url_name

__all__ = [
    "Footage",
    "FrameRequest",
    "Requested",
    "VideoFacts",
    "VideoInput",
    "VideoLimits",
    "VideoSource",
    "can_read_videos",
    "check_video",
    "first_frame",
    "is_video",
    "is_video_data",
    "load_video",
    "request_of",
    "sent_video",
    "video_format",
    "video_type",
]

VideoSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | BinaryIO | NDArray[Any] | Sequence[ImageSource | Picture] "
    "| Footage"
)
REQUEST_NAMES = tuple(options_of(FrameRequest))
MOVING_BYTES = 64 << 20  # a larger picture file is not looked through for more frames


@dataclass(frozen=True, eq=False)
class VideoInput:
    """A video, and which of its frames the model is to see.

    `source`: a path, the bytes of a file, a file open for reading bytes; an array [T, Y, X, 3] of
    uint8, or of floats from 0 to 1; or a list of pictures of one size. Of the last two, `rate` says
    how many frames there are a second (1 where nothing is said), or `times` the seconds of each.

    Of all: `fps` frames a second are seen, `max_frames` at most, those between `start` and `end`
    seconds; what is None is left to the model's own rule. `no_sound`: frames alone, also with a
    model that hears the sound of videos. Raises OptionError for what makes no sense; whether the
    source is a video is seen when it is read.
    """

    source: VideoSource
    fps: float | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None
    rate: float | None = None
    times: Sequence[float] | None = None
    no_sound: bool = False

    def __post_init__(self) -> None:
        check_request(self.request)
        if self.rate is not None and not 0 < _number("rate", self.rate) < 1e6:
            raise OptionError(f"rate: found {self.rate:g}, expected frames a second")
        if self.rate is not None and self.times is not None:
            raise OptionError("rate: found with times, expected one of them")

    @property
    def request(self) -> FrameRequest:
        return request_of({name: getattr(self, name) for name in REQUEST_NAMES})


@dataclass(frozen=True, eq=False)
class Requested:
    """A video of a conversation."""

    footage: Footage
    request: FrameRequest


def request_of(options: Mapping[str, Any]) -> FrameRequest:
    """Return the request for frames that stands beside a video in a message. Raises OptionError."""
    count = options.get("max_frames")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise OptionError(f"max_frames: found {count!r:.40}, expected a whole number")
    numbers = {
        name: None if options.get(name) is None else _number(name, options[name])
        for name in ("fps", "start", "end")
    }
    no_sound = options.get("no_sound")
    if no_sound is not None and not isinstance(no_sound, bool):
        raise OptionError(f"no_sound: found {no_sound!r:.40}, expected true or false")
    request = FrameRequest(max_frames=count, no_sound=bool(no_sound), **numbers)
    check_request(request)
    return request


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise OptionError(f"{name}: found {value!r:.40}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(
            f"{name}: found a number of hundreds of digits, expected seconds or a rate"
        ) from None


def is_video(source: object) -> bool:
    """Return whether a source of `describe` is a video and no picture: by what is in the file, not
    by its name. Pictures that move are. Of an address by its name: nothing is fetched for it.
    """
    if isinstance(source, VideoInput):
        return True
    if isinstance(source, str) and is_address(source):
        return url_name(source).lower().endswith(VIDEO_SUFFIXES)
    if isinstance(source, str) and is_data_url(source):
        try:
            source = decoded(base64_of(source)) if len(source) <= 2 * URL_BYTES_MAX else b""
        except ValueError:  # whoever opens it has words for that
            return False
    if isinstance(source, (str, os.PathLike)):
        return _is_video_file(user_path(os.fsdecode(os.fspath(source))))
    if isinstance(source, (bytes, bytearray, memoryview)):
        kind = video_format(bytes(source[:HEAD_BYTES]))
        return is_container(kind) or (len(source) <= MOVING_BYTES and moves(bytes(source), kind))
    if hasattr(source, "read") and hasattr(source, "seek"):
        file = cast(BinaryIO, source)
        try:
            at = file.tell()
            head = file.read(HEAD_BYTES)
            file.seek(at)
        except (OSError, ValueError):
            return False
        return isinstance(head, bytes) and is_container(video_format(head))
    return False


def _is_video_file(path: str) -> bool:
    try:
        if not Path(path).is_file():
            return False
        with Path(path).open("rb") as file:
            kind = video_format(file.read(HEAD_BYTES))
            if kind is None or is_container(kind):
                return kind is not None
            file.seek(0)
            return Path(path).stat().st_size <= MOVING_BYTES and moves(file.read(), kind)
    except (OSError, ValueError):  # whoever opens it has words for that
        return False


def load_video(
    source: VideoSource | VideoInput,
    limits: VideoLimits = DEFAULT_LIMITS,
    unnamed: str = "video",
    isolate: bool = False,
    load: Callable[..., Picture] = load_image,
    remote: RemoteMedia | None = None,
) -> Footage:
    """Footage of any source; nothing is decoded yet but pictures of a list, by `load`. `unnamed`:
    what messages call a video without a path or name. `remote`: addresses are fetched by it. Raises
    VideoError and ImageError.
    """
    if isinstance(source, VideoInput):
        rate, times, source = source.rate, source.times, source.source
    else:
        rate = times = None
    if isinstance(source, str) and is_data_url(source):
        source = read_data_url(source, min(limits.max_bytes, URL_BYTES_MAX), unnamed)
    elif isinstance(source, str) and is_address(source) and remote is not None:
        unnamed = url_name(source)
        source = remote(source, min(limits.max_bytes, URL_BYTES_MAX), kind="video")
    if isinstance(source, (str, os.PathLike)):
        path = user_path(os.fsdecode(os.fspath(source)))
        name = shortened(one_line(path)) if path else unnamed
        try:
            check_path(path, name)
            return VideoFile(path, limits, name, isolate)
        except VideoError:
            raise
        except ImageError as error:  # of the path
            raise VideoError(str(error).replace("expected a picture", "expected a video")) from None
        except OSError as error:
            raise VideoError(
                f"{name}: found a file that cannot be read ({error.strerror}), expected a video"
            ) from error
    if isinstance(source, (bytes, bytearray, memoryview)):
        return VideoFile(bytes(source), limits, unnamed, isolate)
    if isinstance(source, np.ndarray):
        frames = list(frames_of(source, unnamed))
        return GivenFrames(frames, _times(len(frames), rate, times), limits, unnamed)
    if isinstance(source, (list, tuple)):
        pixels = [
            one.pixels
            if isinstance(one, Picture)
            else load(one, unnamed=f"{unnamed}, frame {i}").pixels
            for i, one in enumerate(source, 1)
        ]
        return GivenFrames(pixels, _times(len(pixels), rate, times), limits, unnamed)
    if hasattr(source, "read"):
        file = cast(BinaryIO, source)
        own = getattr(file, "name", None)
        name = shortened(one_line(own)) if isinstance(own, str) and own else unnamed
        return VideoFile(_read(file, limits, name), limits, name, isolate)
    if hasattr(source, "opened"):
        return cast(Footage, source)
    raise VideoError(
        f"{unnamed}: found an object of type {type(source).__name__}, expected a path, bytes, an "
        "open file, an array [T, Y, X, 3] or a list of pictures"
    )


def sent_video(data: bytes, limits: VideoLimits, name: str) -> Footage:
    """A video file that somebody sent: read in a worker process, where the system has such. Raises
    VideoError.
    """
    return VideoFile(data, limits, name, can_isolate())


def check_video(data: bytes, limits: VideoLimits, name: str) -> VideoFacts:
    """Return what a video file that somebody sent says of itself, its first frame decoded. Raises
    VideoError and BusyError.
    """
    with sent_video(data, limits, name).opened() as reader:
        return reader.facts


def first_frame(data: bytes, limits: VideoLimits, name: str) -> Picture:
    """Return the first frame of a video file that somebody sent. Raises VideoError and
    BusyError.
    """
    with sent_video(data, limits, name).opened() as reader:
        size = reader.facts.width, reader.facts.height
        _, _, pixels = next(reader.take([0], size))
        return Picture(pixels, size)


def can_read_videos() -> bool:
    """Return whether the library is there that reads other than moving pictures."""
    return find_spec("av") is not None


def video_type(data: bytes) -> str | None:
    """The media type of a file that can be nothing but a video, None for any other."""
    kind = video_format(data[:HEAD_BYTES])
    if kind == "MKV":
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if kind == "MOV":
        return "video/quicktime" if data[8:12] == b"qt  " else "video/mp4"
    return "video/x-msvideo" if kind == "AVI" else None


def is_video_data(head: bytes) -> bool:
    """Return whether a file that begins so can be nothing but a video."""
    return is_container(video_format(head))


def _read(file: BinaryIO, limits: VideoLimits, name: str) -> bytes:
    try:
        data = file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise VideoError(
            f"{name}: found a file that cannot be read, expected one open for reading; open it "
            "anew with 'rb'"
        ) from error
    if not isinstance(data, bytes):
        raise VideoError(
            f"{name}: found a file open for text, expected bytes; open it with mode 'rb'"
        )
    return data


def _times(count: int, rate: float | None, times: Sequence[float] | None) -> Sequence[float]:
    return times if times is not None else [i / (rate or 1.0) for i in range(count)]
