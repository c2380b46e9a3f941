"""The second part of an encoder whose pictures depend on the text of the prompt, too: run once for
each prompt, on features that are encoded once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.plan.executor import Executor, Observer, Residency, finish
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan

PLANS = 16  # that are kept, one for each length of text


@dataclass(frozen=True)
class Instruction:
    """The way in which a family's encoder reads the text of a prompt: with the tokenizer in this
    folder of a checkpoint, "" for the model's own, which has up to `rows` tokens, at most `tokens`
    of them. `written`: special tokens that users may write, as one group. `in_place`: what the
    decoder reads in place of that text, None where it reads the text, too.
    """

    folder: str
    rows: int
    tokens: int
    written: re.Pattern[str] | None = None
    in_place: str | None = None


@runtime_checkable
class Instructed(Protocol):
    """A family whose tower gives features of a picture, [S, C]; what a decoder reads of it, [T, D],
    is made of them and of the prompt's text.
    """

    instruction: Instruction

    def instructed(
        self, features: Node, ids: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        """features [1, S, C], ids int64 [N] -> embeddings [1, T, D]"""


@dataclass(frozen=True, eq=False)
class _Read:
    features: Tensor
    ids: np.ndarray


class InstructedReader:
    """Runs a family's second part on the backends of its tower, of features [S, C]. Of several
    ranks the first has it as a whole.
    """

    def __init__(
        self,
        family: Instructed,
        weights: WeightSource,
        backends: Sequence[Backend],
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        form: AttentionForm,
        overrides: Sequence[Override],
        residency: Residency,
    ):
        self.family, self._weights, self._backends = family, weights, backends
        self._shape, self._dtype, self._form = shape, dtype, form
        self._overrides, self._residency = overrides, residency
        self.plan = lru_cache(maxsize=PLANS)(self._make_plan)
        self._executor = lru_cache(maxsize=PLANS)(self._make_executor)

    def graph(self, tokens: int) -> Node:
        """-> embeddings [1, T, D]"""

        def features(one: _Read) -> Tensor:
            return one.features[None].to(self._dtype)

        return self.family.instructed(
            graph_input("inp.features", (1, *self._shape), self._dtype, features),
            graph_input("inp.instruction", (tokens,), torch.int64, lambda one: one.ids),
            self._weights,
            self._form,
        )

    def _make_plan(self, tokens: int) -> Plan:
        return make_plan([self.graph(tokens)], self._backends, self._overrides)

    def _make_executor(self, tokens: int) -> Executor:
        return Executor(self.plan(tokens), self._residency)

    def rows(self, features: Tensor, ids: Sequence[int], observe: Observer | None = None) -> Tensor:
        """features [S, C] -> embeddings [T, D]"""
        read = _Read(features, np.array(ids, np.int64))
        (embeddings,) = finish(self._executor(len(ids)).steps(read, observe))
        result: Tensor = embeddings[0]
        return result
