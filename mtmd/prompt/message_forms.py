"""Messages as other libraries and OpenAI's interface write them, in this package's own form: a
picture as {"type": "image", "image": source}, a video as {"type": "video", "video": source}, audio
as {"type": "audio", "audio": source}.

Of the Python API's callers alone, who may name files; nothing that a server is sent comes here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtmd.base.errors import PromptError
from mtmd.base.options import defaults_of
from mtmd.clip.image.decode import Picture
from mtmd.prompt.audio_input import audio_type, kind_of
from mtmd.prompt.data_url import data_url
from mtmd.prompt.load_image import picture_url
from mtmd.prompt.url_kinds import is_data_url
from mtmd.prompt.video_input import FrameRequest, VideoInput, video_type

_TEXT = ("text", "input_text", "output_text")  # the last two: OpenAI's Responses
_FILES = ("file", "input_file")  # of OpenAI's chat and of its Responses
_BYTES = (bytes, bytearray, memoryview)
_OWN = ("image", "video", "audio")
_TYPES = {"video": video_type, "audio": audio_type}
_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}


def in_own_form(messages: Sequence[Any]) -> list[Any]:
    """The messages with every picture, video and audio where this package has it. Takes image_url,
    video_url, audio_url, input_audio, file_data and the types of OpenAI's Responses, beside these
    the source as "url", "path" or "base64", as transformers has it, or as "source", as Anthropic's
    interface does, and "images" beside a text, as Ollama has them. What is no such message or
    part stays, for whoever checks them.
    """
    return [with_parts(_with_images(message), _in_own_form) for message in messages]


def filled(messages: Sequence[Any], images: Sequence[Any]) -> list[Any]:
    """The messages, in own form, with `images` in the places of {"type": "image"} without a source
    (and of {"type": "video"} and {"type": "audio"}), in order; without places, before the text of
    the user's turn, where there is one turn alone. Raises PromptError for another number of them.
    """
    locations = sum(
        _is_location(part)
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )
    turns = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if images and not locations and len(turns) == 1:
        return [_shown_before(m, images) if m is turns[0] else m for m in messages]
    if locations != len(images):
        raise PromptError(
            f"image: found {len(images)} beside messages with {locations or 'no'} "
            f"{'place' if locations == 1 else 'places'} for them, expected as many; write "
            '{"type": "image"} where each belongs'
        )
    left = iter(images)

    def fill(part: Any) -> Any:
        return {**part, **_part_of(next(left))} if _is_location(part) else part

    return [with_parts(message, fill) for message in messages]


def in_json_types(messages: Sequence[Any], url_of: Callable[[Picture], str]) -> list[Any]:
    """The messages, in own form, in the types of JSON, as `in_own_form` takes them: pictures and
    the bytes of files as data URLs, others by their paths. Frames that were given stay, and what is
    no picture.
    """
    return [with_parts(message, lambda part: _in_json(part, url_of)) for message in messages]


def _in_json(part: Any, url_of: Callable[[Picture], str]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    source = part.get(kind) if kind in _OWN else None
    alongside: dict[str, Any] = {}
    if isinstance(source, VideoInput) and isinstance(source.source, (*_BYTES, str, os.PathLike)):
        usual = defaults_of(FrameRequest)
        given = {name: getattr(source, name) for name in usual}
        alongside = {name: value for name, value in given.items() if value != usual[name]}
        source = source.source
    if isinstance(source, Picture):
        source = url_of(source)
    elif isinstance(source, _BYTES):
        data = bytes(source)
        type_ = _TYPES[kind](data) if kind in _TYPES else None
        source = data_url(data, type_) if type_ else picture_url(data)
    elif isinstance(source, (str, os.PathLike)):
        source = os.fsdecode(source)
    else:
        return part
    return {**part, **alongside, kind: source}


def _with_images(message: Any) -> Any:
    """Ollama's messages have their pictures beside the text, which shows them before it."""
    images = message.get("images") if isinstance(message, Mapping) else None
    if images is None:
        return message
    listed = images if isinstance(images, (list, tuple)) else [images]
    rest = {name: value for name, value in message.items() if name != "images"}
    shown = _shown_before(rest, listed)
    return message if shown is rest else shown


def _shown_before(message: Mapping[str, Any], images: Sequence[Any]) -> Mapping[str, Any]:
    """The message with the images before its content; as it is where that is neither text nor a
    list of parts.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": [*map(_part_of, images), *content]}


def _part_of(source: Any) -> dict[str, Any]:
    kind = kind_of(source)
    return {"type": kind, kind: source}


def with_parts(message: Any, change: Callable[[Any], Any]) -> Any:
    """The message with every part of its content changed, where that is a list of them."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": [change(part) for part in content]}


def _is_location(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _OWN and kind not in part


def _in_own_form(part: Any) -> Any:
    given = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(given, str):
        return part
    if given in _TEXT:
        return {**part, "type": "text"}
    if given in _FILES:
        return _of_file(part)
    kind = _KINDS.get(given)
    if given == "input_audio" and isinstance(part.get(given), Mapping):  # OpenAI's chat
        part = _of_input_audio(part, part[given])
    if kind == "image" and isinstance(part.get("source"), Mapping):
        part = _of_anthropics(part, part["source"])
    if kind is None or part.get(kind) is not None:
        return part if kind is None else {**part, "type": kind}
    if isinstance(part.get("base64"), str):
        rest = {k: v for k, v in part.items() if k not in ("base64", kind)}
        return {**rest, "type": kind, kind: f"data:;base64,{part['base64']}"}
    for name in (f"{kind}_url", "url", "path"):
        value = part.get(name)
        # OpenAI's has {"url": ..., "detail": ...} in it
        inner = value if isinstance(value, Mapping) else {"url": value}
        if inner.get("url") is not None:
            rest = {k: v for k, v in {**part, **inner}.items() if k not in (name, "url", kind)}
            return {**rest, "type": kind, kind: inner["url"]}
    return part


def _of_input_audio(part: Mapping[str, Any], audio: Mapping[str, Any]) -> dict[str, Any]:
    """Return it with the source beside its type."""
    inner = {"base64": audio.get("data"), "url": audio.get("url")}
    rest = {name: value for name, value in part.items() if name != "input_audio"}
    return {**rest, **{name: value for name, value in inner.items() if value is not None}}


def _of_file(part: Mapping[str, Any]) -> Any:
    """Return what is in the file; one by an id stays, for whoever checks it."""
    inner = part["file"] if isinstance(part.get("file"), Mapping) else part
    data = inner.get("file_data")
    if not isinstance(data, str):
        return part
    return _part_of(data if is_data_url(data) else f"data:;base64,{data}")


def _of_anthropics(part: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return it with the source as a URL."""
    rest = {name: value for name, value in part.items() if name != "source"}
    if isinstance(source.get("data"), str):
        return {**rest, "url": f"data:{source.get('media_type', '')};base64,{source['data']}"}
    return {**rest, "url": source.get("url")}
