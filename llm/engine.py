"""From requests to tokens: many sequences at once, in batches that the batcher chooses. One thread
drives it.

`submit` takes a request, `step` runs one batch and hands out tokens. A sequence is given up and
taken up again without anybody noticing but by the time it takes: what it has said so far is read
again as part of its prompt.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from torch import Tensor

from mtmd.kernels.errors import BusyError, MtmdError
from mtmd.kernels.scheduler import Plan
from mtmd.llm.batcher import Batcher, Item, Step
from mtmd.llm.pages import Pages, page_keys
from mtmd.llm.runner import PREFILL, Runner
from mtmd.llm.sampler import Sampler
from mtmd.llm.sequence import Batch, Running, Span, lay_out, make_batch
from mtmd.llm.state import PAGE, Cache

# recurrent states kept for prompts that begin alike, as far as they do not take more than
SNAPSHOTS = 32
SNAPSHOT_BYTES = 512 << 20


class Constraint(Protocol):
    """What an answer has to look like: which tokens may come next."""

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf at every token that may not come next."""

    def accept(self, token: int) -> None:
        """The token has been taken."""


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be answered. `alternatives`: how many of the most probable tokens
    to tell beside each, None for no probabilities at all. `constraint` is this request's own.
    """

    spans: Sequence[Span]
    sampler: Sampler
    stop: frozenset[int] = frozenset()
    max_tokens: int = 256
    alternatives: int | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Token:
    """A token of an answer, its log probability before temperature and filters, and those of the
    most probable ones.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Generation:
    """A request on its way. `finish` is "stop", "length", "cancelled" or "error", None while it
    runs. Times are in milliseconds: waiting for a place, reading the prompt, and all after the
    first token; `reused` counts prompt tokens that were known already.
    """

    request: Request
    spans: list[Span]
    item: Item
    position: int
    tokens: list[int] = field(default_factory=list)
    new: list[Token] = field(default_factory=list)
    finish: str | None = None
    error: MtmdError | None = None
    reused: int = 0
    preemptions: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.spans))

    def take(self) -> list[Token]:
        """The tokens that came since it was last asked. The stop token is not among them."""
        taken, self.new = self.new, []
        return taken


class Engine:
    """`runner` computes; `pages` of 32 tokens are shared by all, at least a whole context and one
    more; `queue` requests may wait. `may_run` tells whether there is memory for a batch; one for
    which there is not is made smaller, as far as that goes.
    """

    def __init__(
        self, runner: Runner, *, queue: int = 64, may_run: Callable[[Plan], bool] = lambda _: True
    ):
        self.runner, self.queue, self._may_run = runner, queue, may_run
        self.cache: Cache = runner.new_cache()
        self.steps = self.rows = 0
        """Batches run so far, and tokens in them."""
        self.reset()

    def reset(self) -> None:
        """Forget all requests and all that was read. After a defect nothing of it is to be relied
        on.
        """
        self.batcher = Batcher(
            Pages(self.cache.pages, PAGE), self.runner.sequences, PREFILL, self.cache.recurrent
        )
        self.generations: dict[Item, Generation] = {}
        self._snapshots: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()
        self._suspects: deque[Item] = deque()
        """Sequences of a batch that failed, each to be run by itself."""

    def submit(self, request: Request) -> Generation:
        """Take a request up. Raises PromptError where its prompt does not fit, ModelError for a
        token without an embedding, BusyError where too many wait already.
        """
        if len(self.generations) >= self.runner.sequences + self.queue:
            raise BusyError(
                f"{len(self.generations)} requests run or wait already, the most that may; try "
                "again later"
            )
        self.runner.check(request.spans)
        spans, position = lay_out(request.spans, 0)
        keys = page_keys(list(identities(spans)), PAGE)
        item = Item(sum(map(len, spans)), tuple(_blocks(spans)), keys)
        generation = Generation(request, spans, item, position)
        self.generations[item] = generation
        self.batcher.add(item)
        return generation

    def cancel(self, generation: Generation) -> None:
        """Give a request up, whatever state it is in; its memory is free at once."""
        if generation.finish is None:
            self.end(generation, "cancelled")

    @property
    def busy(self) -> bool:
        return bool(self.generations)

    def step(self) -> list[Generation]:
        """Run one batch. Returns the requests that have something new: tokens, or their end."""
        if self._suspects:
            return self._alone(self._suspects.popleft())
        step = self.batcher.step()
        for item in step.preempted:
            self.generations[item].preemptions += 1
        for item in step.admitted:
            self._admit(self.generations[item])
        if not step.parts:
            return self._stuck()
        try:
            step, logits = self._run(step)
        except MtmdError:
            self._suspects += [item for item, _ in step.parts]
            return []
        return self._advance(step, logits)

    def _admit(self, generation: Generation) -> None:
        now, item = time.perf_counter(), generation.item
        assert item.slot is not None
        self.cache.clear(item.slot)
        if item.done and self.cache.recurrent:
            key = item.keys[item.done // PAGE - 1]
            self._snapshots.move_to_end(key)
            self.cache.restore(item.slot, self._snapshots[key])
        if generation.admitted is None:
            generation.admitted, generation.reused = now, item.done
            generation.queued_ms = (now - generation.submitted) * 1e3

    def _run(self, step: Step) -> tuple[Step, Tensor | None]:
        """What was run of a step, and logits [S, V] of its parts in order, None where nobody needs
        them.
        """
        batch = self._batch(step)
        while not self._may_run(self.runner.plan(batch.shape)) and (smaller := step.smaller()):
            step, batch = smaller, self._batch(smaller)
        logits = self.runner.forward(batch)
        self.steps, self.rows = self.steps + 1, self.rows + sum(number for _, number in step.parts)
        return step, logits if batch.answers else None

    def _batch(self, step: Step) -> Batch:
        parts = []
        for item, number in step.parts:
            assert item.slot is not None
            position, spans = self._next_spans(self.generations[item], number)
            parts.append((Running(item.slot, item.pages, item.done, position), spans))
        wanted = any(item.done + number == item.total for item, number in step.parts)
        return make_batch(parts, self.cache, wanted)

    def _next_spans(self, generation: Generation, number: int) -> tuple[int, list[Span]]:
        """The next tokens of a sequence, and the position of those that are not laid out."""
        item, tokens = generation.item, generation.tokens
        if number == 1 and tokens and item.done == item.total - 1:
            return generation.position + len(tokens) - 1, [Span((tokens[-1],))]
        return 0, list(_slice(self._all_spans(generation), item.done, item.done + number))

    def _advance(self, step: Step, logits: Tensor | None) -> list[Generation]:
        self.batcher.ran(step)
        changed = []
        for index, (item, _) in enumerate(step.parts):
            generation = self.generations[item]
            self._keep_snapshot(item)
            if item.done < item.total:
                continue
            assert logits is not None
            try:
                self._choose(generation, logits[index])
            except MtmdError as error:
                self.end(generation, "error", error)
            changed.append(generation)
        return changed

    def _choose(self, generation: Generation, logits: Tensor) -> None:
        """The next token of a sequence, and whether that was the last."""
        request, now = generation.request, time.perf_counter()
        if generation.first is None:
            assert generation.admitted is not None
            generation.first, generation.prefill_ms = now, (now - generation.admitted) * 1e3
        allowed = request.constraint.mask(logits) if request.constraint else logits
        token = request.sampler(allowed, self._seen(generation))
        generation.decode_ms = (time.perf_counter() - generation.first) * 1e3
        if token in request.stop:
            self.end(generation, "stop")
            return
        if request.constraint:
            request.constraint.accept(token)
        generation.tokens.append(token)
        generation.new.append(_told(token, logits, request.alternatives))
        generation.item.total += 1
        if (
            len(generation.tokens) >= request.max_tokens
            or generation.item.total >= self.runner.context
        ):
            self.end(generation, "length")

    @staticmethod
    def _seen(generation: Generation) -> list[int]:
        """Prompt and answer, where repetitions cost something."""
        if generation.request.sampler.sampling.repetition_penalty == 1:
            return []
        return [t for s in generation.spans for t in s.tokens] + generation.tokens

    def end(self, generation: Generation, finish: str, error: MtmdError | None = None) -> None:
        """A request ends here, for whatever reason. What it read and said stays known, for those
        that begin alike.
        """
        item = generation.item
        if item.slot is not None and not error:
            item.keys = page_keys(list(identities(self._all_spans(generation)))[: item.done], PAGE)
            self.batcher.remember(item)
        self.batcher.remove(item)
        del self.generations[item]
        generation.finish, generation.error = finish, error

    def _keep_snapshot(self, item: Item) -> None:
        """Of a recurrent state at the page's end where a prompt like this one can be taken up."""
        if (
            item.snapshot_at is None
            or item.done != item.snapshot_at
            or not item.keys
            or item.slot is None
        ):
            return
        key = item.keys[item.done // PAGE - 1]
        self._snapshots[key] = self.cache.snapshot(item.slot)
        self._snapshots.move_to_end(key)
        self.batcher.snapshots.add(key)
        each = sum(state.nbytes for state in self._snapshots[key].values())
        while len(self._snapshots) > max(min(SNAPSHOTS, SNAPSHOT_BYTES // each), 1):
            oldest, _ = self._snapshots.popitem(last=False)
            self.batcher.snapshots.discard(oldest)

    def _alone(self, item: Item) -> list[Generation]:
        """One sequence of a batch that failed, from its beginning to its next token: who fails
        alone is given up, the others go on.
        """
        generation = self.generations.get(item)
        if generation is None or item.slot is None:
            return []
        try:
            self.batcher.restart(item)
            self.cache.clear(item.slot)
            while item.done < item.total and generation.finish is None:
                step, total = Step(((item, item.chunk(PREFILL)),), (), ()), item.total
                self._advance(*self._run(step))
                if item.total > total:
                    break
        except IndexError:  # no pages for all of it: it waits its turn
            self.batcher.preempt(item)
        except MtmdError as error:
            self.end(generation, "error", error)
        return [generation]

    def _stuck(self) -> list[Generation]:
        """Nothing can run though somebody wants to: the first in line needs more than there is."""
        first = next(iter((*self.batcher.running, *self.batcher.waiting)), None)
        if first is None:
            return []
        generation = self.generations[first]
        self.end(
            generation,
            "error",
            MtmdError(f"{first.total} tokens need more pages than the cache has"),
        )
        return [generation]

    def _all_spans(self, generation: Generation) -> list[Span]:
        """The prompt, and what has been said so far."""
        if not generation.tokens:
            return generation.spans
        said, _ = lay_out([Span(tuple(generation.tokens))], generation.position)
        return [*generation.spans, *said]


def identities(spans: Sequence[Span]) -> Iterator[bytes]:
    """What makes each token what it is: its id, or the picture it shows and its place in it.
    Embeddings of unknown contents are like no others.
    """
    for span in spans:
        if span.embeddings is None:
            yield from (b"t%d" % token for token in span.tokens)
        else:
            content = span.content or b"%d" % next(_UNKNOWN)
            yield from (b"i%s/%d" % (content, span.offset + i) for i in range(len(span)))


_UNKNOWN = count()


def _blocks(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    start = 0
    for span in spans:
        if span.block:
            yield start, start + len(span)
        start += len(span)


def _slice(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Tokens start..stop of all spans together."""
    at = 0
    for span in spans:
        first, last = max(start - at, 0), min(stop - at, len(span))
        if first < last:
            yield span if (first, last) == (0, len(span)) else span.cut(first, last)
        at += len(span)


def _told(token: int, logits: Tensor, alternatives: int | None) -> Token:
    if alternatives is None:
        return Token(token)
    logprobs = logits.float().log_softmax(0)
    best = logprobs.topk(min(alternatives, len(logprobs))) if alternatives else None
    top = (
        tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        if best is not None
        else ()
    )
    return Token(token, float(logprobs[token]), top)
