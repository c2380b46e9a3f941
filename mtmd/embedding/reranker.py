"""A model that judges how relevant a document is to a query, as Qwen3-Reranker (arXiv:2506.05176)
and Qwen3-VL-Reranker (arXiv:2601.04720) do: it is asked, and its score is the probability of "yes"
as the answer's first token, where only "yes" and "no" can be said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from mtmd.base.errors import DeviceError, ModelError, MtmdError, OptionError, PromptError
from mtmd.base.options import integer, refuse
from mtmd.chat_template.template import ChatTemplate
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.facts import CheckpointFacts, facts_of
from mtmd.checkpoint.hub import is_demo
from mtmd.checkpoint.relevance import check_labels, score_rows
from mtmd.clip.image.decode import Picture
from mtmd.embedding.receipt import DocumentReceipt, Ranked, Ranking, RankingReceipt
from mtmd.embedding.state_reader import StateReader, Times
from mtmd.kernels.backends import Backend
from mtmd.kernels.dtype import name_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.loaded.report import attention_report, refusal_warnings
from mtmd.loading import find_checkpoint
from mtmd.model import Model
from mtmd.options.by_name import given, options
from mtmd.options.load import RERANKER_OPTIONS, LoadOptions
from mtmd.prompt.audio_input import kind_of
from mtmd.prompt.load_image import ImageSource
from mtmd.prompt.prompts import PreparedPrompt
from mtmd.prompt.video_input import VideoInput

Part: TypeAlias = "Mapping[str, Any]"
"""Of a message, such as {"type": "text", "text": ...}."""
Content: TypeAlias = "str | Mapping[str, Any] | ImageSource | Picture | VideoInput | Sequence[Part]"
"""A query or a document: a text, a picture or a video; {"text", "image", "video"} with one of each,
or a list; or parts of a message, in their order.
"""
KINDS = ("video", "image", "text")  # in the order in which the model was shown them
MAX_DOCUMENTS = 1 << 16
SAMPLED = {"fps": 1.0, "max_frames": 64}  # of a video, as the authors ask for

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


class Reranker:
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
        self._sees = checkpoint.vision is not None
        if not self._sees:
            checkpoint = _for_texts(checkpoint)
        rows = score_rows(checkpoint.relevance, checkpoint.text_weights, checkpoint.tokenizer)
        self._row = rows[0] - rows[1] if len(rows) > 1 else rows[0]
        self.model = Model(checkpoint, replace(chosen, parallel=1), backends, name)
        self._reader = StateReader(self.model)

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
    def context(self) -> int:
        """Tokens that are read of a query and a document, the instruction included."""
        return self._reader.context

    @property
    def sees(self) -> bool:
        """Return whether it takes pictures and videos."""
        return self._sees

    @property
    def instruction(self) -> str:
        """Return what documents are judged by, where nothing else is stated."""
        return FOR_ALL if self._sees else FOR_TEXTS

    @property
    def facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        return facts_of(self.checkpoint)

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return self.model.weights_read()

    @made_on_the_host()
    def rerank(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        on_error: Literal["raise", "return"] = "raise",
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
        if on_error not in ("raise", "return"):
            refuse("on_error", on_error, "one of raise, return")
        wording = self.instruction if instruction is None else instruction
        if not isinstance(wording, str):
            raise PromptError(f"instruction: found {type(wording).__name__}, expected a text")
        listed = _listed(documents)
        if top_n is not None:
            top_n = integer("top_n", top_n, 1, MAX_DOCUMENTS)
        query_parts = self._query(query)
        times, failed = Times(), dict[int, str]()
        scores = np.full(len(listed), math.nan, np.float32)
        receipts = list[DocumentReceipt]()
        read = list[int]()  # which document each prompt is about

        def prompts() -> Iterator[PreparedPrompt]:
            for index, document in enumerate(listed):
                try:
                    messages = self._conversation(wording, query_parts, _parts(document))
                    prepared = self._reader.prepare(messages)
                except MtmdError as error:
                    if on_error == "raise" or isinstance(error, DeviceError):
                        raise _named(error, f"documents[{index}]") from error
                    failed[index] = str(error)
                    continue
                read.append(index)
                yield prepared

        for number, (state, prompt) in enumerate(self._reader.read(prompts(), times)):
            logit = float(state.double() @ self._row.double())
            scores[read[number]] = 1 / (1 + math.exp(-max(logit, -700.0)))
            shown = tuple(one.receipt for one in prompt.images)
            receipts.append(DocumentReceipt(len(prompt.tokens), shown, prompt.videos))
        order = sorted(read, key=lambda index: -scores[index])
        results = tuple(Ranked(index, float(scores[index])) for index in order[:top_n])
        loaded = self.model.loaded
        receipt = RankingReceipt(
            self.name,
            wording,
            tuple(receipts),
            times.preparing,
            times.computing,
            self.backends[0].name,
            name_of(self.model.dtype),
            attention_report(loaded),
            tuple(refusal_warnings(loaded.placements)),
        )
        return Ranking(scores, results, failed, receipt)

    def _query(self, query: Content) -> list[Part]:
        """Return its parts, the pictures among them read once for all documents."""
        try:
            return [self._opened(part) for part in _parts(query)]
        except MtmdError as error:
            raise _named(error, "query") from error

    def _opened(self, part: Part) -> Part:
        if part.get("type") != "image" or not self._sees:
            return part
        return {**part, "image": self.model.prompts.load_image(part.get("image"))}

    def _conversation(
        self, instruction: str, query: Sequence[Part], document: Sequence[Part]
    ) -> list[dict[str, Any]]:
        """The messages by which the authors ask about a document."""
        before_query, before_document = FORM_FOR_ALL if self._sees else FORM_FOR_TEXTS
        parts = [
            _part("text", f"<Instruct>: {instruction}{before_query}"),
            *(query or [_part("text", NOTHING)]),
            _part("text", before_document),
            *(document or [_part("text", NOTHING)]),
        ]
        joined: list[Part] = []
        for part in parts:
            if joined and part.get("type") == joined[-1].get("type") == "text":
                part = _part("text", joined.pop()["text"] + part["text"])
            joined.append(part)
        return [
            {"role": "system", "content": [_part("text", SYSTEM)]},
            {"role": "user", "content": joined},
        ]

    @property
    def warmup_report(self) -> WarmupReport:
        """Return where everything runs and what it will take. Nothing is run for it: `warm_up`
        does.
        """
        return self.model.warmup_report

    def warm_up(self) -> WarmupReport:
        """The report with a real picture and a real prompt read."""
        return self.model.warm_up()


def load_reranker(model: str | PathLike[str], *, progress: bool = False, **chosen: Any) -> Reranker:
    """A reranker (Qwen3-VL-Reranker, Qwen3-Reranker) from a checkpoint folder, a GGUF file or, as
    org/name, from the Hugging Face hub.

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
        return Reranker(checkpoint, settings, name=name)


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


def _listed(documents: object) -> list[Any]:
    is_list = isinstance(documents, Sequence) and not isinstance(documents, (str, bytes))
    if not is_list:
        raise PromptError(f"documents: found {type(documents).__name__}, expected a list")
    listed = list(cast("Sequence[Any]", documents))
    if not 0 < len(listed) <= MAX_DOCUMENTS:
        raise PromptError(
            f"documents: found {len(listed):,}, expected at least one and at most {MAX_DOCUMENTS:,}"
        )
    return listed


def _parts(content: object) -> list[Part]:
    """The parts of a query or a document. Raises PromptError for what is neither."""
    if isinstance(content, str):
        return [_part("text", content)]
    if isinstance(content, (list, tuple)) and all(isinstance(one, Mapping) for one in content):
        return [_sampled(one) for one in content]
    if isinstance(content, Mapping):
        if unknown := [key for key in content if key not in KINDS]:
            raise PromptError(f"found {unknown[0]!r:.60}, expected 'text', 'image' or 'video'")
        return [_part(kind, one) for kind in KINDS for one in _several(content.get(kind))]
    return [_part(kind_of(content), content)]


def _several(value: object) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def _part(kind: str, value: Any) -> Part:
    if kind == "audio":
        raise PromptError("found audio, expected a text, a picture or a video")
    return _sampled({"type": kind, kind: value})


def _sampled(part: Part) -> Part:
    """A part, a video with the frames that the authors ask for, unless others are asked for.
    Raises PromptError for a text that is none.
    """
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        raise PromptError(f"text: found {type(part.get('text')).__name__}, expected a text")
    if part.get("type") != "video" or isinstance(part.get("video"), VideoInput):
        return part
    return {**SAMPLED, **part} if SAMPLED.keys().isdisjoint(part) else part


def _named(error: MtmdError, location: str) -> MtmdError:
    """The error with its location before it; as it is where the device has failed."""
    if isinstance(error, DeviceError):
        return error
    named = copy(error)
    named.args = (f"{location}: {error}",)
    return named
