"""From prompts to tokens: many sequences at once, in batches that the batcher chooses. One thread
drives it.

`submit` takes a prompt, `step` runs one batch and hands out tokens. A sequence is given up and
taken up again without anybody noticing but by the time it takes: what has been written of its
answer is read again as part of its prompt.
"""

from __future__ import annotations

import time
from collections import OrderedDict, abc, deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import DeviceError, MtmdError
from mtmd.kernels.cpu.sampling import rows as drawing
from mtmd.kernels.plan.scheduler import Plan
from mtmd.llm.batch import FEW, Batch
from mtmd.llm.engine.batcher import Batcher, Step
from mtmd.llm.engine.beside import Alone, Beside
from mtmd.llm.engine.lookup import PICTURE
from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.pages import Pages, page_keys
from mtmd.llm.engine.runner import Runner
from mtmd.llm.engine.sequence import Sequence, Token
from mtmd.llm.engine.spans import Span, blocks, identities, lay_out, stretch
from mtmd.llm.engine.speculation import MOST_ROWS, Mode, Speculation, speculation
from mtmd.llm.plan_maker import Deferral, PlanMaker
from mtmd.llm.sampling.batch_sampler import Drawn, Wish, draw
from mtmd.llm.sampling.logit_rows import Row, rows_of, tensor_of
from mtmd.llm.sampling.sampler import Sampler
from mtmd.llm.state import PAGE, Cache, Snapshot

# recurrent states kept for prompts that begin alike, as far as they do not take more than
SNAPSHOTS = 32
SNAPSHOT_BYTES = 512 << 20
# For constraints that do not know yet what may come next: of one batch together, and where nothing
# else is left to do.
READY_S, IDLE_S = 0.005, 0.02
SCORED_AT_ONCE = 32  # rows of logits: a copy of each is made


class Constraint(Protocol):
    """What an answer has to look like: which tokens may come next."""

    def begin(self) -> None:
        """The prompt is about to be read, perhaps anew."""

    def wake(self) -> None:
        """What it is for begins now, some time after `begin`."""

    def ready(self, wait_s: float = 0) -> bool:
        """Whether `mask` or `allowed` would wait for nothing, after `wait_s` at the latest."""

    def allowed(self, size: int) -> np.ndarray:
        """uint8 [size / 8]: a bit for each of `size` logits, the lowest of each byte first, set
        where that token may come next. Asked for in place of `mask`, where a device has the logits.
        """

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf at every token that may not come next."""

    def accept(self, token: int) -> None:
        """The token has been taken."""

    def close(self) -> None:
        """The answer is over."""


class Thought(Protocol):
    """What a model thinks before it answers, counted by tokens. A constraint of the answer knows of
    it by itself.
    """

    tokens: int
    """Of the thought so far, marks included."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has begun: nothing is asked of it afterwards."""

    @property
    def must_be_closed(self) -> bool:
        """Whether a token of `Prompt.stop` may not end the answer here, as it has none yet."""

    def forced(self) -> int | None:
        """The token that has to come next, None for any."""

    def close(self) -> int:
        """End the thought. Returns the first token of the mark that does."""

    def accept(self, token: int) -> None:
        """The token has been taken."""


@dataclass(frozen=True)
class Prompt:
    """What is to be read, and how it is to be answered. `alternatives`: how many of the most
    probable tokens to give beside each, None for no probabilities at all. `constraint` is of this
    answer alone. What was read for a prompt of another `salt` is not used for this one. Before
    `min_tokens` no token of `stop` comes, where another may; those of a `thought` are not among
    them. Places and batches are shared out by `owner`. `prompt_alternatives`: as
    `alternatives`, of the prompt's own tokens, which are text.
    """

    spans: abc.Sequence[Span]
    sampler: Sampler
    stop: frozenset[int] = frozenset()
    max_tokens: int = 256
    alternatives: int | None = None
    constraint: Constraint | None = None
    salt: bytes = b""
    min_tokens: int = 0
    owner: str = ""
    thought: Thought | None = None
    prompt_alternatives: int | None = None

    @property
    def thinks(self) -> bool:
        """Whether the answer has not begun yet."""
        return self.thought is not None and not self.thought.is_over

    def may_end(self, tokens: int) -> bool:
        """Whether so many tokens, those of the thought among them, are enough."""
        return tokens - (self.thought.tokens if self.thought else 0) >= self.min_tokens

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """Its tokens, each once: a picture has thousands of one."""
        return tuple({t for span in self.spans for t in span.tokens})


class Engine:
    """`runner` computes; `pages` of 32 tokens are shared by all, at least a whole context and one
    more. `may_run` says whether there is memory for a batch; one for which there is not is made
    smaller, as far as that goes. How many may wait is for the caller to decide. `speculate`: as
    `speculation.Mode`. `plans`: by whom the plan of a batch is made while those of it go on who
    wait for their next token; it is not used where `Runner.plans_beside` says no.
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
        self.draws_together = runner.backends[0].device.type == "cuda"
        """Whether the tokens of a batch are chosen where its logits are, in one go."""
        self.plans = plans if runner.plans_beside(self.cache) else None
        self._deferral = None if self.plans is None else Deferral(self.plans)
        self._planned, self._planning_s = False, 0.0
        """Whether a plan was made in a step, and how long that has taken."""
        self.steps = self.rows = 0
        """Batches run so far, and tokens in them."""
        self.deferred = self.held_up = 0
        """Batches without their parts of prompts, which waited for a plan; plans for which somebody
        has waited who waits for a next token.
        """
        self.made_way = 0
        """How often a sequence has given its place to another owner's."""
        self.speculation: Speculation = speculation(
            speculate,
            runner.context,
            FEW if runner.backends[0].device.type == "cpu" else MOST_ROWS,
            runner.recurrent_bytes,
            runner.pace,
        )
        if not self.draws_together:
            drawing.prepare()  # else the first token would wait for it
        self.beside, self.reading = Beside(), Alone(FEW)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and all that was read. After a defect nothing of it is to be relied
        on.
        """
        self.batcher = Batcher(
            Pages(self.cache.pages, PAGE),
            self.runner.sequences,
            self.runner.prefill_tokens,
            self.cache.recurrent,
            self.beside.rows,
            FEW if self.cache.in_place else None,
            self.reading.rows if self.cache.in_place else lambda left: left,
        )
        # What a sequence is made of, its spans laid out: here, so that the record that the batcher
        # works on holds no tensors.
        for prompt in getattr(self, "_prompts", {}).values():
            _close(prompt)
        self._prompts: dict[Sequence, Prompt] = {}
        self._held: dict[Sequence, Tensor] = {}
        """Logits [V] of sequences whose constraints are not ready. Batches go on without these."""
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._suspects: deque[Sequence] = deque()
        """Sequences of a batch that failed, each to be run by itself."""
        self._before: dict[Sequence, Snapshot] = {}
        """Recurrent states before proposed tokens: of a sequence's `done` tokens."""
        self._chosen = 0  # tokens of all answers
        self.speculation.reset()
        if self._deferral is not None:
            self._deferral.end()

    def submit(self, prompt: Prompt) -> Sequence:
        """Begin a sequence. Raises PromptError where its prompt does not fit, ModelError for a
        token without an embedding.
        """
        self.runner.check(prompt.spans)
        spans, position = lay_out(prompt.spans, 0)
        total, keys = sum(map(len, spans)), page_keys(list(identities(spans)), PAGE, prompt.salt)
        sequence = Sequence(
            total,
            tuple(blocks(spans)),
            keys,
            position=position,
            owner=prompt.owner,
            prompt_tokens=total,
            scores=None if prompt.prompt_alternatives is None else [],
        )
        self._prompts[sequence] = replace(prompt, spans=spans)
        self.batcher.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Give a sequence up, whatever state it is in; its memory is free at once."""
        if sequence.finish is None:
            self.end(sequence, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self._prompts)

    def step(self) -> list[Sequence]:
        """Run one batch. Returns the sequences that have something new: tokens, or their end."""
        if self._suspects:
            return self._alone(self._suspects.popleft())
        if changed := self._choose_held():
            return changed
        start, chosen = time.perf_counter(), self._chosen
        if (greedy := self.batcher.greedy()) is not None:
            self._put_aside(greedy)
        self.speculation.propose([s for s in self.batcher.running if s not in self._held])
        step = self.batcher.step()
        for sequence in step.preempted:
            sequence.preemptions += 1
            self._before.pop(sequence, None)
        for sequence in step.admitted:
            self._admit(sequence)
        if not step.parts:
            return self._choose_held(IDLE_S) if self._held else self._stuck()
        waiting = {sequence for sequence, _ in step.parts if sequence.decoding}
        used = sum(number for sequence, number in step.parts if sequence in waiting)
        parts, changed, planned, planning_s = list[tuple[Sequence, int]](), [], False, 0.0
        for each in self._batches(step):
            try:
                ran, logits = self._run(each)
            except DeviceError:
                raise  # it is nobody's fault here
            except MtmdError:
                # Whose fault it is cannot be told from the batch: each is tried by itself.
                self._suspects += [sequence for sequence, _ in each.parts]
                return changed
            changed += self._advance(ran, logits)
            parts += ran.parts
            planned, planning_s = planned or self._planned, planning_s + self._planning_s
        rows, seconds = sum(number for _, number in parts), time.perf_counter() - start
        self.held_up += planned and bool(waiting)
        if all(sequence in waiting for sequence, _ in parts):
            self.speculation.ran(len(parts), rows, seconds, self._chosen - chosen, planned=planned)
        if used and (not planned or self.runner.lead is None):
            self.beside.ran(min(used, rows), rows, seconds - planning_s)
        elif not planned:
            self.reading.ran(rows, seconds)
        return changed

    def _put_aside(self, sequence: Sequence) -> None:
        """For another owner's. What it has read and written stays known, as far as pages are full,
        and is read again where they are needed for others meanwhile.
        """
        self._make_known(sequence)
        self.batcher.preempt(sequence)
        sequence.preemptions += 1
        self.made_way += 1
        self._before.pop(sequence, None)

    def _make_known(self, sequence: Sequence) -> None:
        """The pages of its prompt are known; those of its answer become so."""
        spans, known = self._prompts[sequence].spans, len(sequence.keys) * PAGE
        spans = [*spans, Span(tuple(sequence.tokens))]
        written = list(identities(list(stretch(spans, known, sequence.total))))
        salt = self._prompts[sequence].salt
        sequence.keys = [*sequence.keys, *page_keys(written, PAGE, salt, sequence.keys)]
        self.batcher.register(sequence)

    def _admit(self, sequence: Sequence) -> None:
        now = time.perf_counter()
        assert sequence.slot is not None
        self.cache.clear(sequence.slot)  # of whoever had the slot before
        if sequence.done and self.cache.recurrent:
            key = sequence.keys[sequence.done // PAGE - 1]
            self._snapshots.move_to_end(key)
            self.cache.restore(sequence.slot, self._snapshots[key])
        if sequence.admitted is None:  # else it gave way before, and has waited already
            sequence.admitted, sequence.reused = now, sequence.done
            sequence.queued_ms = (now - sequence.submitted) * 1e3
        if constraint := self._prompts[sequence].constraint:
            constraint.begin()

    def _run(self, step: Step) -> tuple[Step, Tensor | None]:
        """What was run of a step, and logits [S, V] of its parts in order, None where nobody needs
        them.
        """
        step, batch = self._ready(step)
        start = time.perf_counter()
        self._planned = not self.runner.is_ready(batch.shape)
        if self._planned and self.plans is not None:
            self.plans.take(batch.shape)
        # The smallest step runs in any case: waiting frees nothing where all wait.
        while not self._may_run(self.runner.plan(batch.shape)) and (smaller := step.smaller()):
            step, batch = smaller, self._batch(smaller)
        self._planned |= not self.runner.is_ready(batch.shape)
        if self.runner.lead is None:  # else all ranks make it at once, as they begin
            self.runner.prepare(batch.shape)
        self._planning_s = time.perf_counter() - start if self._planned else 0.0
        if self.cache.recurrent:
            self._keep_before(step)
        logits = self.runner.forward(batch)
        self.steps, self.rows = self.steps + 1, self.rows + sum(number for _, number in step.parts)
        return step, logits if batch.answers else None

    def _batches(self, step: Step) -> abc.Sequence[Step]:
        """Those that a step is run as; of two the second alone where the plan of the first is yet
        to be made.
        """
        prompts, *answers = step.batches()
        if answers and self._deferred(prompts, answers[0])[1] is not None:
            return answers
        return prompts, *answers

    def _ready(self, step: Step) -> tuple[Step, Batch]:
        """A step and its batch; without its parts of prompts where the plan for all is yet to be
        made, and the one for those who wait for their next token is there.
        """
        alone, batch = step.alone(), None
        if alone is not None:
            batch, fewer = self._deferred(step, alone)
            if fewer is not None:
                return alone, fewer
        if self._deferral is not None and (alone is not None or not self._is_plain(step)):
            self._deferral.end()
        return step, self._batch(step) if batch is None else batch

    def _deferred(self, step: Step, alone: Step) -> tuple[Batch | None, Batch | None]:
        """The batch of a step with parts of prompts, if it was made; and, where its plan is waited
        for, that of those who wait for their next token, which goes on without.
        """
        deferral = self._deferral
        if deferral is None:
            return None, None
        batch = None if deferral.lasts else self._batch(step)
        if batch is None or not self.runner.is_ready(batch.shape):
            fewer = self._batch(alone)
            is_ready = self.runner.is_ready(fewer.shape)
            if is_ready and (batch is None or deferral.begin(batch.shape)):
                self.deferred += 1
                return batch, fewer
        return batch, None

    def _is_plain(self, step: Step) -> bool:
        """Whether nothing is read though there are prompts to be: those wait as before."""
        reads = any(not sequence.decoding for sequence in self.batcher.running)
        return reads and all(sequence.decoding for sequence, _ in step.parts)

    def _keep_before(self, step: Step) -> None:
        """Copies of the states that proposed tokens are about to change."""
        for sequence, number in step.parts:
            if number <= sequence.left:
                self._before.pop(sequence, None)
            elif sequence not in self._before:
                assert sequence.slot is not None
                self._before[sequence] = self.cache.snapshot(sequence.slot)

    def _batch(self, step: Step) -> Batch:
        parts = [(sequence, self._next_spans(sequence, number)) for sequence, number in step.parts]
        # Logits of all or of none: rows of a batch that only reads prompts are not worth a plan.
        wanted = any(number >= s.left or _is_scored(s) for s, number in step.parts)
        rows = [scored + rows for _, scored, rows in _rows(step)]
        return make_batch(parts, self.cache, wanted, rows)

    def _next_spans(self, sequence: Sequence, number: int) -> list[Span]:
        """The next tokens of a sequence, laid out."""
        tokens = sequence.tokens
        if tokens and sequence.decoding and number >= sequence.left:
            # A step of decode, which is most of what is asked: without going through the prompt.
            last, more = tokens[-sequence.left :], number - sequence.left
            return [Span((*last, *sequence.proposal[:more]))]  # `make_batch` knows its position
        return list(stretch(self._all_spans(sequence), sequence.done, sequence.done + number))

    def _advance(self, step: Step, logits: Tensor | None) -> list[Sequence]:
        parts = list[tuple[Sequence, int, int]]()
        answers, read = list[int](), 0  # rows that answers go by, after those of prompts' tokens
        for sequence, scored, rows in _rows(step):
            if logits is not None and _is_scored(sequence):
                self._score(sequence, logits[read : read + scored + 1])
            parts.append((sequence, rows, sequence.done))
            answers += range(read + scored, read + scored + rows)
            read += scored + rows
        if logits is not None and len(answers) < read:
            logits = logits[answers]
        self.batcher.ran(step)
        changed, first, end = [], 0, time.perf_counter() + READY_S
        drawn = self._draw_together(parts, logits)
        lines = () if logits is None else rows_of(logits)
        for sequence, rows, done in parts:
            self._keep_snapshot(sequence)
            if sequence.done == sequence.total:
                assert lines
                try:
                    self._answer(
                        sequence, lines[first : first + rows], done, end, drawn.get(sequence, ())
                    )
                except MtmdError as error:
                    self.end(sequence, "error", error)
                if sequence.finish is not None or sequence.has_new:
                    changed.append(sequence)
            first += rows
        return changed

    def _score(self, sequence: Sequence, logits: Tensor) -> None:
        """Log probabilities of tokens of a prompt: logits [N, V] after the next N that are read
        tell those of the tokens behind them. What is read once more, as its sequence gave way
        before, is known.
        """
        prompt, scores = self._prompts[sequence], sequence.scores
        assert scores is not None
        tokens = [token for span in prompt.spans for token in span.tokens]
        start = sequence.done + 1
        for first in range(0, len(logits), SCORED_AT_ONCE):
            stop = min(first + SCORED_AT_ONCE, len(logits))
            targets = tokens[start + first : start + stop]
            known = len(scores) - (start + first - 1)
            if known >= len(targets):
                continue
            rows = logits[first : first + len(targets)].float().log_softmax(1)
            own = rows.gather(1, rows.new_tensor(targets, dtype=torch.int64)[:, None])
            ranks = (rows > own).sum(1) + 1
            best = rows.topk(min(prompt.prompt_alternatives or 0, rows.shape[1]))
            lines = zip(
                *(targets, own[:, 0].tolist(), ranks.tolist()),
                *(best.indices.tolist(), best.values.tolist()),
                strict=True,
            )
            for token, logprob, rank, ids, values in list(lines)[known:]:
                scores.append(Token(token, logprob, tuple(zip(ids, values, strict=True)), rank))

    def _draw_together(
        self, parts: abc.Sequence[tuple[Sequence, int, int]], logits: Tensor | None
    ) -> dict[Sequence, list[Drawn]]:
        """The next tokens of all sequences of a batch, and those after each proposed token, should
        it come; of none where they are chosen one by one. A constraint knows only what comes next:
        what comes after proposed tokens is left to the one by one.
        """
        if logits is None or not self.draws_together:
            return {}
        first, rows, wishes, whose = 0, [], [], []
        for sequence, count, _ in parts:
            prompt = self._prompts[sequence]
            constraint, random = prompt.constraint, prompt.sampler.sampling.temperature > 0
            if sequence.done == sequence.total and prompt.max_tokens > 0:
                allowed = None
                if constraint is not None:
                    try:
                        if constraint.ready():
                            allowed = constraint.allowed(logits.shape[1])
                    except MtmdError:
                        allowed = None  # it will say so again, to this sequence alone
                    if allowed is None:
                        first += count
                        continue
                # Nor is it known whether a thought has ended by then.
                number = 1 if constraint is not None or prompt.thinks else count
                points = prompt.sampler.points(number) if random else [0.0] * number
                for i, point in enumerate(points):
                    proposed = list(sequence.proposal[:i])
                    few = not prompt.may_end(len(sequence.tokens) + i)
                    wishes.append(
                        Wish(
                            prompt.sampler.sampling,
                            [*seen, *proposed] if (seen := self._seen(sequence, prompt)) else [],
                            [*sequence.tokens, *proposed],
                            prompt.stop if few else frozenset(),
                            point,
                            allowed,
                            prompt.alternatives,
                        )
                    )
                    rows.append(first + i)
                    whose.append(sequence)
            first += count
        drawn: dict[Sequence, list[Drawn]] = {}
        if wishes:
            for sequence, one in zip(whose, draw(logits, wishes, rows), strict=True):
                drawn.setdefault(sequence, []).append(one)
        return drawn

    def _answer(
        self,
        sequence: Sequence,
        logits: abc.Sequence[Row],
        before: int,
        end: float,
        drawn: abc.Sequence[Drawn] = (),
    ) -> None:
        """The next token of a sequence, and further ones as long as they are as proposed. They are
        drawn one after the other as ever, so that an answer is the same with proposals and without.
        Where its constraint is not ready by `end`, the sequence is held as it is.

        1 + N logits [V], after its last token and after each of N proposed ones; `before` this
        batch so many of its tokens had been read.
        """
        proposal, constraint = (
            sequence.proposal[: len(logits) - 1],
            self._prompts[sequence].constraint,
        )
        accepted, held, sequence.proposal = 0, False, ()
        for row, values in enumerate(logits):
            known = drawn[row] if row < len(drawn) else None
            waits = known is None and constraint is not None
            if waits and not constraint.ready(max(end - time.perf_counter(), 0)):  # type: ignore[union-attr]
                held = True
                break
            token = self._choose(sequence, values, known)
            if row == len(proposal) or token != proposal[row]:
                break
            accepted += 1
            if sequence.finish is not None:
                break
            sequence.done += 1  # it has been read already
        sequence.proposed += len(proposal)
        sequence.accepted += accepted
        if sequence.finish is not None:
            return
        states = self._before.pop(sequence, None) if proposal else None
        if states is not None and accepted < len(proposal):
            # They have seen tokens that did not come, and go back to before.
            assert sequence.slot is not None
            self.cache.restore(sequence.slot, states)
            self._before[sequence] = states
            sequence.done, sequence.behind = before, sequence.total - 1 - before
        elif held:
            self._held[sequence] = tensor_of(logits[accepted]).clone()
        if proposal:
            self.batcher.settle(sequence)

    def _choose_held(self, wait_s: float = 0) -> list[Sequence]:
        """Take up the sequences whose constraints are ready by now, or, at the latest, after
        `wait_s`.
        """
        changed: list[Sequence] = []
        for sequence, logits in list(self._held.items()):
            if sequence.slot is None or sequence.done < sequence.total:
                del self._held[sequence]  # it gave way, and will come to this place again
                continue
            constraint = self._prompts[sequence].constraint
            assert constraint is not None
            if constraint.ready(0 if changed else wait_s / len(self._held)):
                del self._held[sequence]
                try:
                    self._choose(sequence, logits)
                except MtmdError as error:
                    self.end(sequence, "error", error)
                changed.append(sequence)
        return changed

    def _choose(self, sequence: Sequence, logits: Row, drawn: Drawn | None = None) -> int:
        """The next token of a sequence, which ends with it if that was the last; `drawn` if it is
        known already.
        """
        prompt, now = self._prompts[sequence], time.perf_counter()
        if sequence.first is None:
            assert sequence.admitted is not None
            sequence.first, sequence.prefill_ms = now, (now - sequence.admitted) * 1e3
            self.speculation.begin(sequence, _texts(prompt.spans), prompt.max_tokens)
        if prompt.max_tokens == 0:
            self.end(sequence, "length")
            return -1
        thought = prompt.thought if prompt.thinks else None
        forced = thought.forced() if thought else None
        if forced is not None:
            token = forced
            if prompt.sampler.sampling.temperature > 0:
                prompt.sampler.use()  # each token has its own random number
        elif drawn is None:
            allowed = prompt.constraint.mask(tensor_of(logits)) if prompt.constraint else logits
            token = prompt.sampler(
                allowed,
                self._seen(sequence, prompt),
                sequence.tokens,
                () if prompt.may_end(len(sequence.tokens)) else prompt.stop,
            )
        else:
            if drawn.error is not None:
                raise drawn.error
            token = drawn.token
            if prompt.sampler.sampling.temperature > 0:
                prompt.sampler.use()
        sequence.decode_ms = (time.perf_counter() - sequence.first) * 1e3
        if token in prompt.stop and forced is None:
            if thought is None or not thought.must_be_closed:
                sequence.last = self._told(token, logits, prompt, drawn)
                self.end(sequence, "stop")
                return token
            token, drawn = thought.close(), None
        if prompt.constraint:
            prompt.constraint.accept(token)
        if prompt.thinks and thought:
            thought.accept(token)
        sequence.append(self._told(token, logits, prompt, drawn))
        self._chosen += 1
        self.speculation.push(sequence, token)
        if len(sequence.tokens) >= prompt.max_tokens or sequence.total >= self.runner.context:
            self.end(sequence, "length")
        return token

    @staticmethod
    def _told(token: int, logits: Row, prompt: Prompt, drawn: Drawn | None) -> Token:
        """Probabilities are the model's own, before what a constraint allows."""
        if drawn is None or drawn.token != token:
            return _with_probabilities(token, logits, prompt.alternatives)
        return Token(token, drawn.logprob, drawn.top)

    @staticmethod
    def _seen(sequence: Sequence, prompt: Prompt) -> list[int]:
        """Prompt and answer, where repetitions cost something."""
        if prompt.sampler.sampling.repetition_penalty == 1:
            return []
        return [*prompt.distinct, *sequence.tokens]

    def end(self, sequence: Sequence, finish: str, error: MtmdError | None = None) -> None:
        """A sequence ends here, for whatever reason. What it read and wrote stays known, for those
        that begin alike.
        """
        if sequence.slot is not None and not error:
            self._make_known(sequence)
        self.batcher.remove(sequence)
        self._held.pop(sequence, None)
        self.speculation.end(sequence)
        self._before.pop(sequence, None)
        _close(self._prompts.pop(sequence))
        sequence.finish, sequence.error = finish, error

    def _keep_snapshot(self, sequence: Sequence) -> None:
        """Of a recurrent state at the page's end where a prompt like this one can be taken up."""
        if (
            sequence.snapshot_at is None
            or sequence.done != sequence.snapshot_at
            or not sequence.keys
            or sequence.slot is None
        ):
            return
        key = sequence.keys[sequence.done // PAGE - 1]
        self._snapshots[key] = self.cache.snapshot(sequence.slot)
        self._snapshots.move_to_end(key)
        self.batcher.snapshots.add(key)
        each = sum(state.nbytes for state in self._snapshots[key].states.values())
        while len(self._snapshots) > max(min(SNAPSHOTS, SNAPSHOT_BYTES // each), 1):
            oldest, _ = self._snapshots.popitem(last=False)
            self.batcher.snapshots.discard(oldest)

    def _alone(self, sequence: Sequence) -> list[Sequence]:
        """One sequence of a batch that failed, from its beginning to its next token: who fails
        alone is given up, the others go on.
        """
        if sequence not in self._prompts or sequence.slot is None:
            return []  # it has been cancelled, or has given way, since
        try:
            # From the beginning: what the failed batch has written of it is not known.
            self.batcher.restart(sequence)
            self._before.pop(sequence, None)
            self.cache.clear(sequence.slot)
            while sequence.done < sequence.total and sequence.finish is None:
                part = sequence, sequence.chunk(self.runner.prefill_tokens)
                step, total = Step((part,), (), ()), sequence.total
                self._advance(*self._run(step))
                if sequence.total > total:
                    break
        except IndexError:  # no pages for all of it: it waits its turn
            self.batcher.preempt(sequence)
        except DeviceError:
            raise
        except MtmdError as error:
            self.end(sequence, "error", error)
        return [sequence]

    def _stuck(self) -> list[Sequence]:
        """Nothing can run though somebody wants to: the first in line needs more than there is."""
        first = next(iter((*self.batcher.running, *self.batcher.waiting)), None)
        if first is None:
            return []
        message = f"{first.total} tokens need more pages than the cache has"
        self.end(first, "error", MtmdError(message))
        return [first]

    def _all_spans(self, sequence: Sequence) -> abc.Sequence[Span]:
        """The prompt, and what has been written so far."""
        spans = self._prompts[sequence].spans
        if not sequence.tokens:
            return spans
        written, _ = lay_out([Span(tuple(sequence.tokens))], sequence.position)
        return [*spans, *written]


def _close(prompt: Prompt) -> None:
    if prompt.constraint is not None:
        prompt.constraint.close()


def _is_scored(sequence: Sequence) -> bool:
    """Whether log probabilities of tokens of its prompt are still to be found."""
    return sequence.scores is not None and len(sequence.scores) + 1 < sequence.prompt_tokens


def _rows(step: Step) -> list[tuple[Sequence, int, int]]:
    """The logits that each part of a step is asked for: how many by which tokens of a prompt are
    scored alone, then those after its last token, and after each of its proposal.
    """
    return [
        (s, number - 1 if _is_scored(s) else 0, 1 + max(number - s.left, 0))
        for s, number in step.parts
    ]


def _texts(spans: abc.Iterable[Span]) -> abc.Iterator[int]:
    """The tokens of a prompt, pictures among them told apart."""
    for span in spans:
        yield from span.tokens if span.is_text else (PICTURE,) * len(span)


def _with_probabilities(token: int, logits: Row, alternatives: int | None) -> Token:
    if alternatives is None:
        return Token(token)
    logprobs = tensor_of(logits).float().log_softmax(0)
    best = logprobs.topk(min(alternatives, len(logprobs))) if alternatives else None
    top = (
        tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        if best is not None
        else ()
    )
    return Token(token, float(logprobs[token]), top)
