"""Goes from prompts to tokens: many sequences at once, in batches that the scheduler chooses. One
thread drives it.

`submit` takes a prompt, `step` runs one batch and hands out tokens. A sequence may be preempted and
resumed, which shows only in the time that it takes: what has been written of its answer is read
again as part of its prompt.
"""

from __future__ import annotations

import time
from collections import abc, deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtmd.base.errors import DeviceError, MtmdError
from mtmd.kernels.cpu.sampling import rows as host_sampling
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.batch import FEW, Batch, BatchShape
from mtmd.llm.engine.constraints import Constraints
from mtmd.llm.engine.drafts import Drafts
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.next_token import next_token, sample_batch
from mtmd.llm.engine.pages import Pages, page_keys
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.engine.prompt_scores import is_scored, score
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.scheduler import Scheduler, Step
from mtmd.llm.engine.sequence import Sequence, State
from mtmd.llm.engine.snapshots import Snapshots
from mtmd.llm.engine.spans import Span, blocks, context_of, identities, lay_out, seen_in, stretch
from mtmd.llm.engine.speculation import MAX_ROWS, Mode, speculation
from mtmd.llm.plan_maker import PlanMaker
from mtmd.llm.sampling.batch_sampler import Sampled
from mtmd.llm.sampling.logit_rows import Row, rows_of
from mtmd.llm.sampling.sampler import may_change
from mtmd.llm.state import PAGE, Cache

# For constraints that do not know yet what may come next: of one batch together, and where nothing
# else is left to do.
READY_S, IDLE_S = 0.005, 0.02


@dataclass(frozen=True)
class Ran:
    """A step that was run, and logits [S, V] of its parts in order, None if nobody needs them.
    `planned`: a plan was made for it.
    """

    step: Step
    logits: Tensor | None
    planned: bool


class Engine:
    """`runner` computes; `pages` of 32 tokens are shared by all, at least a whole context and one
    more. `may_run` says whether there is memory for a batch; one for which there is not is made
    smaller, as far as that goes. How many may wait is for the caller to decide. `speculate`: as
    `speculation.Mode`. `plans`: who else may be making the plan of a batch; it is not used if
    `Runner.plans_alongside` returns False.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        may_run: abc.Callable[[Plan], bool] = lambda _: True,
        speculate: Mode = "off",
        plans: PlanMaker | None = None,
    ):
        self.runner, self._may_run = runner, may_run
        self.cache: Cache = runner.new_cache()
        self.samples_batches = runner.backends[0].device.type == "cuda"
        """Whether the tokens of a batch are chosen where its logits are, at once."""
        self.plans = plans if runner.plans_alongside(self.cache) else None
        self.steps = self.rows = 0
        """Batches run so far, and tokens in them."""
        self.plans_waited_for = 0
        """Plans made while sequences waited for their next token."""
        self.yielded = 0
        """How often a sequence has given its slot to another owner's."""
        self.speculation = speculation(
            speculate,
            runner.context,
            FEW if runner.backends[0].device.type == "cpu" else MAX_ROWS,
            runner.recurrent_bytes,
            runner.pace,
        )
        if not self.samples_batches:  # else the first token would wait for it
            logits = runner.plan(BatchShape(1)).outputs[-1]
            host_sampling.prepare("bf16" if logits.dtype == torch.bfloat16 else "f32")
        self._prompts: dict[Sequence, Prompt] = {}
        """Spans laid out: here, so that the record that the scheduler works on holds no tensors."""
        self.drafts = Drafts(self.speculation, self.cache)
        self.snapshots = Snapshots(self.cache)
        self.constraints = Constraints()
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and all that was read. After a defect nothing of it is reliable."""
        for prompt in self._prompts.values():
            prompt.close()
        self._prompts.clear()
        self._retries: deque[Sequence] = deque()
        """Sequences of a batch that failed, each to be run by itself."""
        self._chosen = 0  # tokens of all answers
        for each in (self.drafts, self.snapshots, self.constraints):
            each.reset()
        self.scheduler = Scheduler(
            Pages(self.cache.pages, PAGE),
            self.runner.sequences,
            self.runner.prefill_tokens,
            self.snapshots if self.cache.recurrent else None,
            FEW if self.cache.in_place else None,
        )

    def submit(self, prompt: Prompt) -> Sequence:
        """Begin a sequence. Raises PromptError where its prompt does not fit, ModelError for a
        token without an embedding.
        """
        self.runner.check(prompt.spans)
        if not self.samples_batches and may_change(prompt.sampler.sampling):
            host_sampling.prepare("f32")  # which such logits are copied to
        spans, position = lay_out(prompt.spans, 0)
        pictures, each = seen_in(spans), list(identities(spans))
        # What tokens attend to beside each other counts for the first of them, too.
        salt = prompt.salt + b"".join(each[picture.at] for picture in pictures)
        total, keys = sum(map(len, spans)), page_keys(each, PAGE, salt)
        sequence = Sequence(
            total,
            tuple(blocks(spans)),
            keys,
            position=position,
            owner=prompt.owner,
            adapters=prompt.adapters,
            pictures=pictures,
            prompt_tokens=total,
            scores=None if prompt.prompt_alternatives is None else [],
        )
        self._prompts[sequence] = replace(prompt, spans=spans)
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Give a sequence up, whatever state it is in; its memory is free at once."""
        if sequence.state is not State.FINISHED:
            self.end(sequence, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self._prompts)

    def step(self) -> list[Sequence]:
        """Run one batch. Returns the sequences that have something new: tokens, or their end."""
        if self._retries:
            return self._retry(self._retries.popleft())
        if changed := self._sample_waiting():
            return changed
        start, chosen = time.perf_counter(), self._chosen
        step = self._schedule()
        if not step.parts:
            return self._sample_waiting(IDLE_S) if self.constraints else self._out_of_pages()
        decoding = {sequence for sequence, _ in step.parts if sequence.decoding}
        changed, ran = list[Sequence](), list[Ran]()
        for batch in step.batches():
            try:
                ran.append(self._run(batch))
            except DeviceError:
                raise  # it is not the fault of a sequence
            except MtmdError:
                # Which sequence is at fault is unknown: each is tried by itself.
                self._retries += [sequence for sequence, _ in batch.parts]
                return changed
            changed += self._advance(ran[-1])
        planned = any(each.planned for each in ran)
        self.plans_waited_for += planned and bool(decoding)
        parts = [part for each in ran for part in each.step.parts]
        if all(sequence in decoding for sequence, _ in parts):
            rows, seconds = sum(count for _, count in parts), time.perf_counter() - start
            tokens = self._chosen - chosen
            self.speculation.ran(len(parts), rows, seconds, tokens, planned=planned)
        return changed

    def _schedule(self) -> Step:
        if (sequence := self.scheduler.unfair_slot()) is not None:
            # What it has read and written stays cached, as far as pages are full and not needed.
            self._register_all(sequence)
            self.scheduler.preempt(sequence)
            self.drafts.discard(sequence)
            self.yielded += 1
        self.drafts.propose(self.scheduler.running)
        step = self.scheduler.schedule()
        for sequence in step.preempted:
            self.drafts.discard(sequence)
        for sequence in step.admitted:
            self._admit(sequence)
        return step

    def _admit(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.cache.clear(sequence.slot)  # of the sequence that had the slot before
        self.snapshots.begin(sequence)
        if sequence.admitted is None:  # else it was preempted, and has waited already
            sequence.admitted, sequence.reused = time.perf_counter(), sequence.done
            sequence.queued_ms = (sequence.admitted - sequence.submitted) * 1e3
        self.constraints.begin(self._prompts[sequence])

    def _run(self, step: Step) -> Ran:
        batch = self._batch(step)
        planned = not self.runner.is_ready(batch.shape)
        if planned and self.plans is not None:
            self.plans.take(batch.shape)
        # The smallest step runs in any case: waiting frees nothing where all wait.
        while not self._may_run(self._planned(batch.shape)) and (smaller := step.smaller()):
            step, batch = smaller, self._batch(smaller)
            planned |= not self.runner.is_ready(batch.shape)
        self.drafts.save(step.parts)
        logits = self.runner.forward(batch)
        self.steps, self.rows = self.steps + 1, self.rows + step.rows
        return Ran(step, logits if batch.answers else None, planned)

    def _planned(self, shape: BatchShape) -> Plan:
        """Return the plan of a batch, ready to run: its programs tell the memory that it takes.
        Where there are ranks, all of them make those at once, as they begin.
        """
        if self.runner.lead is None:
            self.runner.prepare(shape)
        return self.runner.plan(shape)

    def _batch(self, step: Step) -> Batch:
        parts = [(sequence, self._next_spans(sequence, count)) for sequence, count in step.parts]
        # Logits of all or of none: rows of a batch that only reads prompts are not worth a plan.
        requested = any(count >= s.left or is_scored(s) for s, count in step.parts)
        rows = [scored + sampled for _, scored, sampled in _logit_rows(step)]
        context = {
            sequence: context_of(self._prompts[sequence].spans)
            for sequence, _ in parts
            if sequence.pictures and not sequence.context_stored
        }
        return make_batch(parts, self.cache, requested, rows, context)

    def _next_spans(self, sequence: Sequence, count: int) -> list[Span]:
        """The next tokens of a sequence, laid out."""
        tokens, spans = sequence.tokens, self._prompts[sequence].spans
        if tokens and sequence.decoding and count >= sequence.left:
            # A step of decoding, the usual case: without going through the prompt.
            last, more = tokens[-sequence.left :], count - sequence.left
            return [Span((*last, *sequence.proposal[:more]))]  # `make_batch` knows its position
        if tokens:
            spans = [*spans, *lay_out([Span(tuple(tokens))], sequence.position)[0]]
        return list(stretch(spans, sequence.done, sequence.done + count))

    def _advance(self, ran: Ran) -> list[Sequence]:
        """Move the sequences of a batch on, and choose their next tokens."""
        step, logits = ran.step, ran.logits
        parts = list[tuple[Sequence, int, int]]()
        answers, read = list[int](), 0  # rows that answers go by, after those of prompts' tokens
        for sequence, scored, sampled in _logit_rows(step):
            if logits is not None and is_scored(sequence):
                score(sequence, self._prompts[sequence], logits[read : read + scored + 1])
            parts.append((sequence, sampled, sequence.done))
            answers += range(read + scored, read + scored + sampled)
            read += scored + sampled
        if logits is not None and len(answers) < read:
            logits = logits[answers]
        self.scheduler.advance(step)
        changed, first, end = list[Sequence](), 0, time.perf_counter() + READY_S
        chosen = dict[Sequence, list[Sampled]]()
        if logits is not None and self.samples_batches:
            chosen = sample_batch([part[:2] for part in parts], logits, self._prompts.__getitem__)
        lines = () if logits is None else rows_of(logits)
        for sequence, count, done in parts:
            self.snapshots.advance(sequence)
            if sequence.state is State.SAMPLING:
                assert lines
                own = lines[first : first + count]
                try:
                    self._sample(sequence, own, done, end, chosen.get(sequence, ()))
                except MtmdError as error:
                    self.end(sequence, "error", error)
                if sequence.finish is not None or sequence.has_new:
                    changed.append(sequence)
            first += count
        return changed

    def _sample(
        self,
        sequence: Sequence,
        logits: abc.Sequence[Row],
        done: int,
        end: float,
        chosen: abc.Sequence[Sampled],
    ) -> None:
        """Choose the next token of a sequence, and further ones as long as they are as proposed:
        one after the other, so that an answer is the same with proposals and without. If its
        constraint is not ready by `end`, the sequence waits.

        1 + N logits [V], after its last token and after each of N proposed ones; `done` of its
        tokens had been read before the batch.
        """
        prompt, proposal = self._prompts[sequence], sequence.proposal[: len(logits) - 1]
        accepted, waits, sequence.proposal = 0, False, ()
        for row, values in enumerate(logits):
            sampled = chosen[row] if row < len(chosen) else None
            if sampled is None and prompt.constraint is not None:
                waits = not prompt.constraint.ready(max(end - time.perf_counter(), 0))
                if waits:
                    break
            token = self._choose(sequence, values, sampled)
            if row == len(proposal) or token != proposal[row]:
                break
            accepted += 1
            if sequence.state is State.FINISHED:
                break
            sequence.accept()
        rewound = self.drafts.advance(sequence, len(proposal), accepted, done)
        if sequence.state is State.FINISHED:
            return
        if waits and not rewound:
            self.constraints.hold(sequence, prompt, logits[accepted])
        if proposal:
            self.scheduler.trim(sequence)

    def _sample_waiting(self, wait_s: float = 0) -> list[Sequence]:
        """Choose the next tokens of sequences whose constraints have become ready."""
        changed = list[Sequence]()
        for sequence, logits in self.constraints.advance(wait_s):
            try:
                self._choose(sequence, logits)
            except MtmdError as error:
                self.end(sequence, "error", error)
            changed.append(sequence)
        return changed

    def _choose(self, sequence: Sequence, logits: Row, sampled: Sampled | None = None) -> int:
        """Append the next token of a sequence, which ends with it if that was the last."""
        prompt, now = self._prompts[sequence], time.perf_counter()
        if sequence.first is None:
            assert sequence.admitted is not None
            sequence.first, sequence.prefill_ms = now, (now - sequence.admitted) * 1e3
            self.drafts.begin(sequence, prompt)
        if prompt.max_tokens == 0:
            self.end(sequence, "length")
            return -1
        token, stops = next_token(prompt, sequence, logits, sampled)
        sequence.decode_ms = (time.perf_counter() - sequence.first) * 1e3
        if stops:
            sequence.last = token
            self.end(sequence, "stop")
            return token.id
        sequence.append(token)
        self._chosen += 1
        self.speculation.push(sequence, token.id)
        if len(sequence.tokens) >= prompt.max_tokens or sequence.total >= self.runner.context:
            self.end(sequence, "length")
        return token.id

    def end(self, sequence: Sequence, finish: str, error: MtmdError | None = None) -> None:
        """End a sequence, for whatever reason. What it read and wrote stays cached, for those that
        begin alike.
        """
        if sequence.state is not State.WAITING and not error:
            self._register_all(sequence)
        self.scheduler.remove(sequence)
        self.drafts.end(sequence)
        self.constraints.end(sequence, self._prompts.pop(sequence))
        sequence.end(finish, error)

    def _register_all(self, sequence: Sequence) -> None:
        """Make the pages of an answer available, as those of its prompt are already."""
        prompt, read = self._prompts[sequence], len(sequence.keys) * PAGE
        spans = [*prompt.spans, Span(tuple(sequence.tokens))]
        written = list(identities(list(stretch(spans, read, sequence.total))))
        sequence.keys = [*sequence.keys, *page_keys(written, PAGE, prompt.salt, sequence.keys)]
        self.scheduler.register(sequence)

    def _retry(self, sequence: Sequence) -> list[Sequence]:
        """Run one sequence of a batch that failed, from its beginning to its next token: the one
        that fails by itself is given up, the others go on.
        """
        if sequence.state in (State.FINISHED, State.WAITING):
            return []  # it has been cancelled, or preempted, since
        try:
            # From the beginning: what the failed batch has written of it is unknown.
            self.scheduler.restart(sequence)
            self.drafts.discard(sequence)
            assert sequence.slot is not None
            self.cache.clear(sequence.slot)
            while sequence.state in (State.READING, State.DECODING):
                part = sequence, sequence.chunk(self.runner.prefill_tokens)
                total = sequence.total
                self._advance(self._run(Step((part,))))
                if sequence.total > total:
                    break
        except IndexError:  # no pages for all of it: it waits its turn
            self.scheduler.preempt(sequence)
        except DeviceError:
            raise
        except MtmdError as error:
            self.end(sequence, "error", error)
        return [sequence]

    def _out_of_pages(self) -> list[Sequence]:
        """End the first sequence, if there is one: it needs more pages than there are."""
        first = next(iter((*self.scheduler.running, *self.scheduler.waiting)), None)
        if first is None:
            return []
        message = f"{first.total} tokens need more pages than the cache has"
        self.end(first, "error", MtmdError(message))
        return [first]


def _logit_rows(step: Step) -> list[tuple[Sequence, int, int]]:
    """The logits that each part of a step needs: how many to score tokens of a prompt only, then
    those after its last token, and after each of its proposal.
    """
    return [
        (s, count - 1 if is_scored(s) else 0, 1 + max(count - s.left, 0)) for s, count in step.parts
    ]
