"""Tokens of a vocabulary that stand for pictures, videos and audio, as the tokenizer's settings
call them: models of one architecture are published with vocabularies that spell them differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings

MAX_LENGTH = 64  # characters of a token's text
FIELDS = (
    *("image_token", "video_token", "vision_bos_token", "vision_eos_token"),
    *("audio_token", "audio_bos_token", "audio_eos_token"),
)


@dataclass(frozen=True)
class Marks:
    """The tokens of a picture and of a video, and those that stand before and after either; the
    same of audio.
    """

    image: str = "<|image_pad|>"
    video: str = "<|video_pad|>"
    around: tuple[str, str] = ("<|vision_start|>", "<|vision_end|>")
    audio: str = "<|audio_pad|>"
    around_audio: tuple[str, str] = ("<|audio_start|>", "<|audio_end|>")

    @property
    def values(self) -> tuple[str, ...]:
        """Return them in the order of `FIELDS`."""
        return (self.image, self.video, *self.around, self.audio, *self.around_audio)


# The spelling that is published with Qwen2.5-Omni
CAPITALS = Marks(
    "<|IMAGE|>",
    "<|VIDEO|>",
    ("<|vision_bos|>", "<|vision_eos|>"),
    "<|AUDIO|>",
    ("<|audio_bos|>", "<|audio_eos|>"),
)


def read_marks(processor: Settings, usual: Marks) -> Marks:
    """Read them from the tokenizer's settings, which are a processor's `tokens`; those that are not
    named there are the usual ones. Raises ModelError for what is no text.
    """
    tokens = processor.part("tokens")
    read = []
    for key, value in zip(FIELDS, usual.values, strict=True):
        text = tokens.get(key, value)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_LENGTH:
            raise ModelError(
                f"{tokens.where}: {key} is {text!r:.40}, expected a text of at most {MAX_LENGTH} "
                "characters"
            )
        read.append(text)
    return Marks(read[0], read[1], (read[2], read[3]), read[4], (read[5], read[6]))


def marks_of_template(template: str) -> Mapping[str, Any]:
    """Return the tokens that a chat template writes, as a tokenizer's settings would name them;
    none where they are the usual ones.
    """
    if CAPITALS.image not in template and CAPITALS.audio not in template:
        return {}
    return dict(zip(FIELDS, CAPITALS.values, strict=True))
