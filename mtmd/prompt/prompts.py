"""From messages to what the decoder reads: a conversation checked and rendered, its pictures
prepared, all of it tokenized; and, once the pictures are encoded, its spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mtmd.clip.image.decode import Picture
from mtmd.kernels.errors import PromptError
from mtmd.kernels.plan.executor import Observer
from mtmd.llm.engine.spans import Span
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.prompt.bridge import Bridge, Piece, Prepared
from mtmd.prompt.conversation import Conversation, Message, read_conversation
from mtmd.prompt.load_image import load_image, load_isolated


@dataclass(frozen=True)
class PreparedPrompt:
    """A conversation tokenized, its pictures ready to be encoded, in order."""

    pieces: list[Piece]
    pictures: list[Prepared]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for piece in self.pieces for t in piece.tokens)


@dataclass(frozen=True)
class EncodedPrompt:
    """A conversation ready for the decoder: its pictures encoded, embeddings [T, D] of each, and
    all of it as spans.
    """

    spans: list[Span]
    pictures: list[Prepared]
    embeddings: list[Tensor]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for s in self.spans for t in s.tokens)


class Prompts:
    """The prompts of one loaded model, with the cache of its encoded pictures."""

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded
        self.bridge = Bridge(loaded.encoder, loaded.checkpoint.tokenizer, loaded.admission)

    @property
    def load_image(self) -> Callable[..., Picture]:
        """How files become pictures: in this process, or, for a model that isolates, in others."""
        return load_isolated if self._loaded.options.isolate else load_image

    def read(self, messages: Sequence[Message]) -> Conversation:
        """Pictures loaded, texts sealed. Raises PromptError, also for images that the model cannot
        see, and ImageError.
        """
        loaded = self._loaded
        conversation = read_conversation(
            messages, loaded.checkpoint.tokenizer.seal, self.load_image
        )
        if conversation.pictures and loaded.encoder is None:
            raise PromptError(
                f"{loaded.name} has no image encoder and was given {len(conversation.pictures)} "
                "images; "
                f"{loaded.checkpoint.without_vision}"
            )
        return conversation

    def prepare(
        self, messages: Sequence[Message], detail: str = "auto", anew: bool = False, salt: str = ""
    ) -> PreparedPrompt:
        """A conversation ready for the device; nothing of it needs the device yet. `anew`: also
        pictures in the cache are to be encoded; `salt`: pictures of another are not found there.
        Raises what `read` and `Bridge.prepare` do.
        """
        conversation = self.read(messages)
        rendered = self._loaded.checkpoint.template.render(conversation.messages)
        budget = replace(self._loaded.limits, detail=detail)
        pictures = (
            self.bridge.prepare(conversation.pictures, budget, anew, salt)
            if self._loaded.encoder
            else []
        )
        return PreparedPrompt(self.bridge.read(rendered, pictures), pictures)

    def encode(self, prompt: PreparedPrompt, observe: Observer | None = None) -> EncodedPrompt:
        """Its pictures encoded, one after another, every node shown to `observe`. Needs the
        device.
        """
        embeddings = [self._embeddings(picture, observe) for picture in prompt.pictures]
        spans = self.bridge.spans(prompt.pieces, prompt.pictures, embeddings)
        return EncodedPrompt(spans, prompt.pictures, embeddings)

    def _embeddings(self, picture: Prepared, observe: Observer | None) -> Tensor:
        if picture.embeddings is not None:
            return picture.embeddings
        encoder = self._loaded.encoder
        assert encoder is not None
        embeddings = encoder.join(picture.plan, encoder.encode(picture.plan.tiles, observe))
        self.bridge.cache.put(picture.key, picture.plan, embeddings)
        return embeddings
