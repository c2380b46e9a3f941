"""A model that gives a vector for each token of a page or a query, as ColQwen2 and ColPali do
(arXiv:2407.01449). How well a page answers a query is the sum, over the query's vectors, of the
greatest product with a vector of the page.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mtmd.base.errors import MtmdError, OptionError, PromptError
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.family import PrefixFamily
from mtmd.clip.image.decode import Picture
from mtmd.embedding.contents import (
    Content,
    OnError,
    check_on_error,
    document_receipt,
    each_document,
    listed,
    named,
    parts_of,
    ranking_of,
)
from mtmd.embedding.receipt import (
    DocumentReceipt,
    EmbeddingReceipt,
    Ranking,
    RankingReceipt,
    TextReceipt,
    TokenEmbeddings,
    Vectors,
)
from mtmd.embedding.state_model import StateModel
from mtmd.embedding.state_reader import Times
from mtmd.kernels.backends import Backend
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.options.load import LoadOptions
from mtmd.prompt.load_image import ImageSource
from mtmd.prompt.prompts import PreparedPrompt

# What processors write where their settings do not say.
PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
QUERY = "Query: "
PREFIX_PAGE, PREFIX_QUERY = "Describe the image.", "Question: "
BUFFERS = 10  # tokens of padding behind a query, in which the model may think


class TokenEmbedder(StateModel):
    """Made by `load_embedder`. Safe to use from several threads, which take turns."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        assert checkpoint.token_vectors is not None and checkpoint.vision is not None
        self._settings = checkpoint.token_vectors
        self._weight, self._bias = self._settings.projection()
        self._is_prefix = isinstance(checkpoint.vision, PrefixFamily)
        super().__init__(checkpoint, replace(chosen, parallel=1), backends, name)

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self._settings.width

    def embed(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
    ) -> tuple[Vectors, ...]:
        """Matrices fp32 [T, D] of images, then of texts, which are queries, in the order given: a
        vector of length 1 for each token. Raises ImageError, PromptError, ContextError.
        """
        return self.embeddings(images, texts).vectors

    @made_on_the_host()
    def embeddings(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
        *,
        normalize: bool = True,
    ) -> TokenEmbeddings:
        """Do what `embed` does, with a receipt. Raises OptionError where vectors are to be left as
        they are, which such a model's are not.
        """
        if not normalize:
            raise OptionError(f"normalize: {self.name} gives vectors of length 1; leave it out")
        pictures: Sequence[Any] = images if isinstance(images, (list, tuple)) else [images]
        queries = [texts] if isinstance(texts, str) else list(texts)
        if not len(pictures) + len(queries):
            raise OptionError("found neither images nor texts, expected some of either")
        times, made = Times(), list[tuple[Vectors, PreparedPrompt]]()
        made += (self._vectors(self._page(one, times), times) for one in pictures)
        made += (self._vectors(self._query(one, times), times) for one in queries)
        seen = [image.receipt for _, prompt in made for image in prompt.images]
        read = [TextReceipt(len(prompt.tokens), False) for _, prompt in made if not prompt.images]
        receipt = EmbeddingReceipt(
            images=tuple(seen), texts=tuple(read), **self._receipt_fields(times)
        )
        return TokenEmbeddings(tuple(vectors for vectors, _ in made), receipt)

    @made_on_the_host()
    def rerank(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        on_error: OnError = "raise",
    ) -> Ranking:
        """Do what `Reranker.rerank` does, by products of vectors: a score is at most the number of
        the query's vectors. A query or a document is one text or one picture. Raises OptionError
        for an instruction, of which such a model knows nothing.
        """
        if instruction is not None:
            raise OptionError(f"instruction: {self.name} reads none; leave it out")
        check_on_error(on_error)
        every, times = listed(documents), Times()
        try:
            first, _ = self._vectors(self._content(query, times), times)
        except MtmdError as error:
            raise named(error, "query") from error
        scores = np.full(len(every), np.nan, np.float32)
        failed, receipts = dict[int, str](), list[DocumentReceipt]()

        def prepare(document: Content) -> PreparedPrompt:
            return self._content(document, times)

        for index, prompt in each_document(every, prepare, on_error, failed):
            scores[index] = similarity(first, self._vectors(prompt, times)[0])
            receipts.append(document_receipt(prompt))
        receipt = RankingReceipt(
            instruction="", documents=tuple(receipts), **self._receipt_fields(times)
        )
        return ranking_of(scores, failed, top_n, receipt)

    def _content(self, content: Content, times: Times) -> PreparedPrompt:
        parts = parts_of(content)
        kinds = [part.get("type") for part in parts]
        if kinds == ["text"]:
            return self._query(parts[0]["text"], times)
        if kinds == ["image"]:
            return self._page(parts[0]["image"], times)
        raise PromptError("expected one text or one picture, as vectors stand for one")

    def _vectors(self, prompt: PreparedPrompt, times: Times) -> tuple[Vectors, PreparedPrompt]:
        states = self._reader.read_all(prompt, times)
        projected = torch.nn.functional.linear(states, self._weight, self._bias)
        return torch.nn.functional.normalize(projected, dim=-1).numpy(), prompt

    def _page(self, source: ImageSource | Picture, times: Times) -> PreparedPrompt:
        """The prompt of a picture."""
        begun, prompts, family = time.perf_counter(), self.model.prompts, self.checkpoint.vision
        assert family is not None
        picture = source if isinstance(source, Picture) else prompts.load_image(source)
        images = prompts.bridge.prepare([picture], self.model.loaded.limits)
        if self._is_prefix:
            text = family.marker + (self._settings.page or PREFIX_PAGE)
        else:
            text = self._settings.page or PAGE
        pieces = prompts.bridge.read(text, images)
        prompt = PreparedPrompt(pieces, list(images), shown=tuple(images), images=tuple(images))
        times.preparing += (time.perf_counter() - begun) * 1e3
        return self._reader.checked(prompt)

    def _query(self, text: object, times: Times) -> PreparedPrompt:
        """The prompt of a query."""
        if not isinstance(text, str):
            raise PromptError(f"found {type(text).__name__}, expected a text")
        begun, tokenizer = time.perf_counter(), self.checkpoint.tokenizer
        padding = tokenizer.special_text.get("pad_token", "") * BUFFERS
        before = self._settings.query or (PREFIX_QUERY if self._is_prefix else QUERY)
        end = "" if self._is_prefix else "\n"  # else the family puts one there
        written = f"{before}{tokenizer.seal(text)}{padding}{end}"
        pieces = self.model.prompts.bridge.read(written, [])
        times.preparing += (time.perf_counter() - begun) * 1e3
        return self._reader.checked(PreparedPrompt(pieces, []))


def similarity(query: Vectors, page: Vectors) -> float:
    """Return the sum of each query vector's greatest product with one of the page."""
    return float((query @ page.T).max(axis=1).sum())
