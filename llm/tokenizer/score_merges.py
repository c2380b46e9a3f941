"""The merges behind a vocabulary of scores: sentencepiece keeps none, the `tokenizers` library's
BPE needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

# 2**64 over the golden ratio: odd, so that it has an inverse modulo 2**64
BASE = 0x9E3779B97F4A7C15
FILTER_BITS = 22
# 262,144 tokens have half a million merges, making tokens of 5 million characters, each counted as
# often as it is made.
MERGES_MAX = 1 << 20
MADE_CHARACTERS_MAX = 20_000_000


def merges_from_scores(
    tokens: Sequence[str], ids: Sequence[int], scores: Sequence[float], made: Sequence[bool]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others: the best score first, then by the ids of the token,
    of its left and of its right part.

    So does transformers' SentencePieceExtractor of 2023; later versions order the ways to make one
    token by the lengths of the parts. `tokens` and `ids` [V], no token twice; `scores` [V]; `made`
    [V] tells which tokens merging may make. A part is found by a 64-bit hash of its characters,
    computed for all at once: 262,144 tokens have 2 million places to cut. Raises ValueError for
    tokens made to have merges without end.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    hashed = _Hashes("".join(tokens))
    index = _Index(hashed.of(starts, ends))
    cuts = np.where(made, np.maximum(lengths - 1, 0), 0)
    token = np.repeat(np.arange(len(tokens)), cuts)
    location = starts[token] + 1 + np.arange(len(token)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    at, left = index.find(hashed.of(starts[token], location))
    token, location = token[at], location[at]
    at, right = index.find(hashed.of(location, ends[token]))
    token, left = token[at], left[at]
    if len(token) > MERGES_MAX or int(lengths[token].sum()) > MADE_CHARACTERS_MAX:
        raise ValueError(
            f"the scores give {len(token)} merges, of {int(lengths[token].sum())} characters; "
            f"at most {MERGES_MAX} of {MADE_CHARACTERS_MAX} characters are taken"
        )
    by_id = np.asarray(ids)
    best = np.lexsort((by_id[right], by_id[left], by_id[token], -np.asarray(scores)[token]))
    return [
        (tokens[i], tokens[j])
        for i, j in zip(left[best].tolist(), right[best].tolist(), strict=True)
    ]


class _Hashes:
    """Hashes of any parts of `text`, modulo 2**64: sum over k of (character k + 1) * BASE**k, k
    counted from the part's first character.
    """

    def __init__(self, text: str) -> None:
        characters: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        terms = (characters.astype(np.uint64) + np.uint64(1)) * _powers(BASE, len(characters))
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
        self._inverse = _powers(pow(BASE, -1, 1 << 64), len(characters) + 1)

    def of(self, starts: Ints, ends: Ints) -> Hashes:
        hashes: Hashes = (self._sums[ends] - self._sums[starts]) * self._inverse[starts]
        return hashes


class _Index:
    """Describes where in a list of hashes others stand. Most are not in it: a table of their first
    bits tells so without a search.
    """

    def __init__(self, hashes: Hashes) -> None:
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]
        self._begins = np.zeros(1 << FILTER_BITS, np.bool_)
        self._begins[hashes >> np.uint64(64 - FILTER_BITS)] = True

    def find(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """Return which of `hashes` are in the list, and where there."""
        at = np.flatnonzero(self._begins[hashes >> np.uint64(64 - FILTER_BITS)])
        near = np.minimum(np.searchsorted(self._sorted, hashes[at]), len(self._sorted) - 1)
        same = self._sorted[near] == hashes[at]
        return at[same], self._order[near[same]]


def _powers(base: int, count: int) -> Hashes:
    """[count] powers of `base` from 0 up, modulo 2**64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)
