"""A model that judges how relevant a document is to a query, as Qwen3-Reranker (arXiv:2506.05176)
and Qwen3-VL-Reranker (arXiv:2601.04720) do: it is asked, and its score is the probability of "yes"
as the answer's first token, where only "yes" and "no" can be said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from mtmd.base.errors import ModelError, MtmdError, OptionError, PromptError
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.hub import is_demo
from mtmd.checkpoint.relevance import check_labels, score_rows
from mtmd.embedding.contents import (
    Content,
    OnError,
    Part,
    check_on_error,
    document_receipt,
    each_document,
    listed,
    named,
    part_of,
    parts_of,
    ranking_of,
)
from mtmd.embedding.receipt import DocumentReceipt, Ranking, RankingReceipt
from mtmd.embedding.state_model import StateModel
from mtmd.embedding.state_reader import Times
from mtmd.embedding.token_embedder import TokenEmbedder
from mtmd.finding import find_checkpoint
from mtmd.kernels.backends import Backend
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.options.by_name import given, options
from mtmd.options.load import RERANKER_OPTIONS, LoadOptions
from mtmd.prompt.prompts import PreparedPrompt

# All that follows is the authors' own.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
FOR_TEXTS = "Given a web search query, retrieve relevant passages that answer the query"
FOR_ALL = "Given a search query, retrieve relevant candidates that answer the query."
FORM_FOR_TEXTS = "\n<Query>: ", "\n<Document>: "
FORM_FOR_ALL = "<Query>:", "\n<Document>:"
NOTHING = "NULL"  # a query or a document without content
TURN, TURN_END, THOUGHT = MARKS = "<|im_start|>", "<|im_end|>", "<think>"
TEXT_TEMPLATE = (  # Jinja would leave out a line break at its end
    f"{{% for m in messages %}}{TURN}{{{{ m.role }}}}\n{{{{ m.content }}}}{TURN_END}\n"
    f"{{% endfor %}}{TURN}assistant\n{THOUGHT}\n\n</think>{{{{ '\n\n' }}}}"
)


class Reranker(StateModel):
    """Made by `load_reranker`. Safe to use from several threads, which take turns."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        """Raises ModelError for a checkpoint whose answers are not "yes" and "no", or whose prompt
        is not known.
        """
        check_labels(checkpoint.folder, checkpoint.tokenizer)
        if checkpoint.vision is None:
            checkpoint = _for_texts(checkpoint)
        rows = score_rows(checkpoint.relevance, checkpoint.text_weights, checkpoint.tokenizer)
        self._row = rows[0] - rows[1] if len(rows) > 1 else rows[0]
        super().__init__(checkpoint, replace(chosen, parallel=1), backends, name)

    @property
    def instruction(self) -> str:
        """Return what documents are judged by, where nothing else is stated."""
        return FOR_ALL if self.sees else FOR_TEXTS

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
        """Score how relevant each of the documents is to the query, from 0 to 1.

        query, documents: texts; pictures and videos as a Path, bytes, an open file, a Pillow image,
        an array or `VideoInput`; or a mapping {"text": ..., "image": ..., "video": ...} of one or
        more of these, each one or a list, where a string under "image" and "video" is a path; or
        the parts of a message, as `Model.describe` takes them.
        instruction: what makes a document relevant, in words (the authors' own by default). top_n:
        length of `Ranking.results`. on_error: "raise" ends it with the first error, which names its
        place, "documents[3]"; "return" leaves such documents out of the results and gives the
        reason in `Ranking.failed`.
        Raises MtmdError: PromptError, ImageError, and ContextError for what does not fit.
        """
        check_on_error(on_error)
        wording = self.instruction if instruction is None else instruction
        if not isinstance(wording, str):
            raise PromptError(f"instruction: found {type(wording).__name__}, expected a text")
        every, query_parts = listed(documents), self._query(query)
        times, failed = Times(), dict[int, str]()
        scores = np.full(len(every), math.nan, np.float32)
        receipts = list[DocumentReceipt]()
        read = list[int]()  # which document each prompt is about

        def prepare(document: Content) -> PreparedPrompt:
            messages = self._conversation(wording, query_parts, parts_of(document))
            return self._reader.prepare(messages)

        def prompts() -> Iterator[PreparedPrompt]:
            for index, prepared in each_document(every, prepare, on_error, failed):
                read.append(index)
                yield prepared

        for number, (state, prompt) in enumerate(self._reader.read(prompts(), times)):
            logit = float(state.double() @ self._row.double())
            scores[read[number]] = 1 / (1 + math.exp(-max(logit, -700.0)))
            receipts.append(document_receipt(prompt))
        receipt = RankingReceipt(
            instruction=wording, documents=tuple(receipts), **self._receipt_fields(times)
        )
        return ranking_of(scores, failed, top_n, receipt)

    def _query(self, query: Content) -> list[Part]:
        """Return its parts, the pictures among them read once for all documents."""
        try:
            return [self._opened(part) for part in parts_of(query)]
        except MtmdError as error:
            raise named(error, "query") from error

    def _opened(self, part: Part) -> Part:
        if part.get("type") != "image" or not self.sees:
            return part
        return {**part, "image": self.model.prompts.load_image(part.get("image"))}

    def _conversation(
        self, instruction: str, query: Sequence[Part], document: Sequence[Part]
    ) -> list[dict[str, Any]]:
        """The messages by which the authors ask about a document."""
        before_query, before_document = FORM_FOR_ALL if self.sees else FORM_FOR_TEXTS
        parts = [
            part_of("text", f"<Instruct>: {instruction}{before_query}"),
            *(query or [part_of("text", NOTHING)]),
            part_of("text", before_document),
            *(document or [part_of("text", NOTHING)]),
        ]
        joined: list[Part] = []
        for part in parts:
            if joined and part.get("type") == joined[-1].get("type") == "text":
                part = part_of("text", joined.pop()["text"] + part["text"])
            joined.append(part)
        return [
            {"role": "system", "content": [part_of("text", SYSTEM)]},
            {"role": "user", "content": joined},
        ]


def load_reranker(
    model: str | PathLike[str], *, progress: bool = False, **chosen: Any
) -> Reranker | TokenEmbedder:
    """A reranker (Qwen3-VL-Reranker, Qwen3-Reranker) from a checkpoint folder, a GGUF file or, as
    org/name, from the Hugging Face hub; or a model whose vectors of tokens score pages (ColQwen2,
    ColPali).

    `chosen`: fields of `LoadOptions`, those in `RERANKER_OPTIONS`. Raises MtmdError: ModelError for
    the checkpoint, OptionError for an option.
    """
    settings = options(LoadOptions, chosen)
    for option in given(chosen):
        if option not in RERANKER_OPTIONS:
            raise OptionError(
                f"option {option!r:.60} is not one of a reranker; expected one of "
                f"{', '.join(RERANKER_OPTIONS)}"
            )
    if is_demo(model):
        raise ModelError(
            "the demo model writes answers and is no reranker; expected one of those that "
            "docs/embed.md names"
        )
    with made_on_the_host():
        checkpoint, name = find_checkpoint(model, settings, progress, answers=False)
        kind = Reranker if checkpoint.token_vectors is None else TokenEmbedder
        return kind(checkpoint, settings, name=name)


def _for_texts(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with the prompt of rerankers for texts. Raises ModelError for a vocabulary that
    does not have its tokens.
    """
    tokenizer, where = checkpoint.tokenizer, checkpoint.folder
    if missing := [mark for mark in MARKS if not tokenizer.knows(mark)]:
        raise ModelError(
            f"{where}: found no token {missing[0]}, with which rerankers of this kind are asked; "
            f"expected one of those in docs/embed.md"
        )
    template = ChatTemplate(TEXT_TEMPLATE, tokenizer.special_text, f"{where}: rerank")
    return replace(checkpoint, template=template)
