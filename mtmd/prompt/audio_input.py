"""Describes whatever a user calls audio, made into a recording within limits: paths, bytes, open
files, arrays with a rate.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import AudioError, ImageError
from mtmd.base.isolation.limits import available as can_isolate
from mtmd.base.text import shortened
from mtmd.clip.audio.audio import Audio, AudioFacts
from mtmd.clip.audio.limits import DEFAULT_LIMITS, AudioLimits
from mtmd.clip.audio.recording import AudioFile, GivenSamples, Recording
from mtmd.clip.audio.signatures import HEAD_BYTES, TYPES, audio_format, container_format
from mtmd.clip.image.decode import one_line
from mtmd.prompt.data_url import URL_BYTES_MAX, base64_of, decoded, read_data_url
from mtmd.prompt.fetch_url import RemoteMedia
from mtmd.prompt.picture_paths import AUDIO_SUFFIXES, check_path, user_path
from mtmd.prompt.url_kinds import is_address, is_data_url, url_name
from mtmd.prompt.video_input import is_video

__all__ = [
    "Audio",
    "AudioFacts",
    "AudioInput",
    "AudioLimits",
    "AudioSource",
    "Recording",
    "as_input",
    "audio_type",
    "check_audio",
    "is_audio",
    "is_audio_data",
    "is_pair",
    "is_recording",
    "kind_of",
    "load_audio",
    "sent_audio",
]

AudioSource: TypeAlias = "str | os.PathLike[str] | bytes | BinaryIO | NDArray[Any] | Recording"


@dataclass(frozen=True, eq=False)
class AudioInput:
    """Audio, for where it could be taken for something else, and samples with their `rate`.

    `source`: a path, the bytes of a file, a file open for reading bytes; or an array or tensor of
    samples [N] or [C, N], real numbers from -1 to 1 or whole ones of 8 to 32 bits, whose `rate`
    says how many there are a second. Raises AudioError for samples without a rate, and a rate
    without samples.
    """

    source: AudioSource
    rate: int | None = None

    def __post_init__(self) -> None:
        if _is_array(self.source) != (self.rate is not None):
            value = "samples without a rate" if self.rate is None else "a rate beside a file"
            raise AudioError(
                f"audio: found {value}, expected AudioInput(samples, rate=16000), or a file alone"
            )


def as_input(source: Any) -> AudioInput:
    """Return what is given as audio as an input; a pair is samples and their rate. Raises
    AudioError.
    """
    if isinstance(source, AudioInput):
        return source
    return AudioInput(source[0], int(source[1])) if is_pair(source) else AudioInput(source)


def is_audio(source: object) -> bool:
    """Return whether a source of `describe` is audio: by what is in the file, not by its name. Of
    an address by its name: nothing is fetched for it. Containers of videos are no audio here.
    """
    if isinstance(source, (AudioInput, AudioFile, GivenSamples)) or is_pair(source):
        return True
    if isinstance(source, str) and is_address(source):
        return url_name(source).lower().endswith(AUDIO_SUFFIXES)
    return audio_format(_head(source)) is not None


def kind_of(source: object) -> str:
    """Return what a source of `describe` is: "image", "video" or "audio"."""
    if is_audio(source):
        return "audio"
    return "video" if is_video(source) else "image"


def _head(source: object) -> bytes:
    """Return the first bytes of a file; none of what is no file, or cannot be read."""
    try:
        if isinstance(source, str) and is_data_url(source):
            return decoded(base64_of(source[: 64 + 2 * HEAD_BYTES])[: HEAD_BYTES // 3 * 4])
        if isinstance(source, (str, os.PathLike)):
            path = Path(user_path(os.fsdecode(os.fspath(source))))
            if not path.is_file():
                return b""
            with path.open("rb") as file:
                return file.read(HEAD_BYTES)
        if isinstance(source, (bytes, bytearray, memoryview)):
            return bytes(source[:HEAD_BYTES])
        if hasattr(source, "read") and hasattr(source, "seek"):
            opened = cast(BinaryIO, source)
            at = opened.tell()
            head = opened.read(HEAD_BYTES)
            opened.seek(at)
            return head if isinstance(head, bytes) else b""
    except (OSError, ValueError):  # whoever opens it has words for that
        pass
    return b""


def load_audio(
    source: AudioSource | AudioInput,
    limits: AudioLimits = DEFAULT_LIMITS,
    unnamed: str = "audio",
    isolate: bool = False,
    remote: RemoteMedia | None = None,
) -> Recording:
    """A recording of any source; nothing is decoded yet. `unnamed`: what messages call audio
    without a path or name. `remote`: addresses are fetched by it. Raises AudioError.
    """
    rate: Any = None
    given: Any = source
    if isinstance(given, AudioInput) or is_pair(given):
        made = as_input(given)
        given, rate = made.source, made.rate
    if _is_array(given):
        if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
            raise AudioError(
                f"{unnamed}: found samples without a rate, expected AudioInput(samples, rate=16000)"
            )
        samples = given.detach().cpu().numpy() if hasattr(given, "detach") else np.asarray(given)
        return GivenSamples(samples, int(rate), limits, unnamed)
    if isinstance(given, str) and is_data_url(given):
        given = _read_data_url(given, limits, unnamed)
    elif isinstance(given, str) and is_address(given) and remote is not None:
        unnamed = url_name(given)
        try:
            given = remote(given, min(limits.max_bytes, URL_BYTES_MAX), kind="audio")
        except ImageError as error:
            raise AudioError(str(error)) from error
    if isinstance(given, (str, os.PathLike)):
        return _file_at(user_path(os.fsdecode(os.fspath(given))), limits, unnamed, isolate)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return AudioFile(bytes(given), limits, unnamed, isolate)
    if hasattr(given, "read"):
        own = getattr(given, "name", None)
        name = shortened(one_line(own)) if isinstance(own, str) and own else unnamed
        return AudioFile(_read(given, limits, name), limits, name, isolate)
    if hasattr(given, "audio") and hasattr(given, "sha256"):
        return cast(Recording, given)
    raise AudioError(
        f"{unnamed}: found an object of type {type(given).__name__}, expected a path, bytes, an "
        "open file, or AudioInput(samples, rate=16000)"
    )


def sent_audio(data: bytes, limits: AudioLimits, name: str) -> Recording:
    """An audio file that somebody sent: decoded in a worker process, where the system has such.
    Raises AudioError.
    """
    return AudioFile(data, limits, name, can_isolate())


def check_audio(data: bytes, limits: AudioLimits, name: str) -> AudioFacts:
    """Return what is known of an audio file that somebody sent, once it was decoded. Raises
    AudioError and BusyError.
    """
    return AudioFile(data, limits, name, can_isolate()).check()


def is_recording(source: object, name: str) -> bool:
    """Return whether it is audio: also in a container that videos come in, where `name` ends like
    that of a recording.
    """
    if is_audio(source):
        return True
    named = name.lower().endswith(AUDIO_SUFFIXES)
    return named and container_format(_head(source)) is not None


def is_audio_data(head: bytes) -> bool:
    """Return whether a file that begins so can be nothing but audio."""
    return audio_format(head[:HEAD_BYTES]) is not None


def audio_type(data: bytes) -> str | None:
    """The media type of a file that is said to be audio, None for one that is not."""
    kind = container_format(data[:HEAD_BYTES])
    return None if kind is None else TYPES[kind]


def _is_array(source: object) -> bool:
    """Return whether it is an array, or a tensor."""
    return hasattr(source, "ndim") and hasattr(source, "dtype") and hasattr(source, "shape")


def is_pair(source: object) -> bool:
    """Return whether it is (samples, rate)."""
    return (
        isinstance(source, tuple)
        and len(source) == 2
        and _is_array(source[0])
        and isinstance(source[1], (int, np.integer))
    )


def _file_at(path: str, limits: AudioLimits, unnamed: str, isolate: bool) -> Recording:
    name = shortened(one_line(path)) if path else unnamed
    try:
        check_path(path, name)
        return AudioFile(path, limits, name, isolate)
    except AudioError:
        raise
    except ImageError as error:  # of the path
        text = str(error).replace("expected a picture", "expected an audio file")
        text = text.replace("an audio file file", "an audio file")
        text = text.replace("picture file", "audio file")
        raise AudioError(text.replace("download the picture", "download the audio")) from None
    except OSError as error:
        raise AudioError(
            f"{name}: found a file that cannot be read ({error.strerror}), expected audio"
        ) from error


def _read_data_url(url: str, limits: AudioLimits, name: str) -> bytes:
    try:
        return read_data_url(url, min(limits.max_bytes, URL_BYTES_MAX), name)
    except ImageError as error:
        text = str(error).replace("data:image/png", "data:audio/wav")
        raise AudioError(text.replace("scale the picture down", "cut the audio")) from None


def _read(file: Any, limits: AudioLimits, name: str) -> bytes:
    try:
        data = file.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        raise AudioError(
            f"{name}: found a file that cannot be read, expected one open for reading; open it "
            "anew with 'rb'"
        ) from error
    if not isinstance(data, bytes):
        raise AudioError(
            f"{name}: found a file open for text, expected bytes; open it with mode 'rb'"
        )
    return data
