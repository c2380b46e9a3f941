"""Runs of tokens that may not occur a second time, as models that read pages ask for: tables and
dotted lines make them repeat themselves without end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def repeated_ends(tokens: Sequence[int] | np.ndarray, size: int) -> frozenset[int]:
    """Return the tokens that would end a run of `size` tokens which `tokens` have already, as
    transformers' NoRepeatNGramLogitsProcessor finds them.
    """
    numbers = np.asarray(tokens, np.int64)
    starts = len(numbers) - size + 1  # of runs that are there
    if starts < 1:
        return frozenset()
    prefix = numbers[len(numbers) - size + 1 :]
    at = np.arange(starts)
    for offset in range(size - 2, -1, -1):  # the last differs most often
        at = at[numbers[at + offset] == prefix[offset]]
    return frozenset(numbers[at + (size - 1)].tolist())
