"""A loaded model as people use it: prompts and pictures in, answers with receipts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, TypeVar

import torch

from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.config import AnswerOptions, LoadOptions
from mtmd.events import Answer, Event, Finished
from mtmd.kernels.backends import Backend
from mtmd.kernels.plan.executor import Observer
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.spans import Span
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import warmup_report
from mtmd.prompt.conversation import Images, Message, user_message
from mtmd.prompt.prompts import EncodedPrompt, Prompts
from mtmd.service.service import Service

DEFAULT_PROMPT = "Describe the image."
T = TypeVar("T")


class Model:
    """Made by `load`. Safe to use from several threads: what they ask for at the same time is
    computed in the same batches.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        """`backends` in order of preference replaces what `chosen.device` and `chosen.refuse` ask
        for; `name` is for people.
        """
        self.loaded = LoadedModel(checkpoint, chosen, backends, name)
        self.prompts = Prompts(self.loaded)
        self._service: Service | None = None
        self._lock = Lock()

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def options(self) -> LoadOptions:
        return self.loaded.options

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def encoder(self) -> Encoder | None:
        return self.loaded.encoder

    @property
    def runner(self) -> Runner:
        return self.loaded.runner

    @property
    def backends(self) -> list[Backend]:
        """In order of preference."""
        return self.loaded.backends

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.dtype

    @property
    def service(self) -> Service:
        """Where answers are computed, of all threads together. Made when it is first asked for."""
        with self._lock:
            if self._service is None:
                self._service = Service(self)
            return self._service

    def close(self) -> None:
        """End all answers and let the memory of their caches go; the model may be used again."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return self.loaded.weights_read()

    @property
    def warmup_report(self) -> WarmupReport:
        """Where everything runs and what it will take. Nothing is run for it: `warm_up` does."""
        return warmup_report(self.loaded, check=False)

    def warm_up(self) -> WarmupReport:
        """The report with a real encode and a real step of decode: times, and every op against its
        reference.
        """
        return self.exclusively(lambda: warmup_report(self.loaded, check=True))

    def describe(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> str:
        """The answer to a prompt about one or several images; `chosen` are the fields of
        `AnswerOptions`.

        image: path, bytes of a file, Pillow image, uint8 array [Y, X, 3], or a list of them. Raises
        MtmdError.
        """
        return self.answer(image, prompt, **chosen).text

    def answer(self, image: Images, prompt: str = DEFAULT_PROMPT, **chosen: Any) -> Answer:
        """As `describe`, with token ids and receipt."""
        *_, last = self.stream([user_message(image, prompt)], **chosen)
        assert isinstance(last, Finished)
        return last.answer

    def stream(self, messages: Sequence[Message], **chosen: Any) -> Iterator[Event]:
        """Events of the answer to a conversation, the last one `Finished`. Stop early by closing
        the iterator.

        messages: {"role": "user", "content": "..."} or content as a list of {"type": "text",
        "text": ...} and {"type": "image", "image": source}. Options are checked at once, before the
        first event is asked for.
        """
        return self._stream(messages, self.loaded.answer_options(chosen))

    def _stream(self, messages: Sequence[Message], settings: AnswerOptions) -> Iterator[Event]:
        yield from self.service.submit_checked(messages, settings)

    def spans(self, messages: Sequence[Message]) -> list[Span]:
        """What the decoder would read: the conversation tokenized, its images encoded."""
        return self.prompt(messages).spans

    def prompt(self, messages: Sequence[Message], encoder: Observer | None = None) -> EncodedPrompt:
        """As `spans`, with the images; every node of the encoding is shown to `encoder`, which sees
        it all even if it is known.
        """
        prepared = self.prompts.prepare(messages, anew=encoder is not None)
        return self.exclusively(lambda: self.prompts.encode(prepared, encoder))

    def observe(self, messages: Sequence[Message], encoder: Observer, decoder: Observer) -> None:
        """Encode and prefill a conversation, every node shown to an observer."""
        spans, runner = self.prompt(messages, encoder).spans, self.runner
        self.exclusively(lambda: runner.prefill(spans, runner.new_cache(), observe=decoder))

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while no answer does. Raises what `work` raises."""
        return self.loaded.exclusively(work)
