"""Messages as people write them, made ready for the chat template: pictures loaded, text sealed,
shape checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mtmd.clip.image.decode import Picture
from mtmd.kernels.errors import ImageError, PromptError
from mtmd.prompt.load_image import ImageSource, load_image

Images: TypeAlias = "ImageSource | Sequence[ImageSource]"
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """`messages` as the chat template takes them, an {"type": "image"} where each of the `pictures`
    belongs, in order.
    """

    messages: tuple[dict[str, Any], ...]
    pictures: tuple[Picture, ...]


def user_message(image: Images, prompt: str) -> Message:
    """One user turn: the images, then the prompt. Raises ImageError for an empty list: a turn of
    text alone needs no such message.
    """
    images = image if isinstance(image, (list, tuple)) else [image]
    if not images:
        raise ImageError(
            "images: found an empty list, expected at least one; give a path, bytes, a Pillow "
            "image or an array"
        )
    return {
        "role": "user",
        "content": [
            *({"type": "image", "image": i} for i in images),
            {"type": "text", "text": prompt},
        ],
    }


def read_conversation(
    messages: Sequence[Message],
    seal: Callable[[str], str],
    load: Callable[..., Picture] = load_image,
) -> Conversation:
    """Load the pictures with `load`, and put `seal` to all text: what a user writes must not become
    a special token.

    messages: {"role": ..., "content": text, or a list of {"type": "text", "text": ...} and {"type":
    "image", "image": source}}. Raises PromptError for anything else and for a conversation in which
    the user says nothing, ImageError for a picture.
    """
    if (
        isinstance(messages, (str, bytes, Mapping))
        or not isinstance(messages, Sequence)
        or not messages
    ):
        raise PromptError(
            f"messages: found {type(messages).__name__}, expected a list of at least one "
            f"{{'role': ..., 'content': ...}}"
        )
    images: list[ImageSource | Picture] = []
    plain = tuple(_message(m, i, seal, images) for i, m in enumerate(messages, 1))
    if not any(_says_something(m["content"]) for m in plain if m["role"] == "user"):
        raise PromptError("the prompt is empty; say what you want to know")
    return Conversation(plain, _load(images, load))


def _load(
    images: Sequence[ImageSource | Picture], load: Callable[..., Picture]
) -> tuple[Picture, ...]:
    """The pictures in order; of several, those without a name are called by their place."""
    several = len(images) > 1
    return tuple(
        image
        if isinstance(image, Picture)
        else load(image, unnamed=f"image {i}" if several else "image")
        for i, image in enumerate(images, 1)
    )


def _message(
    message: Any, number: int, seal: Callable[[str], str], images: list[ImageSource | Picture]
) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"{where}: expected a mapping with 'role' and 'content'")
    role, content = str(message["role"]), message.get("content")
    # Templates write roles into the prompt beside control tokens, so a role must not spell one.
    if not re.fullmatch(r"[A-Za-z_]{1,32}", role):
        raise PromptError(
            f"messages[{number - 1}] has role {role!r:.60}; expected a word such as 'user', "
            "'assistant' or 'system'"
        )
    if isinstance(content, str):
        return {"role": role, "content": seal(content)}
    if not isinstance(content, (list, tuple)):
        raise PromptError(
            f"{where}: content is {type(content).__name__}, expected a text or a list of parts"
        )
    return {"role": role, "content": [_part(p, where, seal, images) for p in content]}


def _part(
    part: Any, where: str, seal: Callable[[str], str], images: list[ImageSource | Picture]
) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and "text" in part:
        if not isinstance(part["text"], str):
            raise PromptError(
                f"{where}: the text is of type {type(part['text']).__name__}, expected a str; "
                "write what you want to know"
            )
        return {"type": "text", "text": seal(part["text"])}
    if kind == "image" and "image" in part:
        images.append(part["image"])
        return {"type": "image"}
    expected = "{'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}"
    raise PromptError(f"{where}: found a part of type {kind!r:.60}, expected {expected}")


def _says_something(content: str | list[dict[str, str]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(p.get("text", "").strip() for p in content)
