"""Describes what a checkpoint holds, whatever its format: families, weights, tokenizer, template,
stop tokens and the rest that a model is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mtmd.base.errors import ModelError
from mtmd.chat_template.built_in_templates import end_of_turn as end_of_built_in
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint.token_vectors import TokenVectors
from mtmd.clip.audio_family import AudioFamily
from mtmd.clip.family import OwnTokens, VisionFamily
from mtmd.kernels.checkpoint.adapter import Adapter
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.llm.family import TextFamily
from mtmd.llm.sampling.options import NOTHING_RECOMMENDED, ModelSampling
from mtmd.llm.tokenizer.tokenizer import Tokenizer

FILES, RANDOM = "files", "random weights"
AUDIO_NAMES = re.compile(r"(model\.)?(audio_tower|embed_audio)\.|(a|mm\.a|apm)\.")


@dataclass(frozen=True)
class ModelAdapter:
    """A LoRA adapter of a model. One with a name (`is_chosen`) is applied to answers that choose
    it, as much as they or else `scale` say, and, `with_audio`, to those about audio; another to
    all: its changes are in the weights where these are plain numbers, and `text` and `vision` are
    what is left. `with_pictures`: to those with pictures or videos; `with_audio` then means audio
    alone.
    """

    name: str
    path: Path
    scale: float
    is_chosen: bool
    text: Adapter
    vision: Adapter | None
    base: str
    merged: int = 0
    """Weights that have its changes in them."""
    with_audio: bool = False
    with_pictures: bool = False

    @property
    def parts(self) -> tuple[Adapter, ...]:
        return (self.text, self.vision) if self.vision else (self.text,)

    def applies(self, has_pictures: bool, has_audio: bool) -> bool:
        """Return whether it is applied to an answer that does not choose."""
        return self.with_pictures if has_pictures else self.with_audio and has_audio

    @property
    def changes_pictures(self) -> bool:
        """Return whether it changes the encoder as it computes."""
        return self.vision is not None and bool(self.vision.targets)


@dataclass(frozen=True)
class Checkpoint:
    """`without_vision` says why there is no vision family, where pictures are refused.
    `opened_from` is what another process opens the same with: FILES, the model, its projector
    and its template, None where not given; or RANDOM, a shape and a type of weights.
    `architecture`: model_type of config.json, or a GGUF's general.architecture; `file_type`: its
    general.file_type, -1 where there is none. `adapters` in the order in which they were given.
    `sampling`: how its files recommend to choose tokens. `notes` say where the files contradict
    themselves, and how they are read. `weights`: the mixture that the decoder is quantized to when
    it is read, "" where it is as stored. `system`: what conversations begin with that have no
    system message of their own.
    """

    folder: Path
    vision: VisionFamily | None
    text: TextFamily
    vision_weights: CanonicalWeights | None
    text_weights: CanonicalWeights
    weight_bytes: int
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_tokens: frozenset[int]
    without_vision: str = "it reads text only; use a vision model"
    opened_from: tuple[str | None, ...] = ()
    architecture: str = ""
    file_type: int = -1
    sampling: ModelSampling = NOTHING_RECOMMENDED
    notes: tuple[str, ...] = ()
    weights: str = ""
    system: str = ""
    adapters: tuple[ModelAdapter, ...] = ()
    audio: AudioFamily | None = None
    audio_weights: CanonicalWeights | None = None
    relevance: CanonicalWeights | None = None
    """The rows of a reranker whose files have them beside, or in place of, the table of outputs."""
    token_vectors: TokenVectors | None = None
    """What makes vectors of the last states of all tokens."""
    instruction_tokenizer: Tokenizer | None = None
    """With which an encoder reads the text of a prompt."""

    @property
    def chosen_adapters(self) -> tuple[ModelAdapter, ...]:
        """Return those that an answer may choose."""
        return tuple(one for one in self.adapters if one.is_chosen)

    @property
    def applied_adapters(self) -> tuple[ModelAdapter, ...]:
        """Return those that are part of the model."""
        return tuple(one for one in self.adapters if not one.is_chosen)

    def without_blocks(self) -> Checkpoint:
        """The same for a device that multiplies no block-quantized weights."""
        vision = self.vision_weights and self.vision_weights.without_blocks()
        audio = self.audio_weights and self.audio_weights.without_blocks()
        text = self.text_weights.without_blocks()
        return replace(self, vision_weights=vision, audio_weights=audio, text_weights=text)


def placeholders(vision: VisionFamily | None, audio: AudioFamily | None) -> tuple[str, ...]:
    """Return what templates and families write for pictures, videos and audio, and users must
    not.
    """
    result: tuple[str, ...] = ()
    if vision is not None:
        video = () if vision.video is None else (vision.video.markers[-1], vision.video.token)
        own = (*vision.control, vision.end) if isinstance(vision, OwnTokens) else ()
        result = (vision.marker, vision.image_token, *video, *own)
    return result if audio is None else (*result, audio.marker, audio.token)


def added_tokens(vision: VisionFamily | None) -> tuple[str, ...]:
    """Return the tokens of a family that its vocabularies do not have."""
    return (vision.image_token,) if isinstance(vision, OwnTokens) else ()


def unread_audio(names: Iterable[str]) -> list[str]:
    """Return the note on weights of audio that this version does not read, where there are
    some.
    """
    if not any(AUDIO_NAMES.match(name) for name in names):
        return []
    return ["this version does not read its audio encoder, so it takes no audio"]


def end_of_turn(template: Path | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the token that ends a turn of a built-in template, where the vocabulary has it."""
    end = end_of_built_in(template) if template else None
    return frozenset({tokenizer.id(end)}) if end and tokenizer.knows(end) else frozenset()


def check_vocabulary(tokenizer: Tokenizer, text: TextFamily, where: str) -> None:
    """Raises ModelError where user text can produce a token that the model has no row for."""
    if (largest := tokenizer.id_beyond(text.vocabulary)) is not None:
        raise ModelError(
            f"{where}: the tokenizer has a token with id {largest}, the configuration a vocabulary "
            f"of {text.vocabulary}, "
            f"expected ids below that; they belong to different models, fetch both again"
        )
