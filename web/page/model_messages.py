"""A branch of a conversation as the messages that the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtmd import PromptError
from mtmd.thinking.written import parts as thought_and_answer
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.page.pictures import PictureCache
from mtmd.web.store.conversation import Message, StoredImage


def model_messages(
    branch: Sequence[Message], system: str, pictures: PictureCache, no_sound: bool = False
) -> list[dict[str, Any]]:
    """Turns alternate: several messages in a row, for want of an answer, are one turn. The pixels
    of its pictures are held by the caller, as `checked_pixels` counts them. `no_sound`: videos are
    seen, and not heard.
    """
    every = [image for message in branch for image in message.images]
    videos, audio = (sum(getattr(i, kind) for i in every) for kind in ("is_video", "is_audio"))
    turns: list[tuple[str, list[dict[str, Any]], list[str]]] = []
    for message in branch:
        parts: list[dict[str, Any]] = [
            _video(image, pictures, videos, no_sound)
            if image.is_video
            else {"type": "audio", "audio": pictures.recording(image, audio)}
            if image.is_audio
            else {"type": "image", "image": pictures.get(image)}
            for image in message.images
        ]
        is_answer = message.role == "assistant"
        thought, text = thought_and_answer(message.text) if is_answer else ("", message.text)
        thoughts = [thought] if thought else []
        if text:
            parts.append({"type": "text", "text": text})
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(parts)
            turns[-1][2].extend(thoughts)
        elif parts or thoughts:
            turns.append((message.role, parts, thoughts))
    first = [{"role": "system", "content": system}] if system.strip() else []
    stated = (
        {"role": role, "content": _content(parts)}
        | ({"reasoning_content": "\n\n".join(thoughts)} if thoughts else {})
        for role, parts, thoughts in turns
    )
    return [*first, *stated]


def checked_pixels(branch: Sequence[Message], budget: PictureBudget) -> int:
    """Return the checked pixels of all its pictures. Raises PromptError where these are more than
    one request may bring.
    """
    images = [image for message in branch for image in message.images]
    stills = [image for image in images if image.is_still]
    videos, audio = sum(i.is_video for i in images), sum(i.is_audio for i in images)
    pixels = sum(i.width * i.height for i in stills)
    excess = budget.excess(
        pictures=len(stills),
        bytes_=sum(i.bytes for i in stills),
        pixels=pixels,
        videos=videos,
        audio=audio,
    )
    if excess:
        raise PromptError(
            f"found {excess.count:,} {excess.what} in this conversation, expected at most "
            f"{excess.maximum:,}; start a new one, or edit an earlier message to leave some out"
        )
    limits = budget.limits
    return pixels + videos * limits.video_pixels + audio * limits.audio_pixels


def _video(
    video: StoredImage, pictures: PictureCache, videos: int, no_sound: bool
) -> dict[str, Any]:
    part = {"start": video.start, "end": video.end} | ({"no_sound": True} if no_sound else {})
    return {"type": "video", "video": pictures.footage(video, videos), **part}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A turn of text alone as a text: some templates take the assistant's no other way."""
    texts = [str(p["text"]) for p in parts if "text" in p]
    return "\n\n".join(texts) if len(texts) == len(parts) else parts
