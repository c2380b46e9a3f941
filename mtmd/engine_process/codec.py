"""Values that go between the server's process and an engine's, as JSON and a list of parts: the
bytes of pictures, files and arrays.

What JSON has is written as it is, but for lists: each begins with a tag, which says what the others
make. Only the classes of a closed table are registered: those below, and those of their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from mtmd.base import errors
from mtmd.base.errors import MtmdError
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.audio.limits import AudioLimits
from mtmd.clip.audio.recording import AudioFile, GivenSamples
from mtmd.clip.image.decode import Picture
from mtmd.clip.media_file import MediaFile
from mtmd.clip.video.footage import VideoFile
from mtmd.clip.video.limits import VideoLimits
from mtmd.embedding.receipt import Embeddings, Ranking, TokenEmbeddings
from mtmd.engine_process import messages
from mtmd.events import Finished, Progress, TextPiece, ThinkingPiece, ToolCallPiece
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.prompt.conversation import RawPrompt
from mtmd.service.latencies import Histogram, Latencies
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.tools.tool import Toolbox

Parts = list[memoryview]
_ROOTS = (
    *(messages.Call, messages.Abandon, messages.Cancel, messages.Reply, messages.TicketEvent),
    *(messages.Beat, messages.Compiled, messages.Logged, messages.Failed),
    *(Progress, ThinkingPiece, TextPiece, ToolCallPiece, Finished),
    *(WarmupReport, ServiceStats, TokenCount, Latencies, Embeddings, TokenEmbeddings, Ranking),
    *(Picture, VideoLimits, AudioLimits, Instructions, RawPrompt, Toolbox, CheckpointFacts),
)
_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MtmdError)
}
_ERROR_FIELDS: dict[type[MtmdError], tuple[str, ...]] = {
    errors.ContextError: ("tokens", "context", "advice"),
    errors.BusyError: ("retry_after_s",),
    errors.EngineError: ("retry_after_s",),
}
_PLAIN = frozenset({str, int, float, bool, type(None)})


class CodecError(TypeError):
    """A value of a class that does not go to the other process, or what is no value."""


def _named(hint: Any) -> Iterator[Any]:
    """The classes that a hint names."""
    if get_origin(hint) is None:
        yield hint
    for argument in get_args(hint):
        yield from _named(argument)


def _known() -> dict[str, type]:
    """The dataclasses above, and those that their fields hold, by name."""
    known: dict[str, type] = {}
    waiting: list[Any] = list(_ROOTS)
    while waiting:
        kind = waiting.pop()
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        if known.setdefault(kind.__name__, kind) is not kind:
            raise CodecError(f"two classes are called {kind.__name__}")
        hints = get_type_hints(kind)
        waiting += (
            one
            for field in dataclasses.fields(kind)
            for one in _named(hints[field.name])
            if known.get(getattr(one, "__name__", "")) is not one
        )
    return known


KNOWN = _known()
"""Classes by the names under which they go."""


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def encode(value: Any, parts: Parts) -> Any:
    """Return what `json` can write; bytes of pictures and the like are added to `parts`. Raises
    CodecError for a class that is not registered.
    """
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return ["list", *_encoded(value, parts)]
    if kind is tuple:
        return ["tuple", *_encoded(value, parts)]
    name: str = kind.__name__
    if KNOWN.get(name) is kind:
        return [name, *_encoded([getattr(value, n) for n in _fields(kind)], parts)]
    if isinstance(value, MtmdError):
        return _error(value, parts)
    if isinstance(value, np.ndarray):
        return _array(value, parts)
    for base, write in _OTHERS.items():
        if isinstance(value, base):
            return write(value, parts)
    raise CodecError(f"a {kind.__module__}.{kind.__qualname__} does not go to another process")


def _encoded(values: Iterable[Any], parts: Parts) -> list[Any]:
    """Do what `encode` does to each, without a call for every number of a receipt."""
    return [one if type(one) in _PLAIN else encode(one, parts) for one in values]


def decode(value: Any, parts: Sequence[bytearray]) -> Any:
    """Return what `encode` was given. Arrays share the memory of their part. Raises CodecError for
    what `encode` has not written.
    """
    if isinstance(value, dict):
        return {name: decode(one, parts) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    try:
        tag, *items = value
        if tag in _BYTES:
            return _BYTES[tag](parts, *items)
        items = [one if type(one) in _PLAIN else decode(one, parts) for one in items]
        if kind := KNOWN.get(tag):
            if len(items) != len(_fields(kind)):
                raise ValueError(f"{len(items)} fields of {tag}")
            return kind(*items)
        return _MADE[tag](items)
    except (LookupError, ValueError, TypeError) as error:
        raise CodecError(f"found {str(value)[:60]!r}, expected a value: {error}") from error


def _mapping(value: Any, parts: Parts) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in value):
        raise CodecError("a mapping goes to another process by names alone")
    return {name: encode(one, parts) for name, one in value.items()}


def _error(error: MtmdError, parts: Parts) -> list[Any]:
    """Return the error by its class, or the nearest above it that is known."""
    kind = next(k for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k)
    names = _ERROR_FIELDS.get(kind, ())
    text = error.text if isinstance(error, errors.ContextError) else str(error)
    return [kind.__name__, text, *[encode(getattr(error, name), parts) for name in names]]


def _part(data: memoryview, parts: Parts) -> int:
    """Add `data`; return its number."""
    parts.append(data)
    return len(parts) - 1


def _array(array: Any, parts: Parts) -> list[Any]:
    if array.dtype.hasobject:
        raise CodecError("an array of objects does not go to another process")
    whole = np.ascontiguousarray(array)
    data = whole.reshape(-1).view(np.uint8).data
    return ["array", _part(data, parts), whole.dtype.str, *array.shape]


def _array_in(parts: Sequence[bytearray], number: int, dtype: str, *shape: int) -> Any:
    return np.frombuffer(parts[number], np.dtype(dtype)).reshape(shape)


def _bytes(data: Any, parts: Parts) -> list[Any]:
    return ["bytes", _part(memoryview(data).cast("B"), parts)]


def _bytes_in(parts: Sequence[bytearray], number: int) -> bytes:
    return bytes(parts[number])


def _video(video: VideoFile, parts: Parts) -> list[Any]:
    """One that was sent: of a path the other process knows nothing."""
    facts = video.limits, video.name, video.isolate
    return ["VideoFile", _content(video.file, parts), *[encode(one, parts) for one in facts]]


def _audio(audio: AudioFile, parts: Parts) -> list[Any]:
    facts = audio.limits, audio.name, audio.isolate
    return ["AudioFile", _content(audio.file, parts), *[encode(one, parts) for one in facts]]


def _samples(audio: GivenSamples, parts: Parts) -> list[Any]:
    return ["GivenSamples", _array(audio.samples, parts), audio.rate]


def _content(file: MediaFile, parts: Parts) -> list[Any]:
    if not isinstance(file.source, bytes):
        raise CodecError("a video, or audio, goes to another process by its bytes alone")
    return _bytes(file.source, parts)


def _histogram(histogram: Histogram, parts: Parts) -> list[Any]:
    facts = histogram.bounds, histogram.counts, histogram.total_s
    return ["Histogram", *[encode(one, parts) for one in facts]]


_OTHERS: dict[type, Callable[[Any, Parts], Any]] = {
    Histogram: _histogram,
    VideoFile: _video,
    AudioFile: _audio,
    GivenSamples: _samples,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    Mapping: _mapping,
    np.generic: lambda value, _: value.item(),
    str: lambda value, _: str(value),
}
_BYTES: dict[str, Callable[..., Any]] = {"array": _array_in, "bytes": _bytes_in}
_MADE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "VideoFile": lambda items: VideoFile(*items),
    "AudioFile": lambda items: AudioFile(*items),
    "GivenSamples": lambda items: GivenSamples(*items),
    "Histogram": lambda items: Histogram.of(*items),
    **{name: lambda items, kind=kind: kind(*items) for name, kind in _ERRORS.items()},  # type: ignore[misc]
}
