"""Many requests at once over one model. One thread owns the device; callers' threads decode
pictures, render templates and tokenize.

The device thread takes turns: a slice of encoding, then a batch of the decoder, so that a large
picture keeps nobody who is being answered waiting for longer than a slice. Whoever stops listening
is given up, between two nodes of the graph.
"""

from __future__ import annotations

import threading
import time
from collections import abc
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from mtmd.config import AnswerOptions, options
from mtmd.events import Answer, Finished, Progress, TextPiece, TokenInfo
from mtmd.kernels.errors import BusyError, DeviceMemoryError, MtmdError
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.llm.engine.engine import Constraint, Engine, Prompt
from mtmd.llm.engine.sequence import Sequence, Token
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.tokenizer.text_stream import StopChecker
from mtmd.loaded.device_thread import DeviceUser
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import warmup_report
from mtmd.prompt.conversation import Message
from mtmd.prompt.prompts import Prompts
from mtmd.service.encode_queue import EncodeQueue, Job
from mtmd.service.processed_tiles import ProcessedTiles
from mtmd.service.receipts import make_receipt
from mtmd.service.request import Request
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket

__all__ = ["Service", "ServiceStats", "Ticket", "TokenCount"]

SLICE_S = 0.02  # of encoding between two batches of the decoder
RETRY_S = 0.05  # until memory is looked for again, with nothing else to do
T = TypeVar("T")


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
        self.engine = Engine(
            loaded.runner, may_run=loaded.admission.may_decode, speculate=loaded.options.speculate
        )
        self.encoding = EncodeQueue(self._prompts.bridge) if loaded.encoder else None
        self._stats = ServiceStats(slots=loaded.runner.sequences, pages=self.engine.cache.pages - 1)
        self._most = queue + loaded.runner.sequences
        self._places = threading.Semaphore(self._most)
        """One for each request from `submit` to its end: the only gate."""
        self._requests: dict[Ticket, Request] = {}
        self._by_sequence: dict[Sequence, Request] = {}
        self._batch_s = 0.0
        self._processed = ProcessedTiles()
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

    def submit(self, messages: abc.Sequence[Message], **chosen: Any) -> Ticket:
        """Take a conversation to be answered; `chosen` are the fields of `AnswerOptions`. Pictures
        are loaded and prepared here.

        Raises MtmdError at once for what is wrong with it: PromptError, ImageError, OptionError;
        BusyError where too many wait; DeviceMemoryError for a picture that takes more memory than
        there can be.
        """
        return self.submit_checked(messages, options(AnswerOptions, chosen))

    def submit_checked(self, messages: abc.Sequence[Message], settings: AnswerOptions) -> Ticket:
        """As `submit`, with the options made."""
        if not self._places.acquire(blocking=False):
            self._count("rejected")
            raise BusyError(
                f"{self._most} requests are being answered or wait, the most that may; try again "
                "later"
            )
        try:
            request = self._prepare(messages, settings)
            self._device.post(lambda: self._take(request))
        except BaseException:
            self._places.release()
            raise
        self._processed.add(request.prompt.pictures)
        return request.ticket

    def _prepare(self, messages: abc.Sequence[Message], settings: AnswerOptions) -> Request:
        """All that can be done, and go wrong, on the caller's thread."""
        clock, loaded = time.perf_counter(), self._loaded
        try:
            prompt = self._prompts.prepare(messages, settings.detail)
        except DeviceMemoryError:
            self._count("images_refused")
            raise
        loaded.runner.check(prompt.pieces)
        preprocess_ms = (time.perf_counter() - clock) * 1e3
        stop = frozenset() if settings.ignore_eos else loaded.checkpoint.stop_tokens
        return Request(
            Ticket(self._give_up),
            prompt,
            settings,
            Sampler(settings),
            preprocess_ms,
            loaded.checkpoint.tokenizer.stream(),
            StopChecker(settings.stop),
            stop,
            self._constraint(settings, stop),
        )

    def count(self, messages: abc.Sequence[Message], detail: str = "auto") -> TokenCount:
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
        return self._processed.get(sha256)

    def exclusively(self, work: abc.Callable[[], T]) -> T:
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
        for ticket in list(self._requests):
            self._cancel(ticket)

    def _defect(self, error: BaseException) -> None:
        """Those under way are told, and the service lives on."""
        failure = MtmdError(f"internal error: {type(error).__name__}")
        failure.__cause__ = error
        self._stats.failed += len(self._requests)
        tickets, self._requests, self._by_sequence = list(self._requests), {}, {}
        self.engine.reset()
        if self.encoding:
            self.encoding.reset()
        for ticket in tickets:
            self._places.release()
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
            for sequence in self.engine.step():
                self._hand_out(self._by_sequence[sequence])
            self._batch_s = time.perf_counter() - start

    def _take(self, request: Request) -> None:
        self._requests[request.ticket] = request
        self._stats.requests += 1
        self._stats.preprocess_ms += request.preprocess_ms
        self._stats.images += len(request.prompt.pictures)
        self._stats.images_shrunk += sum(
            p.plan.shrunk_from is not None for p in request.prompt.pictures
        )
        self._stats.image_cache_hits += sum(p.receipt.cached for p in request.prompt.pictures)
        assert self.encoding or not request.prompt.pictures
        for index, prepared in enumerate(request.prompt.pictures):
            if prepared.embeddings is None and self.encoding:
                request.jobs[index] = self.encoding.add(prepared)
        self._encode_progress(request)

    def _encoded(self, job: Job) -> None:
        self._stats.images_refused += isinstance(job.error, DeviceMemoryError)
        for request in [
            r for r in self._requests.values() if r.sequence is None and job in r.jobs.values()
        ]:
            if job.error is not None:
                self._fail(request, job.error)
            else:
                self._encode_progress(request)

    def _encode_progress(self, request: Request) -> None:
        """Tell how far its pictures are; when all are there, the decoder has its turn."""
        jobs = dict.fromkeys(request.jobs.values())
        done, total = (
            sum(j.total if j.is_over else len(j.tiles) for j in jobs),
            sum(j.total for j in jobs),
        )
        if total and done != request.tiles_reported:
            request.tiles_reported = done
            request.ticket.put(Progress("encode", done, total))
        if any(job.embeddings is None for job in jobs):
            return
        request.encode_ms = sum(job.encode_ms for job in jobs)
        self._stats.encode_ms += request.encode_ms
        embeddings = [
            request.jobs[i].embeddings if i in request.jobs else p.embeddings
            for i, p in enumerate(request.prompt.pictures)
        ]
        self._start(request, [e for e in embeddings if e is not None])

    def _start(self, request: Request, embeddings: list[Tensor]) -> None:
        settings, prepared = request.settings, request.prompt
        spans = self._prompts.bridge.spans(prepared.pieces, prepared.pictures, embeddings)
        try:
            prompt = Prompt(
                spans,
                request.sampler,
                request.stop,
                settings.max_tokens,
                settings.logprobs,
                request.constraint,
            )
            request.sequence = self.engine.submit(prompt)
        except MtmdError as error:
            self._fail(request, error)
            return
        self._by_sequence[request.sequence] = request
        request.ticket.put(Progress("prefill", 0, request.sequence.prompt_tokens))

    def _hand_out(self, request: Request) -> None:
        """New tokens as text, and the end."""
        sequence = request.sequence
        assert sequence is not None
        for token in sequence.take():
            request.tokens.append(token.id)
            self._write(request, request.checker.push(request.stream.push(token.id)), token)
            if request.checker.found is not None:
                if sequence.finish is None:
                    self.engine.end(sequence, "stop")
                self._finish(request, "stop")
                return
        if sequence.error is not None:
            self._fail(request, sequence.error)
        elif sequence.finish is not None:
            self._write(
                request,
                request.checker.push(request.stream.finish()) + request.checker.finish(),
                None,
            )
            self._finish(request, sequence.finish)

    def _write(self, request: Request, text: str, token: Token | None) -> None:
        infos = () if token is None or token.logprob is None else (self._info(token),)
        if text or infos:
            request.texts.append(text)
            request.ticket.put(TextPiece(text, infos))

    def _info(self, token: Token) -> TokenInfo:
        decode = self._loaded.checkpoint.tokenizer.decode
        top = tuple((decode([i], skip_special=False), p) for i, p in token.top)
        return TokenInfo(
            token.id, decode([token.id], skip_special=False), token.logprob or 0.0, top
        )

    def _finish(self, request: Request, finish: str) -> None:
        stats, sequence = self._stats, request.sequence
        if finish == "cancelled":
            stats.cancelled += 1
        else:
            stats.finished += 1
        if sequence is not None:
            stats.prompt_tokens += sequence.prompt_tokens
            stats.reused_tokens += sequence.reused
            stats.preemptions += sequence.preemptions
            stats.proposed_tokens += sequence.proposed
            stats.accepted_tokens += sequence.accepted
            stats.queued_ms += sequence.queued_ms
            stats.prefill_ms += sequence.prefill_ms
            stats.decode_ms += sequence.decode_ms
        stats.output_tokens += len(request.tokens)
        stats.image_tokens += sum(p.plan.tokens for p in request.prompt.pictures)
        receipt = make_receipt(self._loaded, request, finish, str(self.engine.speculation))
        answer = Answer(
            "".join(request.texts), request.prompt.tokens, tuple(request.tokens), receipt
        )
        self._let_go(request)
        request.ticket.put(Finished(answer))

    def _fail(self, request: Request, error: MtmdError) -> None:
        self._stats.failed += 1
        if request.sequence is not None:
            self.engine.cancel(request.sequence)
        self._let_go(request)
        request.ticket.put(error)

    def _cancel(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket)
        if request is None:
            return
        if request.sequence is not None:
            self.engine.cancel(request.sequence)
        self._finish(request, "cancelled")

    def _let_go(self, request: Request) -> None:
        """It is over. Before its caller hears of it, who may ask for the next at once."""
        if request.sequence is not None:
            self._by_sequence.pop(request.sequence, None)
        if self.encoding:
            for job in request.jobs.values():
                self.encoding.leave(job)
        request.jobs = {}
        del self._requests[request.ticket]
        self._places.release()

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
