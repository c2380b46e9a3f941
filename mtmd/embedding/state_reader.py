"""Reads many prompts for the state of their last token alone: several in one batch, and what all of
them begin with once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile

import torch
from torch import Tensor

from mtmd.base.cancellation import check_cancelled
from mtmd.llm.engine.sequence import Sequence as Reading
from mtmd.llm.engine.spans import Span, blocks, cut, identities, lay_out, seen_in, stretch
from mtmd.llm.state import KV, PAGE
from mtmd.model import Model
from mtmd.prompt.conversation import Message
from mtmd.prompt.prompts import PreparedPrompt

AT_ONCE = 8  # prompts that are prepared, encoded and in memory together


@dataclass
class Times:
    """Wall time in milliseconds, added up."""

    preparing: float = 0.0
    computing: float = 0.0


class StateReader:
    """A loaded model that reads prompts and writes nothing. Safe to use from several threads, which
    take turns after every `AT_ONCE` prompts.
    """

    def __init__(self, model: Model):
        self._model = model
        self._runner = model.runner.states(AT_ONCE)
        self._cache = self._runner.new_cache()
        self._stored: tuple[bytes, ...] = ()
        """What is in the first pages: the tokens that prompts read last begin with."""
        # Of a recurrence, states are known where a batch ends, and are those of one slot.
        states = [state for layer in self._runner.layers for state in layer]
        self._shares = all(isinstance(state, KV) and not state.rows for state in states)

    @property
    def context(self) -> int:
        """Tokens of the longest prompt."""
        return self._runner.context

    def prepare(self, messages: Sequence[Message]) -> PreparedPrompt:
        """A conversation up to the first token of the answer. Raises what `Prompts.prepare` does,
        and ContextError for one that does not fit.
        """
        return self.checked(self._model.prompts.prepare(messages))

    def checked(self, prepared: PreparedPrompt) -> PreparedPrompt:
        """Return a prompt that fits. Raises ContextError."""
        self._runner.check(prepared.pieces)
        return prepared

    def read(
        self, prompts: Iterable[PreparedPrompt], times: Times
    ) -> Iterator[tuple[Tensor, PreparedPrompt]]:
        """Yield the state fp32 [D] of each prompt's last token, and the prompt. They are taken from
        `prompts` as they are needed.
        """
        remaining, clock, size = iter(prompts), time.perf_counter, 1
        while True:
            check_cancelled()
            begun = clock()
            group = list(islice(remaining, size))
            if group and size == 1 and not group[0].pictures:
                group += islice(remaining, AT_ONCE - 1)
            if not group:
                return
            size = AT_ONCE  # from now on, pictures that the prompts share are found encoded
            ready = clock()
            states = self._model.exclusively(partial(self._states, group))
            times.preparing += (ready - begun) * 1e3
            times.computing += (clock() - ready) * 1e3
            yield from zip(states, group, strict=True)

    def read_all(self, prompt: PreparedPrompt, times: Times) -> Tensor:
        """The states fp32 [T, D] of all tokens of a prompt."""
        check_cancelled()
        begun = time.perf_counter()
        states = self._model.exclusively(partial(self._all_states, prompt))
        times.computing += (time.perf_counter() - begun) * 1e3
        return states

    def _all_states(self, prompt: PreparedPrompt) -> Tensor:
        spans = lay_out(self._model.prompts.encode(prompt).spans, 0)[0]
        self._stored = ()
        length = sum(map(len, spans))
        reading = self._reading(0, 0, 0, spans, 0, self._runner.pages_for(length))
        states = []
        for part in cut(spans, self._runner.prefill_tokens):
            count = sum(map(len, part))
            rows = self._runner.read([(reading, part)], self._cache, rows=[count])
            states.append(rows.float().cpu())
        return torch.cat(states)

    def _states(self, group: Sequence[PreparedPrompt]) -> Tensor:
        """fp32 [N, D]"""
        encode = self._model.prompts.encode
        prompts = [lay_out(encode(prepared).spans, 0)[0] for prepared in group]
        shares = self._shares and not any(list(blocks(spans)) for spans in prompts)
        first, shared = tuple(identities(prompts[0])), self._shared(prompts) if shares else 0
        pages = self._runner.pages_for(shared)
        stored, self._stored = self._stored, ()  # until all is read
        if stored[:shared] != first[:shared]:
            reading = self._reading(0, pages, 0, prompts[0], 0)
            self._runner.prefill(list(stretch(prompts[0], 0, shared)), self._cache, reading)
        states: list[Tensor] = []
        batch: list[tuple[Reading, list[Span]]] = []
        tokens, used = 0, pages
        for spans in prompts:
            length = sum(map(len, spans))
            own, needed = length - shared, self._runner.pages_for(length - shared)
            is_full = tokens + own > self._runner.prefill_tokens
            if batch and (is_full or 1 + used + needed > self._runner.pages):
                states.append(self._runner.read(batch, self._cache))
                batch, tokens, used = [], 0, pages
            reading = self._reading(len(batch), pages, used, spans, shared, needed)
            rest = list(stretch(spans, shared, length))
            if own > self._runner.prefill_tokens:
                states.append(self._runner.prefill(rest, self._cache, reading)[None])
                continue
            batch.append((reading, rest))
            tokens, used = tokens + own, used + needed
        if batch:
            states.append(self._runner.read(batch, self._cache))
        if shares:
            self._stored = first if len(prompts) == 1 else first[:shared]
        return torch.cat([state.float().cpu() for state in states])

    def _reading(
        self, slot: int, pages: int, used: int, spans: Sequence[Span], done: int, own: int = 0
    ) -> Reading:
        """A sequence whose first `done` tokens are in the first `pages`, with `own` more behind
        those that are `used`.
        """
        self._cache.clear(slot)
        length = sum(map(len, spans))
        return Reading(
            length,
            tuple(blocks(spans)),
            done=done,
            pages=[*range(1, 1 + pages), *range(1 + used, 1 + used + own)],
            slot=slot,
            pictures=seen_in(spans),
            prompt_tokens=length,
        )

    def _shared(self, prompts: Sequence[Sequence[Span]]) -> int:
        """Return how many tokens all of the prompts begin with, or a single one and those that are
        stored, in whole pages. Every prompt has a token behind them.
        """
        each = [identities(spans) for spans in prompts]
        if len(each) == 1:
            each.append(iter(self._stored))
        alike = takewhile(lambda one: len(set(one)) == 1, zip(*each, strict=False))
        shortest = min(sum(map(len, spans)) for spans in prompts)
        return min(sum(1 for _ in alike), shortest - 1) // PAGE * PAGE
