"""An answer that is given: what a model writes that copies, or does not, whatever its weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Forced:
    """An `mtmd.llm.engine.engine.Constraint`: one answer, token by token."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens, self._at = tokens, 0

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V], -inf at every token but the one that is to come."""
        result = torch.full_like(logits, float("-inf"))
        result[self._tokens[self._at]] = 0.0
        return result

    def accept(self, token: int) -> None:  # noqa: ARG002
        self._at += 1
