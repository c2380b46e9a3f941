"""A model that gives vectors or scores behind a server: for requests of several threads, and what
came of them in numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mtmd.base.errors import BusyError, DeviceError, MtmdError, OptionError, PromptError
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.clip.image.decode import Picture
from mtmd.embedding.contents import Content
from mtmd.embedding.decoder_embedder import DecoderEmbedder
from mtmd.embedding.embedder import Embedder
from mtmd.embedding.receipt import Embeddings, Ranking, TokenEmbeddings
from mtmd.embedding.reranker import Reranker
from mtmd.embedding.token_embedder import TokenEmbedder
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.loaded.device_thread import device_fault
from mtmd.service.latencies import Latencies
from mtmd.service.stats import ServiceStats


class RetrievalService:
    """Thread-safe. Batches of all requests take turns on the device. `fault`: why nothing can be
    computed any more.
    """

    chat_template = ""
    instructions = None
    busy = False  # with what no client waits for
    failure: str | None = None
    """As of `Service`."""

    def __init__(self, model: Embedder | DecoderEmbedder | TokenEmbedder | Reranker) -> None:
        self.model = model
        self._changed, self._stats = threading.Condition(), ServiceStats(slots=1)
        self._closed = False
        self.latencies = Latencies()  # of answers, of which there are none
        self.fault: DeviceError | None = None
        self._report: list[Callable[[DeviceError], None]] = []

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def embedder(self) -> Embedder | DecoderEmbedder | TokenEmbedder:
        """Return the model that gives vectors. Raises OptionError for one that gives scores."""
        if isinstance(self.model, Reranker):
            raise OptionError(f"{self.name} gives scores and no vectors")
        return self.model

    @property
    def gives(self) -> str:
        """Return "vectors" or "scores"."""
        return "scores" if isinstance(self.model, Reranker) else "vectors"

    @property
    def ranks(self) -> bool:
        """Return whether it scores documents."""
        return isinstance(self.model, (Reranker, TokenEmbedder))

    @property
    def sees(self) -> bool:
        """Return whether it takes pictures."""
        return not isinstance(self.model, Reranker) or self.model.sees

    @property
    def width(self) -> int | None:
        """Numbers in a vector; None of a model that gives scores."""
        return None if isinstance(self.model, Reranker) else self.model.width

    @property
    def context(self) -> int:
        """Tokens that are read of a text, or of a query with a document."""
        return self.model.context

    @property
    def checkpoint_facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        return self.model.facts

    @property
    def warmup_report(self) -> WarmupReport:
        return self.model.warmup_report

    def stats(self) -> ServiceStats:
        with self._changed:
            return replace(self._stats)

    def embeddings(
        self,
        pictures: Sequence[Picture],
        texts: Sequence[str],
        *,
        normalize: bool = True,
        whole: bool = False,
    ) -> Embeddings | TokenEmbeddings:
        """Do what `Embedder.embeddings` does. `whole`: PromptError, before anything is computed,
        for a text that the model does not read to its end. Raises MtmdError.
        """
        with self._counted():
            if whole:
                self._check_read(texts)
            made: Embeddings | TokenEmbeddings = self.embedder.embeddings(
                pictures, texts, normalize=normalize
            )
        receipt = made.receipt
        with self._changed:
            self._stats.images += len(receipt.images)
            self._stats.image_tokens += sum(image.tokens for image in receipt.images)
            self._stats.prompt_tokens += sum(text.tokens for text in receipt.texts)
            self._stats.encode_tiles += len(receipt.images)
            self._stats.preprocess_ms += receipt.preprocess_ms
            self._stats.encode_ms += receipt.encode_ms
        return made

    def rank(
        self, query: Content, documents: Sequence[Content], instruction: str | None = None
    ) -> Ranking:
        """Do what `Reranker.rerank` does. Raises MtmdError, OptionError for a model that gives one
        vector for all of a text or a picture.
        """
        if not isinstance(self.model, (Reranker, TokenEmbedder)):
            raise OptionError(f"{self.name} gives vectors and no scores")
        with self._counted():
            made = self.model.rerank(query, documents, instruction=instruction)
        receipt = made.receipt
        images = [image for document in receipt.documents for image in document.images]
        with self._changed:
            self._stats.images += len(images)
            self._stats.image_tokens += sum(image.tokens for image in images)
            self._stats.prompt_tokens += receipt.prompt_tokens
            self._stats.encode_tiles += sum(not image.cached for image in images)
            self._stats.preprocess_ms += receipt.preprocess_ms
            self._stats.encode_ms += receipt.encode_ms
        return made

    def _check_read(self, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts, 1):
            if self.embedder.is_cut(text):
                raise PromptError(
                    f"text {number}: found more than the {self.context} tokens that the model "
                    "reads; shorten it, or let its end be cut"
                )

    def on_fault(self, report: Callable[[DeviceError], None]) -> None:
        """`report` is called once the device has failed, by the thread that found it."""
        self._report.append(report)

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing new is taken; what is being computed has so long to end."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._stats.running, wait_s)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._begin()
        failed = True
        try:
            yield
            failed = False
        except MtmdError:
            raise
        except Exception as error:
            self._check_device(error)
            raise
        finally:
            with self._changed:
                self._stats.running -= 1
                self._stats.failed += failed
                self._stats.finished += not failed
                self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            if self.fault is not None:
                raise self.fault
            if self._closed:
                raise BusyError("the server is shutting down")
            self._stats.requests += 1
            self._stats.running += 1

    def _check_device(self, error: Exception) -> None:
        """Some errors of a GPU are for good. Raises DeviceError where this is one."""
        fault = device_fault(self.model.backends, error)
        if fault is None:
            return
        with self._changed:
            first, self.fault = self.fault is None, self.fault or fault
        for report in self._report if first else ():
            report(fault)
        raise fault
