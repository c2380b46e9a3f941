"""A branch of a conversation as the turns that a model is asked with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from mtmd import PromptError
from mtmd.thinking.written import parts
from mtmd.web.answering.request import Turn
from mtmd.web.intake.media import Shown
from mtmd.web.intake.picture_budget import PictureBudget
from mtmd.web.page.pictures import PictureCache
from mtmd.web.store.conversation import Message, StoredImage


def branch_turns(
    branch: Sequence[Message], system: str, pictures: PictureCache, no_sound: bool = False
) -> Iterator[Turn]:
    """Turns alternate: several messages in a row, for want of an answer, are one turn. The pixels
    of its pictures are held by the caller, as `checked_pixels` counts them. `no_sound`: videos are
    seen, and not heard.
    """
    if system.strip():
        yield Turn("system", system)
    every = [image for message in branch for image in message.images]
    videos, audio = sum(i.is_video for i in every), sum(i.is_audio for i in every)

    def shown(image: StoredImage) -> Shown:
        if image.is_audio:
            return Shown("audio", pictures.recording(image, audio))
        if image.is_still:
            return Shown("image", pictures.get(image))
        part = {"start": image.start, "end": image.end} | ({"no_sound": True} if no_sound else {})
        return Shown("video", pictures.footage(image, videos), part)

    stated = (text_turn(m.role, m.text, *map(shown, m.images)) for m in branch)
    for _, turns in groupby((t for t in stated if t.content or t.thought), attrgetter("role")):
        yield _joined(list(turns))


def text_turn(role: str, text: str, *shown: Shown) -> Turn:
    """A message with such a text; that of an answer has its thought in it."""
    thought, text = parts(text) if role == "assistant" else ("", text)
    return Turn(role, (*shown, text) if shown else text, thought=thought)


def _joined(turns: Sequence[Turn]) -> Turn:
    """A turn of text alone as a text: some templates take the assistant's no other way."""
    pieces = tuple(piece for turn in turns for piece in turn.pieces if piece)
    texts = [piece for piece in pieces if isinstance(piece, str)]
    content = "\n\n".join(texts) if len(texts) == len(pieces) else pieces
    thought = "\n\n".join(turn.thought for turn in turns if turn.thought)
    return Turn(turns[0].role, content, thought=thought)


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
