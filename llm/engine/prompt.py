"""Describes what an answer is made from: the spans to be read, the rules that it follows."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from mtmd.llm.engine.spans import Span
from mtmd.llm.sampling.ngrams import repeated_ends
from mtmd.llm.sampling.sampler import Sampler


class Constraint(Protocol):
    """Describes what an answer has to look like: which tokens may come next."""

    def begin(self) -> None:
        """Start over: the prompt is about to be read, perhaps once more."""

    def ready(self, wait_s: float = 0) -> bool:
        """Return whether `mask` or `allowed` would not block, after `wait_s` at the latest."""

    def allowed(self, size: int) -> np.ndarray:
        """uint8 [size / 8]: a bit for each of `size` logits, the lowest of each byte first, set
        where that token may come next. Called in place of `mask`, where a device has the logits.
        """

    def mask(self, logits: Tensor) -> Tensor:
        """Return logits [V] with -inf at every token that may not come next."""

    def accept(self, token: int) -> None:
        """Note that the token has been chosen."""

    def close(self) -> None:
        """End the answer."""


class Thought(Protocol):
    """Describes what a model thinks before it answers, counted by tokens. A constraint of the
    answer follows it by itself.
    """

    tokens: int
    """Of the thought so far, marks included."""

    @property
    def is_over(self) -> bool:
        """Return whether the answer has begun: nothing is called afterwards."""

    @property
    def must_be_closed(self) -> bool:
        """Return whether a token of `Prompt.stop` may not end the answer here, as it has none
        yet.
        """

    def forced(self) -> int | None:
        """Return the token that has to come next, None for any."""

    def close(self) -> int:
        """End the thought. Returns the first token of the mark that does."""

    def accept(self, token: int) -> None:
        """Note that the token has been chosen."""


@dataclass(frozen=True)
class Prompt:
    """Describes what is to be read, and how it is to be answered. `alternatives`: how many of the
    most probable tokens to report with each, None for no probabilities at all. `constraint` is of
    this answer only. What was read for a prompt of another `salt` is not used for this one. Before
    `min_tokens` no token of `stop` comes, where another may; those of a `thought` do not count.
    Slots and batches are shared out by `owner`. `prompt_alternatives`: as `alternatives`, of the
    prompt's own tokens, which are text. `adapters`: scales, as `Sequence` has them; what was read
    with other ones is another `salt`'s.
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
    adapters: tuple[float, ...] = ()

    @property
    def thinks(self) -> bool:
        """Return whether the answer has not begun yet."""
        return self.thought is not None and not self.thought.is_over

    @property
    def is_random(self) -> bool:
        return self.sampler.sampling.temperature > 0

    def forbidden(self, written: abc.Sequence[int]) -> frozenset[int]:
        """Return what may not come after the tokens of the answer, those of the thought among
        them: the end before `min_tokens`, and what would repeat a run of tokens.
        """
        answered = len(written) - (self.thought.tokens if self.thought else 0)
        ends = frozenset[int]() if answered >= self.min_tokens else self.stop
        sampling = self.sampler.sampling
        if not sampling.no_repeat_ngram:
            return ends
        window = sampling.no_repeat_window or len(self.numbers) + len(written)
        missing = max(window - len(written), 0)
        recent = [*self.numbers[max(len(self.numbers) - missing, 0) :], *written][-window:]
        repeated = repeated_ends(recent, sampling.no_repeat_ngram)
        return ends | (repeated - set(sampling.no_repeat_except))

    def penalized(self, written: abc.Sequence[int]) -> list[int]:
        """Return the tokens of prompt and answer, if repetitions are penalized."""
        if self.sampler.sampling.repetition_penalty == 1:
            return []
        return [*self.distinct, *written]

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """All tokens of the prompt."""
        return tuple(t for span in self.spans for t in span.tokens)

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """Distinct tokens of the prompt's text: those that stand for pictures may have no row in
        the output, and are never written.
        """
        return tuple({t for span in self.spans if span.is_text for t in span.tokens})

    def close(self) -> None:
        if self.constraint is not None:
            self.constraint.close()
