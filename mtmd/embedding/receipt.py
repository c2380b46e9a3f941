"""Describes what vectors come with: what the model saw, where it ran, and how long each part
took.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtmd.base.text import plural
from mtmd.receipt import ImageReceipt, VideoReceipt

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class TextReceipt:
    """`cut`: its end did not fit into the model's context."""

    tokens: int
    cut: bool


@dataclass(frozen=True)
class EmbeddingReceipt:
    """Times are wall time in milliseconds. `attention` tells by which kernel it runs, for each
    graph; `warnings` what was refused or cut; `preprocessed` where pictures were resized and
    normalised, as in `Receipt`, "" where there was no choice.
    """

    model: str
    images: tuple[ImageReceipt, ...]
    texts: tuple[TextReceipt, ...]
    preprocess_ms: float
    encode_ms: float
    device: str
    dtype: str
    attention: dict[str, str]
    warnings: tuple[str, ...]
    preprocessed: str = ""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One or a few lines for a terminal."""
        parts = []
        if self.images:
            sizes = {f"{w} x {h}" for w, h in (i.processed_size for i in self.images)}
            seen = sizes.pop() if len(sizes) == 1 else "their own shapes"
            parts.append(f"{plural(len(self.images), 'image')} seen as {seen}")
        if self.texts:
            tokens = sum(t.tokens for t in self.texts)
            parts.append(f"{plural(len(self.texts), 'text')} of {plural(tokens, 'token')}")
        each = (self.preprocess_ms + self.encode_ms) / max(len(self.images) + len(self.texts), 1)
        where = "; ".join(f"{part}: {kernel} attention" for part, kernel in self.attention.items())
        location = f" ({self.preprocessed})" if self.preprocessed else ""
        lines = [
            f"{', '.join(parts)}; preprocess {self.preprocess_ms:.0f} ms{location}, encode "
            f"{self.encode_ms:.0f} ms, {each:.0f} ms each",
            f"{self.model} on {self.device}, {self.dtype}; {where}",
        ]
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


@dataclass(frozen=True)
class Embeddings:
    """`vectors` fp32 [N, D], images first, then texts, each in the order given."""

    vectors: Vectors
    receipt: EmbeddingReceipt


@dataclass(frozen=True)
class DocumentReceipt:
    """`tokens`: of the prompt, query and instruction included; `images` and `videos` also those of
    the query.
    """

    tokens: int
    images: tuple[ImageReceipt, ...]
    videos: tuple[VideoReceipt, ...]


@dataclass(frozen=True)
class RankingReceipt:
    """Receipt of a ranking: the documents that were read, in order; the rest as in
    `EmbeddingReceipt`.
    """

    model: str
    instruction: str
    documents: tuple[DocumentReceipt, ...]
    preprocess_ms: float
    encode_ms: float
    device: str
    dtype: str
    attention: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(document.tokens for document in self.documents)

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One or a few lines for a terminal."""
        count, images = len(self.documents), sum(len(d.images) for d in self.documents)
        seen = f", {plural(images, 'image')} seen" if images else ""
        each = (self.preprocess_ms + self.encode_ms) / max(count, 1)
        where = "; ".join(f"{part}: {kernel} attention" for part, kernel in self.attention.items())
        lines = [
            f"{plural(count, 'document')} of {plural(self.prompt_tokens, 'token')}{seen}; "
            f"preprocess {self.preprocess_ms:.0f} ms, compute {self.encode_ms:.0f} ms, "
            f"{each:.0f} ms each",
            f"{self.model} on {self.device}, {self.dtype}; {where}",
        ]
        return "\n".join([*lines, *(f"warning: {w}" for w in self.warnings)])


@dataclass(frozen=True)
class Ranked:
    """A document: its place among those given, from 0, and how relevant it is, from 0 to 1."""

    index: int
    score: float


@dataclass(frozen=True)
class Ranking:
    """`scores` fp32 [N], in the order of the documents, NaN for those in `failed`, which are left
    out, with why; `results` the best of them, the most relevant first.
    """

    scores: Vectors
    results: tuple[Ranked, ...]
    failed: dict[int, str]
    receipt: RankingReceipt


@dataclass(frozen=True)
class TokenEmbeddings:
    """`vectors`: a matrix fp32 [T, D] for each, a vector for each of its tokens; the rest as in
    `Embeddings`.
    """

    vectors: tuple[Vectors, ...]
    receipt: EmbeddingReceipt
