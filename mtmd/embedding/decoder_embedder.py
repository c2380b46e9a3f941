"""A model that reads pictures and texts and gives the state of the last token as their vector, as
Qwen3-VL-Embedding does (arXiv:2601.04720): the prompt is a conversation up to the answer's first
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.image.decode import Picture
from mtmd.embedding.receipt import EmbeddingReceipt, Embeddings, TextReceipt, Vectors
from mtmd.embedding.state_model import StateModel
from mtmd.embedding.state_reader import Times
from mtmd.kernels.backends import Backend
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.options.load import LoadOptions
from mtmd.prompt.load_image import ImageSource
from mtmd.receipt import ImageReceipt

INSTRUCTION = "Represent the user's input."  # the authors' own


class DecoderEmbedder(StateModel):
    """Made by `load_embedder`; has what `Embedder` has but for probabilities of labels. Safe to use
    from several threads, which take turns.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        """Raises ModelError for a model that sees no pictures: those for texts alone are given
        their texts in other forms.
        """
        if checkpoint.vision is None:
            raise ModelError(
                f"{checkpoint.folder}: found an embedding model for text only, expected one that "
                "sees pictures"
            )
        super().__init__(checkpoint, chosen, backends, name)

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.checkpoint.text.width

    def embed(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
        *,
        normalize: bool = True,
        instruction: str = INSTRUCTION,
    ) -> Vectors:
        """Do what `Embedder.embed` does; `instruction` says what the vectors are for, in the words
        that the model was trained with. Raises ContextError for what does not fit the context.
        """
        return self.embeddings(images, texts, normalize=normalize, instruction=instruction).vectors

    @made_on_the_host()
    def embeddings(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
        *,
        normalize: bool = True,
        instruction: str = INSTRUCTION,
    ) -> Embeddings:
        """Do what `embed` does, with a receipt."""
        pictures = list(images) if isinstance(images, (list, tuple)) else [images]
        parts: list[dict[str, Any]] = [{"type": "image", "image": one} for one in pictures]
        parts += [
            {"type": "text", "text": one} for one in ([texts] if isinstance(texts, str) else texts)
        ]
        if not parts:
            raise OptionError("found neither images nor texts, expected some of either")
        seen: list[ImageReceipt] = []
        read: list[TextReceipt] = []
        vectors, times = list[torch.Tensor](), Times()
        prompts = (self._reader.prepare(conversation(part, instruction)) for part in parts)
        for vector, prompt in self._reader.read(prompts, times):
            vectors.append(vector)
            seen += [one.receipt for one in prompt.images]
            read += [] if prompt.images else [TextReceipt(len(prompt.tokens), False)]
        stacked = torch.stack(vectors)
        if normalize:
            stacked = torch.nn.functional.normalize(stacked, dim=-1)
        receipt = EmbeddingReceipt(
            images=tuple(seen), texts=tuple(read), **self._receipt_fields(times)
        )
        return Embeddings(stacked.numpy(), receipt)

    def similarity(
        self, images: ImageSource | Sequence[ImageSource], texts: str | Sequence[str]
    ) -> Vectors:
        """Cosines fp32 [images, texts]."""
        result: Vectors = self.embed(images) @ self.embed(texts=texts).T
        return result

    def probabilities(self, cosines: Vectors) -> Vectors:  # noqa: ARG002
        """Raises OptionError: cosines are all that such a model was trained to tell."""
        raise OptionError(
            f"{self.name} gives cosines and no probabilities of labels; use --query, or a dual "
            "encoder"
        )


def conversation(part: dict[str, Any], instruction: str) -> list[dict[str, Any]]:
    """Return the messages by which the authors ask for a vector of a picture or a text."""
    return [
        {"role": "system", "content": [{"type": "text", "text": instruction}]},
        {"role": "user", "content": [part]},
    ]
