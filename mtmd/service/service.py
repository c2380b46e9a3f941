"""Many requests at once over one model. One thread owns the device and runs `run_loop.py`; callers'
threads decode pictures, render templates and tokenize here. Whoever stops listening is given up,
between two nodes of the graph.
"""

from __future__ import annotations

from collections import abc
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from mtmd.base.errors import BusyError, DeviceError, DeviceMemoryError, MtmdError, PromptError
from mtmd.base.fair_queue import FairSlots
from mtmd.base.turns import current_owner
from mtmd.checkpoint.facts import CheckpointFacts, facts_of
from mtmd.clip.audio.instructions import Instructions
from mtmd.clip.image.decode import Picture
from mtmd.kernels.gpu.ahead.compilations import compilations
from mtmd.kernels.report.measured_speeds import read_rate_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.llm.batch_shapes import few_rows
from mtmd.llm.sampling.options import SEED_MAX
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.loaded.device_thread import HANG_S, DeviceUser, again
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import warmup_report
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.conversation import Message, RawPrompt
from mtmd.prompt.prompts import Prompts
from mtmd.prompt.tasks import CONFLICT, with_task
from mtmd.service.call_plan import CallPlan
from mtmd.service.latencies import Latencies
from mtmd.service.processed_tiles import ProcessedTiles
from mtmd.service.prompt_scores import PromptScores
from mtmd.service.receipts import model_warnings
from mtmd.service.request import Request
from mtmd.service.request_maker import RequestMaker
from mtmd.service.run_loop import RunLoop
from mtmd.service.slots import Slots
from mtmd.service.stats import ServiceStats, TokenCount
from mtmd.service.ticket import Ticket

if TYPE_CHECKING:  # not in typing before Python 3.11
    from typing_extensions import Self

__all__ = ["Service", "ServiceStats", "Ticket", "TokenCount"]

T = TypeVar("T")


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
        maximum = queue + loaded.runner.sequences
        self._slots = Slots(maximum)
        self.bulk_slots = FairSlots(maximum)
        """More slots, for callers who ask many questions and wait: however many of them there are,
        nobody is refused because of them.
        """
        self._loop = loop = RunLoop(loaded, model.prompts, self._slots, gathered)
        self.engine, self.encoding = loop.engine, loop.encoding
        if any(encoder.side for encoder in loaded.encoders):
            # The cache was cleared in this thread's queue, and is written in another
            loaded.runner.backends[0].synchronize()
        self._compiled_before = compilations().late
        self._processed = ProcessedTiles()
        self._share_cache = share_cache
        self._device = DeviceUser(
            loaded.device_thread,
            loop.turn,
            loop.pause,
            loop.defect,
            loop.cancel_all,
            loop.given_up,
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
        return self._slots.maximum

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
    def latencies(self) -> Latencies:
        """Return how long callers have waited."""
        return self._loop.counters.latencies

    @property
    def fault(self) -> DeviceError | None:
        """Why nothing can be answered any more. Known at once, also while the device hangs."""
        return self._device.thread.fault

    @property
    def busy(self) -> bool:
        """Return whether anything is being answered, or waits for it."""
        return bool(self._slots.waiting())

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
        try:
            self._slots.acquire()
        except BusyError:
            self._loop.counters.one_more("rejected")
            raise
        try:
            return self._submit(messages, settings, tenant, after, plan, scores=scores)
        except BaseException:
            self._slots.release()
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
            self._loop.counters.one_more("images_refused")
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
        self._slots.open(request.ticket)
        try:
            self._device.post(lambda: self._loop.take(request, after))
        except MtmdError:
            self._slots.close(request.ticket)
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

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings of special tokens by the checkpoint's names: `eos_token` and so on."""
        return dict(self._loaded.checkpoint.tokenizer.special_text)

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
        stats, engine = self._loop.counters.stats, self.engine
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
            self._device.post(lambda: self._loop.foresee(batches))

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
        self._loop.plans.close()
        self._device.close(within_s)
        for thread in self._loop.spelling:
            thread.join(within_s)
        self._loop.plans.join(within_s)

    def _give_up(self, ticket: Ticket) -> None:
        with suppress(MtmdError):  # the service is closed, and the request with it
            self._device.post(lambda: self._loop.cancel(ticket))
