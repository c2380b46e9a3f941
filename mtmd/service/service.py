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
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from mtmd.config import AnswerOptions, options
from mtmd.events import Answer, Finished, Progress, TextPiece, TokenInfo
from mtmd.kernels.errors import BusyError, DeviceMemoryError, MtmdError
from mtmd.llm.engine.engine import Constraint, Engine, Generation, Request, Token
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.tokenizer.text_stream import StopChecker, TextStream
from mtmd.prompt.bridge import Piece, Prepared
from mtmd.prompt.conversation import Message
from mtmd.service.device_thread import DeviceThread
from mtmd.service.encoding import EncodeQueue, Job
from mtmd.service.seen import SeenPictures
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket

__all__ = ["Service", "ServiceStats", "Ticket", "TokenCount"]

if TYPE_CHECKING:
    from mtmd.model import Model

SLICE_S = 0.02  # of encoding between two batches of the decoder
RETRY_S = 0.05  # until memory is looked for again, with nothing else to do
T = TypeVar("T")


@dataclass(eq=False)
class _Work:
    """One request on its way through the device thread."""

    ticket: Ticket
    pieces: list[Piece]
    prepared: list[Prepared]
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


class Service:
    """`queue`: requests that may wait for a place in the batch."""

    def __init__(self, model: Model, *, queue: int = 64):
        self.model = model
        self.engine = Engine(model.runner, queue=queue, may_run=model.admission.may_decode)
        self.encoding = EncodeQueue(model.bridge) if model.encoder else None
        self._stats = ServiceStats(slots=model.runner.sequences, pages=self.engine.cache.pages - 1)
        self._work: dict[Ticket, _Work] = {}
        self._by_generation: dict[Generation, _Work] = {}
        self._batch_s = 0.0
        self._seen = SeenPictures()
        self._device = DeviceThread(self._turn, self._pause, self._defect, self._end_all)

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
            self._stats.rejected += 1
            raise BusyError(
                f"{len(self._work)} requests are being answered or wait, the most that may; try "
                "again later"
            )
        clock = time.perf_counter()
        try:
            pieces, prepared = self.model.prepare(messages, settings.detail)
        except DeviceMemoryError:
            self._stats.images_refused += 1
            raise
        self.model.runner.check_tokens(
            [t for piece in pieces if piece.picture is None for t in piece.tokens],
            sum(len(piece.tokens) for piece in pieces),
        )
        preprocess_ms = (time.perf_counter() - clock) * 1e3
        stop = frozenset() if settings.ignore_eos else self.model.checkpoint.stop_tokens
        ticket = Ticket(self._give_up)
        work = _Work(
            ticket,
            pieces,
            prepared,
            settings,
            Sampler(settings),
            preprocess_ms,
            self.model.checkpoint.tokenizer.stream(),
            StopChecker(settings.stop),
            stop,
            self.model.constraint(settings, stop),
        )
        self._seen.add(prepared)
        self._device.post(lambda: self._take(work))
        return ticket

    def count(self, messages: Sequence[Message], detail: str = "auto") -> TokenCount:
        """What a conversation would take. Nothing is encoded."""
        pieces, prepared = self.model.prepare(messages, detail)
        return TokenCount(
            sum(len(p.tokens) for p in pieces),
            tuple(p.plan.tokens for p in prepared),
            self.model.runner.context,
        )

    def stats(self) -> ServiceStats:
        if self._device.is_running:
            with suppress(MtmdError):  # the service is closed
                return self.exclusively(self._count)
        return self._count()

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
        self._stats.images += len(work.prepared)
        self._stats.images_shrunk += sum(p.plan.shrunk_from is not None for p in work.prepared)
        self._stats.image_cache_hits += sum(p.receipt.cached for p in work.prepared)
        assert self.encoding or not work.prepared
        for index, prepared in enumerate(work.prepared):
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
            for i, p in enumerate(work.prepared)
        ]
        self._start(work, [e for e in embeddings if e is not None])

    def _start(self, work: _Work, embeddings: list[Tensor]) -> None:
        model, settings = self.model, work.settings
        spans = model.bridge.spans(work.pieces, work.prepared, embeddings)
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
        decode = self.model.checkpoint.tokenizer.decode
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
        stats.image_tokens += sum(p.plan.tokens for p in work.prepared)
        receipt = self.model.receipt(
            [p.receipt for p in work.prepared],
            sum(len(p.tokens) for p in work.pieces),
            len(work.tokens_out),
            finish,
            work.preprocess_ms,
            work.encode_ms,
            generation,
            work.sampler.seed if work.settings.temperature else None,
        )
        prompt = tuple(t for piece in work.pieces for t in piece.tokens)
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

    def _count(self) -> ServiceStats:
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
