"""Texts to vectors: a dual encoder's text tower on its backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mtmd.clip.dual.text_tower import TextBatch, TextTower
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.flash_choice import AttentionForm, FlashChoice, choose
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan
from mtmd.kernels.report.check import run_check
from mtmd.kernels.report.facts import Check, GraphFacts, Placement
from mtmd.kernels.report.from_plans import graph_facts, placement

BATCH = 32  # texts encoded at once
GRAPH = "text encoder"


class TextEncoder:
    """Flash attention is decided when it is made, by asking about the longest texts, alone and as
    many as are encoded at once.
    """

    def __init__(
        self,
        tower: TextTower,
        weights: WeightSource,
        backends: Sequence[Backend],
        *,
        dtype: torch.dtype,
        residency: Residency,
        flash_attn: str = "auto",
        overrides: Sequence[Override] = (),
    ):
        self.tower, self.weights, self.backends = tower, weights, backends
        self.dtype, self.residency, self.overrides = dtype, residency, tuple(overrides)
        self.flash: FlashChoice = choose(self._probes, backends, overrides, flash_attn)
        self._executor = lru_cache(maxsize=16)(self._make_executor)

    def graph(self, batch: int, length: int, form: AttentionForm | None = None) -> Node:
        """-> vectors [B, D]"""
        return self.tower.graph(batch, length, self.weights, self.dtype, form or self.flash.form)

    def plan(self, batch: int, length: int, overwrite: bool = True) -> Plan:
        return make_plan([self.graph(batch, length)], self.backends, self.overrides, overwrite)

    def _probes(self, form: AttentionForm) -> list[list[Node]]:
        return [[self.graph(batch, self.tower.context, form)] for batch in (1, BATCH)]

    def _make_executor(self, batch: int, length: int) -> Executor:
        return Executor(self.plan(batch, length), self.residency)

    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Vectors [N, D] in the compute type, in order, of texts as token ids, each at most the
        tower's context.
        """
        waiting: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            waiting.setdefault(self.tower.length(len(text)), []).append(index)
        done: dict[int, Tensor] = {}
        for length, indices in waiting.items():
            for start in range(0, len(indices), BATCH):
                part = indices[start : start + BATCH]
                batch = self.tower.batch([texts[i] for i in part])
                (vectors,) = self._executor(len(part), length).run(batch)
                done.update(zip(part, vectors.unbind(0), strict=True))
        self.backends[0].synchronize()
        return torch.stack([done[i] for i in range(len(texts))])

    def placement(self) -> Placement:
        """Return what the preferred backend takes and refuses; nothing is run."""
        plans = tuple(self.plan(batch, self.tower.context) for batch in (1, BATCH))
        return placement(GRAPH, self.flash, plans, (self.backends[0].name,))

    def graphs(self) -> list[GraphFacts]:
        """Splits, copies and predicted memory of one text and of the most at once, at full length;
        nothing is run.
        """
        length = self.tower.context
        return [
            graph_facts(GRAPH, label, f"{batch} x {length} tokens", self.plan(batch, length))
            for label, batch in (("warm-up", 1), ("largest", BATCH))
        ]

    def check(self) -> Check:
        """Encode one text of full length."""
        length = self.tower.context
        ids = torch.arange(length) % self.tower.vocabulary
        batch = TextBatch(ids, torch.tensor([length - 1]))
        return run_check(
            GRAPH, "one text encoded", self.plan(1, length), self.residency, self.dtype, batch
        )
