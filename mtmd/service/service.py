"""Many requests at once over one model. One thread owns the device; callers' threads decode
pictures, render templates and tokenize.

The device thread takes turns: a slice of encoding, then a batch of the decoder, so that a large
picture keeps nobody who is being answered waiting for longer than a slice. Whoever stops listening
is given up, between two nodes of the graph.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import abc
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from mtmd.base.errors import BusyError, DeviceError, DeviceMemoryError, MtmdError, PromptError
from mtmd.base.fair_queue import FairSlots
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import current_owner, prioritized
from mtmd.checkpoint.facts import CheckpointFacts, facts_of
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.image.decode import Picture
from mtmd.events import Answer, Finished, Progress
from mtmd.kernels.gpu.ahead.compilations import compilations
from mtmd.kernels.report.ceilings import read_rate_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.llm.batch import BatchShape
from mtmd.llm.batch_shapes import few_rows
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.plan_maker import PlanMaker
from mtmd.llm.sampling.options import SEED_MAX
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.loaded.device_thread import AGAIN, HANG_S, DeviceUser, again
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import warmup_report
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.conversation import Message, RawPrompt
from mtmd.prompt.prompts import Prompts
from mtmd.prompt.tasks import CONFLICT, with_task
from mtmd.service.answer_writer import AnswerWriter
from mtmd.service.call_plan import CallPlan
from mtmd.service.encode_queue import EncodeQueue, Job
from mtmd.service.latencies import Latencies
from mtmd.service.processed_tiles import ProcessedTiles
from mtmd.service.prompt_scores import PromptScores
from mtmd.service.receipts import make_receipt, model_warnings
from mtmd.service.request import Request
from mtmd.service.request_maker import RequestMaker
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket
from mtmd.service.turnover import Turnover

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Self

__all__ = ["Service", "ServiceStats", "Ticket", "TokenCount"]

SLICE_S = 0.01  # of encoding between two batches of the decoder
RETRY_S = 0.05  # until memory is looked for again, with nothing else to do
T = TypeVar("T")
log = logging.getLogger("mtmd.service")


class Servable(Protocol):
    """Describes what a service answers from; a `Model` is one."""

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def prompts(self) -> Prompts: ...


class Service:
    """`queue`: requests that may wait for a place in the batch. `share_cache`: what one tenant has
    asked about is known when another asks. `hang_s`: how long the device may do nothing in the
    midst of a step, as far as can be seen, before it is given up; None for any time. `gathered`:
    around what is handed out after a step.
    """

    @made_on_the_host()
    def __init__(
        self,
        model: Servable,
        *,
        queue: int = 64,
        share_cache: bool = False,
        hang_s: float | None = HANG_S,
        gathered: abc.Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        loaded = self._loaded = model.loaded
        self._prompts = model.prompts
        self._maker = RequestMaker(loaded, model.prompts)
        self._writer = AnswerWriter(loaded.checkpoint.tokenizer)
        self._plans = PlanMaker(self._make_plan, loaded.own_threads, self._not_foreseen)
        self.engine = Engine(
            loaded.runner,
            may_run=loaded.admission.may_decode,
            speculate=loaded.options.speculate,
            plans=self._plans,
        )
        self.encoding = EncodeQueue(self._prompts.bridge) if loaded.encoders else None
        if any(encoder.side for encoder in loaded.encoders):
            # The cache was cleared in this thread's queue, and is written in another
            loaded.runner.backends[0].synchronize()
        self._compiled_before = compilations().late
        self._stats = ServiceStats(slots=loaded.runner.sequences, pages=self.engine.cache.pages - 1)
        self._maximum = queue + loaded.runner.sequences
        self._locations = threading.Semaphore(self._maximum)
        """One for each request from `submit` to its end."""
        self.bulk_slots = FairSlots(self._maximum)
        """More slots, for callers who ask many questions and wait: however many of them there are,
        nobody is refused because of them.
        """
        self._turnover = Turnover()
        self.latencies = Latencies()
        self._requests: dict[Ticket, Request] = {}
        self._open: dict[Ticket, None] = {}
        """Of requests from before they are posted to their end: who waits, also behind a hang."""
        self._by_sequence: dict[Sequence, Request] = {}
        self._batch_s = 0.0
        self._processed = ProcessedTiles()
        self._share_cache, self._gathered = share_cache, gathered
        self._counting = threading.Lock()
        self._spelling: list[threading.Thread] = []
        self._device = DeviceUser(
            loaded.device_thread,
            self._turn,
            self._pause,
            self._defect,
            self._end_all,
            self._given_up,
            hang_s,
        )

    @property
    def name(self) -> str:
        """Return the name of the model, for people."""
        return self._loaded.name

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._loaded.runner.context

    @property
    def capacity(self) -> int:
        """The most requests that are answered or wait."""
        return self._maximum

    @property
    def sees(self) -> bool:
        """Return whether it takes pictures."""
        return self._loaded.encoder is not None

    @property
    def instructions(self) -> Instructions | None:
        """Return what it is told to transcribe audio; None where it takes none."""
        encoder = self._loaded.audio_encoder
        return None if encoder is None else encoder.family.instructions

    @property
    def model_warnings(self) -> tuple[str, ...]:
        """The warnings that every receipt has, as they are about the model."""
        return model_warnings(self._loaded)

    @property
    def thinks(self) -> bool:
        """Return whether its chat template or vocabulary has marks of thoughts."""
        return self._prompts.thinking_template.marks is not None

    @property
    def checkpoint_facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        return facts_of(self._loaded.checkpoint)

    @property
    def load_image(self) -> abc.Callable[..., Picture]:
        """Return how files become pictures."""
        return self._prompts.load_image

    @property
    def warmup_report(self) -> WarmupReport:
        """Do what `Model.warmup_report` does: nothing is run for it."""
        return warmup_report(self._loaded, check=False)

    failure: str | None = None
    """Why it is being started again, of one in another process."""

    @property
    def fault(self) -> DeviceError | None:
        """Why nothing can be answered any more. Known at once, also while the device hangs."""
        return self._device.thread.fault

    @property
    def busy(self) -> bool:
        """Return whether anything is being answered, or waits for it."""
        return bool(self._open)

    def on_fault(self, report: abc.Callable[[DeviceError], None]) -> None:
        """`report` is called, on any thread, once there is a fault; at once where there is one."""
        self._device.thread.on_fault.append(report)
        if self.fault is not None:
            report(self.fault)

    def submit(
        self, messages: abc.Sequence[Message] | RawPrompt, *, tenant: str = "", **chosen: Any
    ) -> Ticket:
        """Take a conversation to be answered; `chosen` are the fields of `AnswerOptions`. Pictures
        are loaded and prepared here. `tenant`: for whom; what is kept of it, to be known when it
        comes again, is for them alone. The device is shared out evenly among
        tenants, or among those that `mtmd.base.turns.set_owner` has named.

        Raises MtmdError at once for what is wrong with it: PromptError, ImageError, OptionError;
        BusyError where too many wait; DeviceMemoryError for a picture that takes more memory than
        there can be; DeviceError after a fault. The ticket raises DeviceError where one comes
        later.
        """
        return self.submit_checked(messages, self._loaded.answer_options(chosen), tenant)

    def submit_several(
        self,
        messages: abc.Sequence[Message] | RawPrompt,
        number: int,
        *,
        tenant: str = "",
        **chosen: Any,
    ) -> list[Ticket]:
        """Do what `submit` does, so many answers to one prompt, which is read once. A seed is that
        of the first; the others have those after it.
        """
        first = self._loaded.answer_options(chosen)
        plan, scores = cache(lambda: self._maker.plan(first)), PromptScores(number)
        tickets = [self.submit_checked(messages, first, tenant, plan=plan, scores=scores)]
        try:
            for index in range(1, number):
                seed = None if first.seed is None else (first.seed + index) % (SEED_MAX + 1)
                settings = replace(first, seed=seed)
                tickets.append(
                    self.submit_checked(messages, settings, tenant, tickets[0], plan, scores)
                )
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    def submit_checked(
        self,
        messages: abc.Sequence[Message] | RawPrompt,
        settings: AnswerOptions,
        tenant: str = "",
        after: Ticket | None = None,
        plan: abc.Callable[[], CallPlan | None] | None = None,
        scores: PromptScores | None = None,
    ) -> Ticket:
        """Do what `submit` does, with the options made; not begun before the prompt of `after` is
        read. `plan`: of calls, where that is made for several; `scores`: likewise, of the prompt.
        """
        if self.fault is not None:
            raise again(self.fault)
        if not self._locations.acquire(blocking=False):
            self._count("rejected")
            with self._counting:
                wait_s = self._turnover.wait_s()
            raise BusyError(
                f"{self._maximum} requests are being answered or wait, the most that may; try "
                "again later",
                wait_s,
            )
        try:
            return self._submit(messages, settings, tenant, after, plan, scores=scores)
        except BaseException:
            self._free_slot()
            raise

    def submit_bulk(
        self, messages: abc.Sequence[Message] | RawPrompt, settings: AnswerOptions
    ) -> Ticket:
        """Do what `submit_checked` does, for a caller who has one of `bulk_slots`; it is never
        busy.
        """
        if self.fault is not None:
            raise again(self.fault)
        return self._submit(messages, settings, is_bulk=True)

    def _submit(
        self,
        messages: abc.Sequence[Message] | RawPrompt,
        settings: AnswerOptions,
        tenant: str = "",
        after: Ticket | None = None,
        plan: abc.Callable[[], CallPlan | None] | None = None,
        is_bulk: bool = False,
        scores: PromptScores | None = None,
    ) -> Ticket:
        plan, scores = plan or (lambda: self._maker.plan(settings)), scores or PromptScores()
        messages = self._with_task(messages, settings)
        try:
            request = self._maker.prepare(
                messages, settings, self._salt(tenant), plan, scores, self._give_up
            )
        except DeviceMemoryError:
            self._count("images_refused")
            raise
        request.owner, request.is_bulk = current_owner() or tenant, is_bulk
        self._post(request, after)
        self._processed.add(request.prompt.pictures, tenant)
        return request.ticket

    def _with_task(
        self, messages: abc.Sequence[Message] | RawPrompt, settings: AnswerOptions
    ) -> abc.Sequence[Message] | RawPrompt:
        if settings.task is None:
            return messages
        if isinstance(messages, RawPrompt):
            raise PromptError(CONFLICT)
        return with_task(messages, settings.task, self.checkpoint_facts.tasks)

    def _post(self, request: Request, after: Ticket | None) -> None:
        with self._counting:
            if not self._open:
                self._turnover.begin()
            self._open[request.ticket] = None
        try:
            self._device.post(lambda: self._take(request, after))
        except MtmdError:
            del self._open[request.ticket]
            raise

    def _salt(self, tenant: str) -> str:
        return "" if self._share_cache else tenant

    @made_on_the_host()
    def count(
        self,
        messages: abc.Sequence[Message],
        detail: str = "auto",
        *,
        tenant: str = "",
        **chosen: Any,
    ) -> TokenCount:
        """Return what a conversation would take; `chosen` are fields of `AnswerOptions` that
        matter. Nothing is encoded.
        """
        settings = self._loaded.answer_options(chosen)
        prompt = self._prompts.prepare(
            messages,
            detail,
            salt=self._salt(tenant),
            box=settings.toolbox,
            open_end=settings.continue_final_message,
            thinking=settings.thinking,
            reserve=settings.max_tokens,
            counting=True,
        )
        images = tuple(picture.plan.tokens for picture in prompt.images)
        videos = tuple(video.tokens for video in prompt.videos)
        audio = tuple(one.plan.tokens for one in prompt.audio)
        return TokenCount(len(prompt.tokens), images, self.context, videos, audio)

    def text_of(self, tokens: abc.Sequence[int]) -> str:
        """Return what they spell, special tokens left out."""
        return self._loaded.checkpoint.tokenizer.decode(tokens)

    def tokens_of(self, text: str, *, special: bool = True, around: bool = False) -> list[int]:
        """Ids of a text. `special`: spellings of special tokens become those tokens; `around`: with
        what the tokenizer puts around a prompt. Raises PromptError.
        """
        tokenizer = self._loaded.checkpoint.tokenizer
        text = text.replace(SEAL, "")
        ids = tokenizer.encode(text if special else tokenizer.seal(text))
        return [*tokenizer.prefix, *ids, *tokenizer.suffix] if around else ids

    def spelling_of(self, tokens: abc.Sequence[int]) -> str:
        """Return what tokens spell, special ones too. Raises PromptError for ids that are none."""
        tokenizer = self._loaded.checkpoint.tokenizer
        wrong = next((i for i in tokens if not 0 <= i < len(tokenizer)), None)
        if wrong is not None:
            raise PromptError(
                f"tokens: found {wrong}, expected ids of the vocabulary, 0 to {len(tokenizer) - 1}"
            )
        return tokenizer.decode(tokens, skip_special=False)

    @property
    def chat_template(self) -> str:
        """Source of the chat template."""
        return self._loaded.checkpoint.template.source

    def rendered(self, messages: abc.Sequence[Message], **chosen: Any) -> str:
        """Return the prompt that a conversation becomes, pictures as the chat template writes them;
        `chosen` are fields of `AnswerOptions` that matter. Raises what `submit` does.
        """
        settings = self._loaded.answer_options(chosen)
        box, open_end = settings.toolbox, settings.continue_final_message
        return self._prompts.rendered(messages, box, open_end, settings.thinking)

    def stats(self) -> ServiceStats:
        """Return the stats of this moment. The device is not asked, which may be in a long step, or
        hang.
        """
        stats, engine = self._stats, self.engine
        scheduler = engine.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.clients_waiting, stats.made_way = scheduler.waiting.owners, engine.yielded
        stats.pages_used, stats.batches, stats.batch_rows = (
            scheduler.pages.stored,
            engine.steps,
            engine.rows,
        )
        stats.programs_compiled = compilations().late - self._compiled_before
        stats.plans_made = self._loaded.runner.plans_made
        stats.plans_waited_for = engine.plans_waited_for
        if self.encoding:
            stats.encoding, stats.encode_batches = len(self.encoding.jobs), self.encoding.batches
            stats.encode_tiles, stats.encode_packed = self.encoding.tiles, self.encoding.packed
        stats.image_cache_bytes = self._prompts.bridge.cache.stored
        stats.processed_bytes = self._processed.stored
        stats.video_cache_bytes = self._prompts.videos.stored_bytes
        return ServiceStats(**vars(stats))

    def processed(self, sha256: str, tenant: str = "") -> tuple[np.ndarray, ...] | None:
        """The tiles that the encoder got of a picture, uint8 [Y, X, 3] each, if this tenant asked
        about it lately.
        """
        return self._processed.get(sha256, self._salt(tenant), tenant)

    def plan_ahead(self) -> None:
        """Have the plans made of batches that are likely to come, beside, one at a time whenever
        there is nothing else to do: each made later holds up those who wait for their next token.
        """
        proposals = self.engine.speculation.mode != "off"
        batches = few_rows(self._loaded.runner, self.engine.cache, proposals)
        if batches:
            self._device.post(lambda: self._foresee(batches))

    def read_rate(self, device: str) -> float | None:
        """Bytes/s at which memory of `device` is read while nobody else does anything with it, None
        where that cannot be measured. Raises MtmdError.
        """
        return self.exclusively(lambda: read_rate_of(device))

    def exclusively(self, work: abc.Callable[[], T]) -> T:
        """Do something with the device while nobody else does. Raises what it raises."""
        return self._device.exclusively(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return what is going on."""
        stats = self.stats()
        return f"<mtmd.Service of {self.name!r}: {stats.running} running, {stats.waiting} waiting>"

    def close(self, within_s: float | None = None) -> None:
        """End every request, and the thread. What was asked for before is done first, what comes
        later is refused. A device that does not come to that `within_s` seconds, as it hangs, is
        given up: that is a fault.
        """
        self._plans.close()
        self._device.close(within_s)
        for thread in self._spelling:
            thread.join(within_s)
        self._plans.join(within_s)

    def _count(self, statistic: str) -> None:
        """One more of what any thread counts; the device thread alone counts the rest."""
        with self._counting:
            setattr(self._stats, statistic, getattr(self._stats, statistic) + 1)

    def _free_slot(self, request: Request | None = None) -> None:
        if request is not None and request.is_bulk:
            return
        self._locations.release()
        with self._counting:
            self._turnover.freed()

    def _give_up(self, ticket: Ticket) -> None:
        with suppress(MtmdError):  # the service is closed, and the request with it
            self._device.post(lambda: self._cancel(ticket))

    # On the thread that makes plans, or on the device's.

    def _make_plan(self, batch: BatchShape) -> None:
        """Make the plan, and what is needed of it before it runs."""
        runner = self._loaded.runner
        runner.prepare(batch)
        _ = runner.plan(batch).rough_bytes

    def _not_foreseen(self, error: Exception) -> None:
        """Nobody has asked for it: where it cannot be made, nobody's answer ends by that."""
        reported = error if isinstance(error, MtmdError) else traceback_text(error)
        log.warning("no more plans are made ahead: %s", reported)

    # Below here everything runs on the device thread.

    def _pause(self) -> float | None:
        """Until there is something to do: at once, when memory is looked for again, or when
        somebody comes.
        """
        if self.encoding and self.encoding.is_short and not self.engine.busy:
            return RETRY_S
        return None if self._is_idle else 0

    def _end_all(self) -> None:
        self._plans.close()
        for ticket in list(self._requests):
            self._cancel(ticket)

    def _given_up(self, fault: DeviceError) -> None:
        """All who wait are told. The device thread may hang with what it works on: nothing of that
        is touched.
        """
        for ticket in list(self._open):
            ticket.put(again(fault))

    def _defect(self, error: BaseException) -> None:
        """End the requests under way with an internal error, and the service lives on, unless it is
        the device that failed: then it raises DeviceError.
        """
        self._check_device(error)
        log.error(
            "%d requests end by an internal error\n%s", len(self._requests), traceback_text(error)
        )
        failure = MtmdError(f"internal error: {type(error).__name__}")
        failure.__cause__ = error
        self._stats.failed += len(self._requests)
        requests, self._requests, self._by_sequence = self._requests, {}, {}
        self.engine.reset()
        if self.encoding:
            self.encoding.reset()
        for ticket, request in requests.items():
            self._free_slot(request)
            self._open.pop(ticket, None)
            ticket.put(failure)

    def _check_device(self, error: BaseException) -> None:
        """Some errors of a GPU are for good: all that is asked of it afterwards fails as well."""
        if isinstance(error, DeviceError):
            raise error
        try:
            for backend in self._loaded.backends:
                backend.synchronize()
        except Exception as result:
            error.__cause__ = error.__cause__ or result
            raise DeviceError(
                f"the device {self._loaded.backends[0].name} has failed ({type(error).__name__}), "
                f"and nothing runs on it any more; {AGAIN}"
            ) from error

    def _turn(self) -> None:
        """A slice of encoding, and a batch of the decoder; a slice is as long as the last batch if
        that is longer, so that neither waits for more than the other's share.
        """
        self._plans.set_idle(self._is_idle)
        if self.encoding and self.encoding.busy:
            with prioritized():
                encoded = self.encoding.step(max(SLICE_S, self._batch_s), not self.engine.busy)
            with self._gathered():
                for job in encoded:
                    self._encoded(job)
        start, self._batch_s = time.perf_counter(), 0.0
        if self.engine.busy:
            with prioritized(), self._gathered():
                for sequence in self.engine.step():
                    self._hand_out(self._by_sequence[sequence])
            self._batch_s = time.perf_counter() - start
        self._plans.set_idle(self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return not (self.engine.busy or (self.encoding and self.encoding.busy))

    def _foresee(self, batches: list[BatchShape]) -> None:
        """The first plan is made here, as it reads the weights, with all threads of the device."""
        first, *others = batches
        try:
            self._make_plan(first)
        except DeviceError:
            raise
        except Exception as error:
            self._not_foreseen(error)
            return
        self._plans.foresee(others)
        self._plans.set_idle(self._is_idle)

    def _take(self, request: Request, after: Ticket | None = None) -> None:
        self._requests[request.ticket] = request
        self._stats.requests += 1
        self._stats.preprocess_ms += request.preprocess_ms
        images, videos = request.prompt.images, request.prompt.videos
        self._stats.images += len(images)
        self._stats.images_shrunk += sum(p.plan.shrunk_from is not None for p in images)
        self._stats.image_cache_hits += sum(p.receipt.cached for p in images)
        self._stats.audio += len(request.prompt.audio)
        self._stats.audio_cache_hits += sum(one.receipt.cached for one in request.prompt.audio)
        self._stats.videos += len(videos)
        self._stats.video_frames += sum(len(video.frames) for video in videos)
        assert self.encoding or not request.prompt.pictures
        for index, prepared in enumerate(request.prompt.pictures):
            if prepared.embeddings is None and self.encoding:
                request.jobs[index] = self.encoding.add(
                    prepared, request.owner, request.picture_adapters
                )
        leader = None if after is None else self._requests.get(after)
        if leader is not None and not leader.tokens:
            request.waits = True
            leader.followers.append(request)
        else:
            self._encode_progress(request)

    def _let_follow(self, request: Request) -> None:
        """Begin the requests for the same prompt; the first alone, and the others after it, where
        the prompt is still to be scored.
        """
        followers, request.followers = request.followers, []
        if request.settings.prompt_logprobs is not None and request.scores.tokens is None:
            followers = [one for one in followers if one.ticket in self._requests]
            if followers:
                followers, followers[0].followers = followers[:1], followers[1:]
        for follower in followers:
            follower.waits = False
            if follower.ticket in self._requests:
                self._encode_progress(follower)

    def _encoded(self, job: Job) -> None:
        if isinstance(job.error, DeviceMemoryError):
            self._count("images_refused")
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
        if request.waits or any(job.embeddings is None for job in jobs):
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
                request.salt.encode(),
                settings.min_tokens,
                request.owner,
                request.thought,
                settings.prompt_logprobs if request.scores.tokens is None else None,
                request.adapters,
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
        request.scores.note(sequence)
        tokens = sequence.take()
        self._note(request, len(tokens), sequence.queued_ms)
        for token in tokens:
            request.tokens.append(token.id)
            request.repetition.push(token.id)
            self._let_follow(request)
            is_thought = self._writer.read_token(request, token)
            if request.settings.stop_repeating and request.repetition.result:
                if is_thought and request.thought is not None:
                    request.closed_loop |= request.thought.close_early()
                    continue  # the closing mark comes next, and the answer after it
                if sequence.finish is None:
                    self.engine.end(sequence, "stop")
                self._writer.read_rest(request)
                self._finish(request, "stop")
                return
            if request.checker.result is not None:
                if sequence.finish is None:
                    self.engine.end(sequence, "stop")
                self._finish(request, "stop")
                return
        if sequence.error is not None:
            self._fail(request, sequence.error)
        elif sequence.finish is not None:
            self._writer.read_rest(request)
            called = sequence.finish == "stop" and request.parser and request.parser.calls
            self._finish(request, "tool_calls" if called else sequence.finish)

    def _note(self, request: Request, tokens: int, queued_ms: float) -> None:
        """Note how long its caller waited for these."""
        if not tokens:
            return
        now, reported, latencies = time.perf_counter(), request.reported, self.latencies
        if reported is None:
            latencies.first_token.add(now - request.began + request.preprocess_ms / 1e3)
            latencies.queue.add(queued_ms / 1e3)
            if tokens > 1:
                latencies.between_tokens.add(0.0, tokens - 1)
        else:
            latencies.between_tokens.add((now - reported) / tokens, tokens)
        request.reported = now

    def _finish(self, request: Request, finish: str) -> None:
        stats, sequence = self._stats, request.sequence
        if finish == "cancelled":
            stats.cancelled += 1
        else:
            stats.finished += 1
            took_s = time.perf_counter() - request.began + request.preprocess_ms / 1e3
            self.latencies.whole.add(took_s)
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
        heard = sum(one.plan.tokens for one in request.prompt.audio)
        stats.audio_tokens += heard
        stats.image_tokens += sum(p.plan.tokens for p in request.prompt.pictures) - heard
        receipt = make_receipt(self._loaded, request, finish, str(self.engine.speculation))
        answer = Answer(
            "".join(request.texts),
            request.prompt.tokens,
            tuple(request.tokens),
            receipt,
            request.parser.calls if request.parser else (),
            request.checker.result,
            tuple(request.logprobs),
            "".join(request.thoughts),
            end=self._writer.end_of(request),
        )
        self._let_go(request)
        if request.settings.prompt_logprobs is not None and request.scores.tokens is not None:
            # On the device's thread spelling would keep other answers waiting.
            thread = threading.Thread(
                target=self._writer.put_spelled, args=(request, answer), name="mtmd spelling"
            )
            thread.start()
            self._spelling = [*(one for one in self._spelling if one.is_alive()), thread]
        else:
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
        """Release a request that is over, before its caller hears of it, who may send the next at
        once.
        """
        if request.sequence is not None:
            self._by_sequence.pop(request.sequence, None)
        if self.encoding:
            for job in request.jobs.values():
                self.encoding.leave(job)
        request.jobs = {}
        del self._requests[request.ticket]
        self._open.pop(request.ticket, None)
        self._free_slot(request)
        self._let_follow(request)
