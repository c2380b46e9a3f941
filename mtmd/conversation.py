"""Messages as people write them, made ready for the chat template: pictures loaded, text sealed, shape checked."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mtmd.clip.image import Picture
from mtmd.kernels.errors import PromptError
from mtmd.media import ImageSource, load_image

Images: TypeAlias = "ImageSource | Sequence[ImageSource]"
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`messages` as the chat template takes them, an {"type": "image"} where each of the `pictures` belongs, in order."""
    messages: tuple[dict[str, Any], ...]
    pictures: tuple[Picture, ...]


def user_message(image: Images, prompt: str) -> Message:
    """One user turn: the images, then the prompt."""
    images = image if isinstance(image, (list, tuple)) else [image]
    return {"role": "user", "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": prompt}]}


def read_conversation(messages: Sequence[Message], seal: Callable[[str], str]) -> Conversation:
    """Load the pictures, and put `seal` to all text: what a user writes must not become a special token.

    messages: {"role": ..., "content": text, or a list of {"type": "text", "text": ...} and {"type": "image", "image": source}}.
    Raises PromptError for anything else and for a conversation in which the user says nothing, ImageError for a picture.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(f"messages: found {type(messages).__name__}, expected a list of at least one {{'role': ..., 'content': ...}}")
    pictures: list[Picture] = []
    plain = tuple(_message(m, f"message {i}", seal, pictures) for i, m in enumerate(messages, 1))
    if not any(_says_something(m["content"]) for m in plain if m["role"] == "user"):
        raise PromptError("the prompt is empty; say what you want to know")
    return Conversation(plain, tuple(pictures))


def _message(message: Any, where: str, seal: Callable[[str], str], pictures: list[Picture]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"{where}: expected a mapping with 'role' and 'content'")
    content = message.get("content")
    if isinstance(content, str):
        return {"role": message["role"], "content": seal(content)}
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"{where}: content is {type(content).__name__}, expected a text or a list of parts")
    return {"role": message["role"], "content": [_part(p, where, seal, pictures) for p in content]}


def _part(part: Any, where: str, seal: Callable[[str], str], pictures: list[Picture]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": seal(part["text"])}
    if kind == "image" and "image" in part:
        source = part["image"]
        pictures.append(source if isinstance(source, Picture) else load_image(source))
        return {"type": "image"}
    expected = "{'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}"
    raise PromptError(f"{where}: found a part of type {kind!r:.60}, expected {expected}")


def _says_something(content: str | list[dict[str, str]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(p.get("text", "").strip() for p in content)
