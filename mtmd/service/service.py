"""Many requests at once over one model. One thread owns the device; callers' threads decode
pictures, render templates and tokenize.

The device thread takes turns: a slice of encoding, then a batch of the decoder, so that a large
picture keeps nobody who is being answered waiting for longer than a slice. Whoever stops listening
is given up, between two nodes of the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from mtmd.config import AnswerOptions, options
from mtmd.events import Answer, Finished, Progress, TextPiece, TokenInfo
from mtmd.kernels.errors import BusyError, DeviceMemoryError, MtmdError
from mtmd.kernels.report.facts import WarmupReport
from mtmd.llm.engine.engine import Constraint, Engine, Generation, Request, Token
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.tokenizer.text_stream import StopChecker, TextStream
from mtmd.loaded.device_thread import DeviceUser
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import warmup_report
from mtmd.prompt.conversation import Message
from mtmd.prompt.prompts import PreparedPrompt, Prompts
from mtmd.service.encoding import EncodeQueue, Job
from mtmd.service.receipts import make_receipt
from mtmd.service.seen import SeenPictures
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket

__all__ = ["Service", "ServiceStats", "Ticket", "TokenCount"]

SLICE_S = 0.02  # of encoding between two batches of the decoder
RETRY_S = 0.05  # until memory is looked for again, with nothing else to do
T = TypeVar("T")


@dataclass(eq=False)
class _Work:
    """One request on its way through the device thread."""

    ticket: Ticket
    prompt: PreparedPrompt
    settings: AnswerOptions
    sampler: Sampler
    preprocess_ms: float
    stream: TextStream
    checker: StopChecker
    stop: frozenset[int]
    constraint: Constraint | None
    jobs: dict[int, Job] = field(default_factory=dict)
    generation: Generation | None = None
    encode_ms: float = 0.0
    told_tiles: int = -1
    pieces_out: list[str] = field(default_factory=list)
    tokens_out: list[int] = field(default_factory=list)


class Servable(Protocol):
    """What a service answers from; a `Model` is one."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def prompts(self) -> Prompts: ...


class Service:
    """`queue`: requests that may wait for a place in the batch."""

    def __init__(self, model: Servable, *, queue: int = 64):
        loaded = self._loaded = model.loaded
        self._prompts = model.prompts
        self.engine = Engine(loaded.runner, queue=queue, may_run=loaded.admission.may_decode)
        self.encoding = EncodeQueue(self._prompts.bridge) if loaded.encoder else None
        self._stats = ServiceStats(slots=loaded.runner.sequences, pages=self.engine.cache.pages - 1)
        self._work: dict[Ticket, _Work] = {}
        self._by_generation: dict[Generation, _Work] = {}
        self._batch_s = 0.0
        self._seen = SeenPictures()
        self._device = DeviceUser(
            loaded.device_thread, self._turn, self._pause, self._defect, self._end_all
        )

    @property
    def name(self) -> str:
        """Of the model, for people."""
        return self._loaded.name

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._loaded.runner.context

    @property
    def sees(self) -> bool:
        """Whether it takes pictures."""
        return self._loaded.encoder is not None

    @property
    def warmup_report(self) -> WarmupReport:
        """As `Model.warmup_report`: nothing is run for it."""
        return warmup_report(self._loaded, check=False)

    def submit(self, messages: Sequence[Message], **chosen: Any) -> Ticket:
        """Take a conversation to be answered; `chosen` are the fields of `AnswerOptions`. Pictures
        are loaded and prepared here.

        Raises MtmdError at once for what is wrong with it: PromptError, ImageError, OptionError;
        BusyError where too many wait; DeviceMemoryError for a picture that takes more memory than
        there can be.
        """
        return self.submit_checked(messages, options(AnswerOptions, chosen))

    def submit_checked(self, messages: Sequence[Message], settings: AnswerOptions) -> Ticket:
        """As `submit`, with the options made."""
        if len(self._work) >= self.engine.queue + self._stats.slots:
            self._count("rejected")
            raise BusyError(
                f"{len(self._work)} requests are being answered or wait, the most that may; try "
                "again later"
            )
        clock = time.perf_counter()
        try:
            prompt = self._prompts.prepare(messages, settings.detail)
        except DeviceMemoryError:
            self._count("images_refused")
            raise
        self._loaded.runner.check_tokens(
            [t for piece in prompt.pieces if piece.picture is None for t in piece.tokens],
            len(prompt.tokens),
        )
        preprocess_ms = (time.perf_counter() - clock) * 1e3
        stop = frozenset() if settings.ignore_eos else self._loaded.checkpoint.stop_tokens
        ticket = Ticket(self._give_up)
        work = _Work(
            ticket,
            prompt,
            settings,
            Sampler(settings),
            preprocess_ms,
            self._loaded.checkpoint.tokenizer.stream(),
            StopChecker(settings.stop),
            stop,
            self._constraint(settings, stop),
        )
        self._seen.add(prompt.pictures)
        self._device.post(lambda: self._take(work))
        return ticket

    def count(self, messages: Sequence[Message], detail: str = "auto") -> TokenCount:
        """What a conversation would take. Nothing is encoded."""
        prompt = self._prompts.prepare(messages, detail)
        images = tuple(picture.plan.tokens for picture in prompt.pictures)
        return TokenCount(len(prompt.tokens), images, self.context)

    def stats(self) -> ServiceStats:
        if self._device.thread.is_running:
            with suppress(MtmdError):  # the service is closed
                return self.exclusively(self._current_stats)
        return self._current_stats()

    def processed(self, sha256: str) -> tuple[np.ndarray, ...] | None:
        """The tiles that the encoder got of a picture, uint8 [Y, X, 3] each, if it was seen
        lately.
        """
        return self._seen.get(sha256)

    def exclusively(self, work: Callable[[], T]) -> T:
        """Do something with the device while nobody else does. Raises what it raises."""
        return self._device.exclusively(work)

    def close(self) -> None:
        """End every request, and the thread. What was asked for before is done first, what comes
        later is refused.
        """
        self._device.close()

    def _constraint(self, settings: AnswerOptions, stop: frozenset[int]) -> Constraint | None:
        """What an answer has to look like, None for anything. Raises OptionError. The first call
        reads the vocabulary, which takes time.
        """
        if settings.json_schema is None:
            return None
        assert isinstance(settings.json_schema, str)  # the options made it so
        return self._loaded.grammars.constraint(settings.json_schema, stop)

    def _count(self, statistic: str) -> None:
        """One more of it. On the device thread like all counting: callers' threads would lose some
        of each other's.
        """

        def count() -> None:
            setattr(self._stats, statistic, getattr(self._stats, statistic) + 1)

        with suppress(MtmdError):  # the service is closed, and nobody counts any more
            self._device.post(count)

    def _give_up(self, ticket: Ticket) -> None:
        with suppress(MtmdError):  # the service is closed, and the request with it
            self._device.post(lambda: self._cancel(ticket))

    # Below here everything runs on the device thread.

    def _pause(self) -> float | None:
        """Until there is something to do: at once, when memory is looked for again, or when
        somebody comes.
        """
        if self.encoding and self.encoding.is_short and not self.engine.busy:
            return RETRY_S
        return 0 if self.engine.busy or (self.encoding and self.encoding.busy) else None

    def _end_all(self) -> None:
        for ticket in list(self._work):
            self._cancel(ticket)

    def _defect(self, error: BaseException) -> None:
        """Those under way are told, and the service lives on."""
        failure = MtmdError(f"internal error: {type(error).__name__}")
        failure.__cause__ = error
        self._stats.failed += len(self._work)
        tickets, self._work, self._by_generation = list(self._work), {}, {}
        self.engine.reset()
        if self.encoding:
            self.encoding.reset()
        for ticket in tickets:
            ticket.put(failure)

    def _turn(self) -> None:
        """A slice of encoding, and a batch of the decoder; a slice is as long as the last batch if
        that is longer, so that neither waits for more than the other's share.
        """
        if self.encoding and self.encoding.busy:
            for job in self.encoding.step(max(SLICE_S, self._batch_s)):
                self._encoded(job)
        start, self._batch_s = time.perf_counter(), 0.0
        if self.engine.busy:
            for generation in self.engine.step():
                self._hand_out(self._by_generation[generation])
            self._batch_s = time.perf_counter() - start

    def _take(self, work: _Work) -> None:
        self._work[work.ticket] = work
        self._stats.requests += 1
        self._stats.preprocess_ms += work.preprocess_ms
        self._stats.images += len(work.prompt.pictures)
        self._stats.images_shrunk += sum(
            p.plan.shrunk_from is not None for p in work.prompt.pictures
        )
        self._stats.image_cache_hits += sum(p.receipt.cached for p in work.prompt.pictures)
        assert self.encoding or not work.prompt.pictures
        for index, prepared in enumerate(work.prompt.pictures):
            if prepared.embeddings is None and self.encoding:
                work.jobs[index] = self.encoding.add(prepared)
        self._encode_progress(work)

    def _encoded(self, job: Job) -> None:
        self._stats.images_refused += isinstance(job.error, DeviceMemoryError)
        for work in [
            w for w in self._work.values() if w.generation is None and job in w.jobs.values()
        ]:
            if job.error is not None:
                self._fail(work, job.error)
            else:
                self._encode_progress(work)

    def _encode_progress(self, work: _Work) -> None:
        """Tell how far its pictures are; when all are there, the decoder has its turn."""
        jobs = dict.fromkeys(work.jobs.values())
        done, total = (
            sum(j.total if j.is_over else len(j.tiles) for j in jobs),
            sum(j.total for j in jobs),
        )
        if total and done != work.told_tiles:
            work.told_tiles = done
            work.ticket.put(Progress("encode", done, total))
        if any(job.embeddings is None for job in jobs):
            return
        work.encode_ms = sum(job.encode_ms for job in jobs)
        self._stats.encode_ms += work.encode_ms
        embeddings = [
            work.jobs[i].embeddings if i in work.jobs else p.embeddings
            for i, p in enumerate(work.prompt.pictures)
        ]
        self._start(work, [e for e in embeddings if e is not None])

    def _start(self, work: _Work, embeddings: list[Tensor]) -> None:
        settings, prompt = work.settings, work.prompt
        spans = self._prompts.bridge.spans(prompt.pieces, prompt.pictures, embeddings)
        try:
            request = Request(
                spans,
                work.sampler,
                work.stop,
                settings.max_tokens,
                settings.logprobs,
                work.constraint,
            )
            work.generation = self.engine.submit(request)
        except MtmdError as error:
            self._fail(work, error)
            return
        self._by_generation[work.generation] = work
        work.ticket.put(Progress("prefill", 0, work.generation.prompt_tokens))

    def _hand_out(self, work: _Work) -> None:
        """New tokens as text, and the end."""
        generation = work.generation
        assert generation is not None
        for token in generation.take():
            work.tokens_out.append(token.id)
            self._say(work, work.checker.push(work.stream.push(token.id)), token)
            if work.checker.found is not None:
                if generation.finish is None:
                    self.engine.end(generation, "stop")
                self._finish(work, "stop")
                return
        if generation.error is not None:
            self._fail(work, generation.error)
        elif generation.finish is not None:
            self._say(work, work.checker.push(work.stream.finish()) + work.checker.finish(), None)
            self._finish(work, generation.finish)

    def _say(self, work: _Work, text: str, token: Token | None) -> None:
        told = () if token is None or token.logprob is None else (self._info(token),)
        if text or told:
            work.pieces_out.append(text)
            work.ticket.put(TextPiece(text, told))

    def _info(self, token: Token) -> TokenInfo:
        decode = self._loaded.checkpoint.tokenizer.decode
        top = tuple((decode([i], skip_special=False), p) for i, p in token.top)
        return TokenInfo(
            token.id, decode([token.id], skip_special=False), token.logprob or 0.0, top
        )

    def _finish(self, work: _Work, finish: str) -> None:
        stats, generation = self._stats, work.generation
        if finish == "cancelled":
            stats.cancelled += 1
        else:
            stats.finished += 1
        if generation is not None:
            stats.prompt_tokens += generation.prompt_tokens
            stats.reused_tokens += generation.reused
            stats.preemptions += generation.preemptions
            stats.queued_ms += generation.queued_ms
            stats.prefill_ms += generation.prefill_ms
            stats.decode_ms += generation.decode_ms
        stats.output_tokens += len(work.tokens_out)
        stats.image_tokens += sum(p.plan.tokens for p in work.prompt.pictures)
        prompt = work.prompt.tokens
        receipt = make_receipt(
            self._loaded,
            [picture.receipt for picture in work.prompt.pictures],
            generation,
            prompt_tokens=len(prompt),
            output_tokens=len(work.tokens_out),
            finish=finish,
            preprocess_ms=work.preprocess_ms,
            encode_ms=work.encode_ms,
            seed=work.sampler.seed if work.settings.temperature else None,
        )
        work.ticket.put(
            Finished(Answer("".join(work.pieces_out), prompt, tuple(work.tokens_out), receipt))
        )
        self._forget(work)

    def _fail(self, work: _Work, error: MtmdError) -> None:
        self._stats.failed += 1
        if work.generation is not None:
            self.engine.cancel(work.generation)
        self._forget(work)
        work.ticket.put(error)

    def _cancel(self, ticket: Ticket) -> None:
        work = self._work.get(ticket)
        if work is None:
            return
        if work.generation is not None:
            self.engine.cancel(work.generation)
        self._finish(work, "cancelled")

    def _forget(self, work: _Work) -> None:
        self._work.pop(work.ticket, None)
        if work.generation is not None:
            self._by_generation.pop(work.generation, None)
        if self.encoding:
            for job in work.jobs.values():
                self.encoding.leave(job)
        work.jobs = {}

    def _current_stats(self) -> ServiceStats:
        stats, engine = self._stats, self.engine
        stats.running, stats.waiting = len(engine.batcher.running), len(engine.batcher.waiting)
        stats.pages_used, stats.batches, stats.batch_rows = (
            engine.batcher.pages.held,
            engine.steps,
            engine.rows,
        )
        if self.encoding:
            stats.encoding, stats.encode_batches, stats.encode_tiles = (
                len(self.encoding.jobs),
                self.encoding.batches,
                self.encoding.tiles,
            )
        return ServiceStats(**vars(stats))
