"""From spans to tokens, one sequence at a time: prefill in batches, then a token at a time, until something says stop."""
from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.errors import ModelError, PromptError
from mtmd.kernels.executor import Executor, Observer, Residency, memory_for
from mtmd.kernels.flash import AttentionForm, FlashChoice, choose
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.scheduler import Override, Plan, make_plan
from mtmd.llm.family import TextFamily
from mtmd.llm.inputs import TextInputs
from mtmd.llm.sampler import Sampler
from mtmd.llm.sequence import Batch, Span, cut, make_batch

PREFILL = 512  # tokens of a prefill batch
FALLBACKS = 16  # every length of prompt has a plan of its own; what they refuse is much the same


@dataclass
class Generated:
    """What one generation has done so far, for its receipt. `finish` is "stop" or "length", None while it runs."""
    tokens: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    finish: str | None = None


class Engine:
    """A text family on its backends. `context` is the longest sequence, in tokens, and the size of its cache; `image_tokens` the most
    tokens that one picture takes, 0 where there are none."""

    def __init__(self, family: TextFamily, weights: WeightSource, backends: Sequence[Backend], *, dtype: torch.dtype, context: int,
                 image_tokens: int = 0, flash_attn: str = "auto", overrides: Sequence[Override] = (), residency: Residency | None = None):
        self.family, self.weights, self.backends, self.overrides = family, weights, backends, tuple(overrides)
        self.dtype, self.context, self.image_tokens = dtype, context, image_tokens
        self.residency = residency or Residency()
        self.flash: FlashChoice = choose(self._probes, backends, overrides, flash_attn)
        self.fallbacks: dict[tuple[int, int, int], Plan] = {}
        """Plans in use in which the preferred backend refused something, the last `FALLBACKS` of them."""
        self._plan = lru_cache(maxsize=32)(self._make_plan)
        self._executor = lru_cache(maxsize=32)(self._make_executor)

    def graph(self, tokens: int, images: int, wanted: int, form: AttentionForm | None = None) -> Node:
        """-> logits [wanted, V]"""
        inputs = TextInputs(tokens, images, wanted, self.context, self.family.width, self.dtype)
        return self.family.graph(inputs, self.weights, form or self.flash.form)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """(tokens, of them given as embeddings) by label: a step of decode, and the largest prefill."""
        most = min(max(PREFILL, self.image_tokens), self.context)
        return {"decode": (1, 0), "prefill": (most, min(self.image_tokens, most))}

    def plan(self, tokens: int, images: int = 0, wanted: int = 1, overwrite: bool = True) -> Plan:
        """The plan of one shape of batch. `overwrite=False` keeps every value intact, for looking on."""
        return self._plan(tokens, images, wanted, overwrite)

    def _make_plan(self, tokens: int, images: int, wanted: int, overwrite: bool) -> Plan:
        return make_plan([self.graph(tokens, images, wanted)], self.backends, self.overrides, overwrite)

    def _probes(self, form: AttentionForm) -> list[list[Node]]:
        return [[self.graph(tokens, images, 1, form)] for tokens, images in self.sizes().values()]

    def _make_executor(self, tokens: int, images: int, wanted: int) -> Executor:
        plan = self.plan(tokens, images, wanted)
        if any(r.backend == self.backends[0].name for r in plan.refusals):
            self.fallbacks[tokens, images, wanted] = plan
            for oldest in list(self.fallbacks)[:-FALLBACKS]:
                self.fallbacks.pop(oldest, None)
        return Executor(plan, self.residency)

    def new_caches(self) -> list[Tensor]:
        """One cache per layer, where the layer's `kv_store` runs. Memory is taken as slots are written, not before."""
        where = self.plan(1).backend_of
        with memory_for(f"the cache of {self.context} tokens", lambda: sum(self.cache_bytes().values())):
            return [_zeros((2, self.context, kv.groups, kv.head), self.dtype, where[f"blk.{layer}.kv_store"].device)
                    for layer, kv in enumerate(self.family.layers)]

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of a full cache, per memory space."""
        where = self.plan(1).backend_of
        spaces: dict[str, int] = {}
        for layer, kv in enumerate(self.family.layers):
            space = where[f"blk.{layer}.kv_store"].space
            spaces[space] = spaces.get(space, 0) + 2 * self.context * kv.groups * kv.head * self.dtype.itemsize
        return spaces

    def forward(self, batch: Batch, observe: Observer | None = None) -> Tensor:
        """Logits [R, V] of the rows the batch wants."""
        images = 0 if batch.images is None else len(batch.images)
        return self._executor(len(batch.tokens), images, len(batch.wanted)).run(batch, observe)[0]

    def prefill(self, spans: Sequence[Span], caches: Sequence[Tensor], observe: Observer | None = None) -> Tensor:
        """Logits [V] after the last token of the spans.

        Raises PromptError where there is nothing to read or it does not fit, with the numbers; ModelError for a token without an embedding.
        """
        total = sum(map(len, spans))
        if not 0 < total < self.context:
            raise PromptError(f"the prompt takes {total} tokens, images included, and the context holds {self.context}, answer included; "
                              "shorten the prompt, use fewer images or raise the context")
        highest = max(t for s in spans for t in s.tokens)
        if highest >= self.family.vocabulary:
            raise ModelError(f"the prompt has token {highest}, and the model's table ends at {self.family.vocabulary - 1}; "
                             "the tokenizer does not fit this model")
        *before, last = cut(spans, PREFILL)
        start = 0
        for part in before:
            batch = make_batch(part, start, caches, wants_logits=False)
            self.forward(batch, observe)
            start += len(batch.tokens)
        return self.forward(make_batch(last, start, caches, wants_logits=True), observe)[0]

    def generate(self, spans: Sequence[Span], sampler: Sampler, *, stop: Collection[int], max_tokens: int,
                 done: Generated) -> Iterator[int]:
        """Tokens as they come, the stop token not among them; close the iterator to stop early. `done` is filled along the way, its times
        without what the caller does between two tokens."""
        clock = time.perf_counter()
        caches = self.new_caches()
        logits = self.prefill(spans, caches)
        seen = [t for s in spans for t in s.tokens]
        self.backends[0].synchronize()
        done.prefill_ms = (time.perf_counter() - clock) * 1e3
        while done.finish is None:
            clock = time.perf_counter()
            token = sampler(logits, seen)
            if token in stop:
                done.finish = "stop"
            else:
                done.tokens.append(token)
                seen.append(token)
                if len(done.tokens) >= max_tokens or len(seen) >= self.context:
                    done.finish = "length"
            done.decode_ms += (time.perf_counter() - clock) * 1e3
            if token in stop:
                return
            yield token
            if done.finish is None:
                clock = time.perf_counter()
                logits = self.forward(make_batch([Span((token,))], len(seen) - 1, caches, wants_logits=True))[0]
                done.decode_ms += (time.perf_counter() - clock) * 1e3


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU without touching the memory: torch.zeros would write all of it, fresh pages from the system are zero already."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
