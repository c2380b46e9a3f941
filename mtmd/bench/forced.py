"""An answer that is given: what a model writes that copies, or does not, whatever its weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Forced:
    """An `mtmd.llm.engine.engine.Constraint`: one answer, token by token."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens, self._at = tokens, 0

    def begin(self) -> None:
        pass

    def ready(self, wait_s: float = 0) -> bool:  # noqa: ARG002
        return True

    def close(self) -> None:
        pass

    def mask(self, logits: Tensor) -> Tensor:
        """Logits [V], -inf at every token but the one that is to come."""
        # numpy's, which wakes no other threads
        result = np.full(len(logits), -np.inf, np.float32)
        result[self._tokens[self._at]] = 0.0
        return torch.from_numpy(result)

    def allowed(self, size: int) -> np.ndarray:
        result = np.zeros(-(-size // 8), np.uint8)
        result[self._tokens[self._at] // 8] = 1 << self._tokens[self._at] % 8
        return result

    def accept(self, token: int) -> None:  # noqa: ARG002
        self._at += 1
