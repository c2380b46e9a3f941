"""The loop of a service, on the thread of its device: requests are taken, their pictures encoded,
batches of the decoder run, tokens handed out, until an end or a fault.

It takes turns: a slice of encoding, then a batch of the decoder, so that a large picture keeps
nobody who is being answered waiting for longer than a slice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from mtmd.base.errors import DeviceError, DeviceMemoryError, MtmdError
from mtmd.base.tracebacks import traceback_text
from mtmd.base.turns import prioritized
from mtmd.events import Answer, Finished, Progress
from mtmd.llm.batch import BatchShape
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.plan_maker import PlanMaker
from mtmd.loaded.device_thread import again, device_fault
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.prompt.prompts import Prompts
from mtmd.service.answer_writer import AnswerWriter
from mtmd.service.counters import Counters
from mtmd.service.encode_queue import EncodeQueue, Job
from mtmd.service.receipts import make_receipt
from mtmd.service.request import Request
from mtmd.service.slots import Slots
from mtmd.service.stats import ServiceStats
from mtmd.service.ticket import Ticket

SLICE_S = 0.01  # of encoding between two batches of the decoder
RETRY_S = 0.05  # until memory is looked for again, with nothing else to do
log = logging.getLogger("mtmd.service")


class RunLoop:
    """All methods run on the thread of the device, but for `fault` and those that plans are made
    by. `gathered`: around what is handed out after a step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Prompts,
        slots: Slots,
        gathered: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._loaded, self._prompts, self._slots = loaded, prompts, slots
        self._gathered = gathered
        self._writer = AnswerWriter(loaded.checkpoint.tokenizer)
        self.plans = PlanMaker(self._make_plan, loaded.own_threads, self._not_foreseen)
        self.engine = Engine(
            loaded.runner,
            may_run=loaded.admission.may_decode,
            speculate=loaded.options.speculate,
            plans=self.plans,
        )
        self.encoding = EncodeQueue(prompts.bridge) if loaded.encoders else None
        runner, pages = loaded.runner, self.engine.cache.pages - 1
        self.counters = Counters(ServiceStats(slots=runner.sequences, pages=pages))
        self.spelling: list[threading.Thread] = []
        """Threads that write the tokens of scored prompts as text."""
        self._requests: dict[Ticket, Request] = {}
        self._by_sequence: dict[Sequence, Request] = {}
        self._batch_s = 0.0

    # Turns.

    def turn(self) -> None:
        """A slice of encoding, and a batch of the decoder; a slice is as long as the last batch if
        that is longer, so that neither waits for more than the other's share.
        """
        self.plans.set_idle(self._is_idle)
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
        self.plans.set_idle(self._is_idle)

    def pause(self) -> float | None:
        """Until there is something to do: at once, when memory is looked for again, or when
        somebody comes.
        """
        if self.encoding and self.encoding.is_short and not self.engine.busy:
            return RETRY_S
        return None if self._is_idle else 0

    @property
    def _is_idle(self) -> bool:
        return not (self.engine.busy or (self.encoding and self.encoding.busy))

    # Plans, made on a thread of their own, or on the device's.

    def foresee(self, batches: list[BatchShape]) -> None:
        """The first plan is made here, as it reads the weights, with all threads of the device."""
        first, *others = batches
        try:
            self._make_plan(first)
        except DeviceError:
            raise
        except Exception as error:
            self._not_foreseen(error)
            return
        self.plans.foresee(others)
        self.plans.set_idle(self._is_idle)

    def _make_plan(self, batch: BatchShape) -> None:
        """Make the plan, and what is needed of it before it runs."""
        runner = self._loaded.runner
        runner.prepare(batch)
        _ = runner.plan(batch).rough_bytes

    def _not_foreseen(self, error: Exception) -> None:
        """Nobody has asked for it: where it cannot be made, nobody's answer ends by that."""
        reported = error if isinstance(error, MtmdError) else traceback_text(error)
        log.warning("no more plans are made ahead: %s", reported)

    # Requests, from their pictures to the decoder.

    def take(self, request: Request, after: Ticket | None = None) -> None:
        """Begin a request, or, with `after`, once the prompt of that one is read."""
        self._requests[request.ticket] = request
        self.counters.taken(request)
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
            self.counters.one_more("images_refused")
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
        self.counters.stats.encode_ms += request.encode_ms
        embeddings = [
            request.jobs[i].embeddings if i in request.jobs else p.embeddings
            for i, p in enumerate(request.prompt.pictures)
        ]
        self._start(request, [e for e in embeddings if e is not None])

    def _start(self, request: Request, embeddings: list[Tensor]) -> None:
        settings, prepared = request.settings, request.prompt
        try:  # an encoder that reads the prompt computes here, and may lack memory
            spans = self._prompts.bridge.spans(prepared.pieces, prepared.pictures, embeddings)
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

    # Answers.

    def _hand_out(self, request: Request) -> None:
        """New tokens as text, and the end."""
        sequence = request.sequence
        assert sequence is not None
        request.scores.note(sequence)
        tokens = sequence.take()
        self.counters.tokens(request, len(tokens), sequence.queued_ms)
        for token in tokens:
            request.tokens.append(token.id)
            request.repetition.push(token.id)
            self._let_follow(request)
            is_thought = self._writer.read_token(request, token)
            if request.settings.stop_repeating and request.repetition.result:
                if is_thought and request.thought is not None:
                    request.closed_loop |= request.thought.close_early()
                    continue  # the closing mark comes next, and the answer after it
                self._writer.read_rest(request)
                self._stop(request, sequence)
                return
            if request.checker.result is not None:
                self._stop(request, sequence)
                return
        if sequence.error is not None:
            self._fail(request, sequence.error)
        elif sequence.finish is not None:
            self._writer.read_rest(request)
            called = sequence.finish == "stop" and request.parser and request.parser.calls
            self._finish(request, "tool_calls" if called else sequence.finish)

    def _stop(self, request: Request, sequence: Sequence) -> None:
        """End an answer that says enough, whether or not the engine would go on."""
        if sequence.finish is None:
            self.engine.end(sequence, "stop")
        self._finish(request, "stop")

    def _finish(self, request: Request, finish: str) -> None:
        self.counters.ended(request, finish)
        answer = self._answer(request, finish)
        self._let_go(request)
        if request.settings.prompt_logprobs is not None and request.scores.tokens is not None:
            # On the device's thread spelling would keep other answers waiting.
            thread = threading.Thread(
                target=self._writer.put_spelled, args=(request, answer), name="mtmd spelling"
            )
            thread.start()
            self.spelling = [*(one for one in self.spelling if one.is_alive()), thread]
        else:
            request.ticket.put(Finished(answer))

    def _answer(self, request: Request, finish: str) -> Answer:
        receipt = make_receipt(self._loaded, request, finish, str(self.engine.speculation))
        return Answer(
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

    def cancel(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket)
        if request is None:
            return
        if request.sequence is not None:
            self.engine.cancel(request.sequence)
        self._finish(request, "cancelled")

    def cancel_all(self) -> None:
        self.plans.close()
        for ticket in list(self._requests):
            self.cancel(ticket)

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
        self._slots.leave(request)
        self._let_follow(request)

    # Faults.

    def _fail(self, request: Request, error: MtmdError) -> None:
        """End one request with an error of its own."""
        self.counters.stats.failed += 1
        if request.sequence is not None:
            self.engine.cancel(request.sequence)
        self._let_go(request)
        request.ticket.put(error)

    def defect(self, error: BaseException) -> None:
        """End the requests under way with an internal error, and the service lives on, unless it is
        the device that failed: then it raises DeviceError.
        """
        fault = (
            error if isinstance(error, DeviceError) else device_fault(self._loaded.backends, error)
        )
        if fault is not None:
            raise fault
        log.error(
            "%d requests end by an internal error\n%s", len(self._requests), traceback_text(error)
        )
        failure = MtmdError(f"internal error: {type(error).__name__}")
        failure.__cause__ = error
        requests, self._requests, self._by_sequence = self._requests, {}, {}
        self.counters.stats.failed += len(requests)
        self.engine.reset()
        if self.encoding:
            self.encoding.reset()
        for ticket, request in requests.items():
            self._slots.leave(request)
            ticket.put(failure)

    def given_up(self, fault: DeviceError) -> None:
        """All who wait are told, from any thread. The device thread may hang with what it works on:
        nothing of that is touched.
        """
        for ticket in self._slots.waiting():
            ticket.put(again(fault))
