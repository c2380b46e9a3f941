"""Rows of logits, as whoever chooses tokens reads them. On a CPU they are numpy's: a tensor for
each would give the interpreter away twice a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Row: TypeAlias = Tensor | np.ndarray
"""Logits [V] of any float dtype. In numpy uint16 stands for bf16, which it does not have."""


def rows_of(logits: Tensor) -> Sequence[Row]:
    """Return the rows of logits [R, V]; they share its memory."""
    if logits.device.type != "cpu" or logits.requires_grad:
        return logits.unbind(0)
    return list(numbers_of(logits))


def numbers_of(logits: Tensor) -> np.ndarray:
    """Return the numbers of a tensor on the CPU, as numpy's array."""
    if logits.dtype == torch.bfloat16:
        result: np.ndarray = logits.contiguous().view(torch.int16).numpy().view(np.uint16)
    else:
        result = logits.numpy()
    return result


def tensor_of(row: Row) -> Tensor:
    """The same as a tensor."""
    if isinstance(row, Tensor):
        return row
    if row.dtype == np.uint16:
        return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(row)
