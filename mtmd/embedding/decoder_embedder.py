"""A model that reads pictures and texts and gives the state of the last token as their vector, as
Qwen3-VL-Embedding does (arXiv:2601.04720): the prompt is a conversation up to the answer's first
token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch

from mtmd.base.errors import ModelError, OptionError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.facts import CheckpointFacts, facts_of
from mtmd.clip.image.decode import Picture
from mtmd.embedding.receipt import EmbeddingReceipt, Embeddings, TextReceipt, Vectors
from mtmd.kernels.backends import Backend
from mtmd.kernels.dtype import name_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.loaded.report import attention_report, refusal_warnings
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.load_image import ImageSource
from mtmd.receipt import ImageReceipt

INSTRUCTION = "Represent the user's input."  # the authors' own


class DecoderEmbedder:
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
        self.model = Model(checkpoint, chosen, backends, name)
        self._runner = self.model.runner.states()
        self._cache = self._runner.new_cache()
        self._lock = Lock()

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def backends(self) -> list[Backend]:
        return self.model.backends

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.checkpoint.text.width

    @property
    def context(self) -> int:
        """Tokens that are read of a text, its instruction included."""
        return self._runner.context

    @property
    def facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        return facts_of(self.checkpoint)

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return self.model.weights_read()

    def is_cut(self, text: str) -> bool:
        """Return whether a text would not be read to its end: none is cut, those that do not fit
        are refused.
        """
        del text
        return False

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
        vectors, times = list[torch.Tensor](), [0.0, 0.0]
        for part in parts:
            vector, tokens, shown = self._vector(part, instruction, times)
            vectors.append(vector)
            seen += shown
            read += [] if shown else [TextReceipt(tokens, False)]
        stacked = torch.stack(vectors)
        if normalize:
            stacked = torch.nn.functional.normalize(stacked, dim=-1)
        loaded = self.model.loaded
        receipt = EmbeddingReceipt(
            self.name,
            tuple(seen),
            tuple(read),
            times[0],
            times[1],
            self.backends[0].name,
            name_of(self.model.dtype),
            attention_report(loaded),
            tuple(refusal_warnings(loaded.placements)),
        )
        return Embeddings(stacked.numpy(), receipt)

    def _vector(
        self, part: dict[str, Any], instruction: str, times: list[float]
    ) -> tuple[torch.Tensor, int, list[ImageReceipt]]:
        """The vector [D] of a picture or a text, its tokens, and what was seen; `times` of
        preparing and computing, in milliseconds, are added up.
        """
        begun = time.perf_counter()
        prepared = self.model.prompts.prepare(conversation(part, instruction))
        ready = time.perf_counter()
        with self._lock:
            vector = self.model.exclusively(lambda: self._state(prepared))
        times[0] += (ready - begun) * 1e3
        times[1] += (time.perf_counter() - ready) * 1e3
        return vector, len(prepared.tokens), [one.receipt for one in prepared.images]

    def _state(self, prepared: Any) -> torch.Tensor:
        spans = self.model.prompts.encode(prepared).spans
        return self._runner.prefill(spans, self._cache).float().cpu()

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

    @property
    def warmup_report(self) -> WarmupReport:
        """Return where everything runs and what it will take. Nothing is run for it: `warm_up`
        does.
        """
        return self.model.warmup_report

    def warm_up(self) -> WarmupReport:
        """The report with a real picture and a real prompt read."""
        return self.model.warm_up()


def conversation(part: dict[str, Any], instruction: str) -> list[dict[str, Any]]:
    """Return the messages by which the authors ask for a vector of a picture or a text."""
    return [
        {"role": "system", "content": [{"type": "text", "text": instruction}]},
        {"role": "user", "content": [part]},
    ]
