"""Describes what one forward of the decoder reads, in one of few shapes. Numbers are numpy's: each
tensor that is made or let go gives the interpreter away, and there are some ten a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mtmd.llm.state import Cache

FEW = 16  # tokens of a batch whose attention reads a cache in place, where it can
# Pages of the shortest table of a cache that is read in place, and by what the next is longer:
# entries that nobody looks at cost nothing, and each length is a plan of its own.
TABLE, SEPARATE_TABLES = 64, 16
MIN_GATHERED = 8  # pages of a larger batch: to gather so many takes next to nothing


@dataclass(frozen=True)
class BatchShape:
    """Describes what a plan is made for: T tokens of S sequences, M of them given as embeddings, R
    rows of logits, P pages of the past; `adapters` that some of the sequences have, by number;
    `context` rows whose keys and values are stored for tokens to attend to.
    """

    tokens: int
    images: int = 0
    requested: int = 1
    sequences: int = 1
    pages: int = 1
    adapters: tuple[int, ...] = ()
    context: int = 0

    def rounded(self, in_place: bool = False, table: int | None = None) -> BatchShape:
        """A shape that holds this one. There are few such shapes, so that few plans are made: rows
        that are too many run for nothing. `in_place` is the cache's: then there are very few, for a
        plan costs as much as some steps. `table`: there is one size of the table of pages.
        """
        images, sequences = _rounded(self.images), self.sequences
        tokens = _rounded(self.tokens)
        if in_place:
            if tokens <= FEW and (images or sequences < tokens):  # a part of a prompt, any length
                tokens = _power_of_two(tokens)
            images = images and tokens  # the last one again and again: see `make_batch`
        elif tokens - self.tokens < images - self.images:
            # Rows too many of images lie on tokens too many
            tokens = _rounded(self.tokens + images - self.images)
        is_filled = tokens > self.tokens
        if in_place and sequences < tokens:
            sequences = min(_power_of_two(sequences + is_filled), tokens)
        elif is_filled or sequences > 4:
            sequences = _rounded(sequences + is_filled)
        requested = min(self.requested, 1) and sequences
        if self.requested > sequences:  # of several rows each
            maximum = _power_of_two(self.requested) if in_place else _rounded(self.requested)
            requested = tokens if tokens <= FEW else min(maximum, tokens)
        pages = self._table(in_place, table, tokens)
        return BatchShape(
            tokens, images, requested, sequences, pages, self.adapters, _rounded(self.context)
        )

    def _table(self, in_place: bool, table: int | None, tokens: int) -> int:
        """Pages of the rounded shape."""
        if table is not None:
            return max(table, self.pages)
        if not in_place:
            return _rounded(self.pages, 4)
        if tokens > FEW:  # gathered
            return _rounded(max(self.pages, MIN_GATHERED), 4)
        pages = TABLE
        while pages < self.pages:
            pages *= SEPARATE_TABLES
        return pages


def _rounded(count: int, parts: int = 8) -> int:
    """The next of 0 to 8, then in steps of about an eighth, or of one of other `parts`, a power of
    two.
    """
    if count <= 8:
        return count
    step = 1 << max(count.bit_length() - parts.bit_length(), 0)
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    """The next, of at least 1."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Batch:
    """One forward: T tokens of S sequences, one after another.

    int64 [T]: tokens; slots, where in the cache each goes; and, as rows of the gathered pages,
    where its own sequence begins (first), where it is itself (own), where the block it belongs to
    begins and ends (a block of its own for a causal one), and where its prompt ends (prompt_end).
    positions int64 [4, T]; starts int64 [S + 1], where each sequence begins among the tokens;
    sequence_slots int64 [S]; pages int64 [P], those of all sequences' pasts. images [M, D] are put
    at rows image_at; logits are computed for `requested`, and `answers` of them mean something.
    fp32 [T, N]: `scales` of N adapters, of which `adapters` are applied to any of the tokens. Where
    tokens attend to a context: `context` [N, D] is stored at rows context_slots, int64 [N]; sights
    int64 [T, 4] say what each token sees, as `spans.sight` does, of its sequences' rows one after
    another.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    own: np.ndarray
    block_first: np.ndarray
    block_last: np.ndarray
    prompt_end: np.ndarray
    starts: np.ndarray
    sequence_slots: np.ndarray
    pages: np.ndarray
    images: Tensor | None
    image_at: np.ndarray | None
    requested: np.ndarray
    answers: int
    cache: Cache
    scales: np.ndarray
    adapters: tuple[int, ...] = ()
    context: Tensor | None = None
    context_slots: np.ndarray | None = None
    sights: np.ndarray | None = None

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            len(self.tokens),
            0 if self.images is None else len(self.images),
            len(self.requested),
            len(self.sequence_slots),
            len(self.pages),
            self.adapters,
            0 if self.context is None else len(self.context),
        )

    def context_bounds(self) -> np.ndarray:
        """int32 [T, 2]"""
        assert self.sights is not None
        return self.sights[:, :2].astype(np.int32)

    def scales_of(self, adapter: int) -> np.ndarray:
        """fp32 [T, 1]"""
        return np.ascontiguousarray(self.scales[:, adapter : adapter + 1])

    def image_rows(self) -> Tensor:
        assert self.images is not None
        return self.images

    def image_positions(self) -> np.ndarray:
        assert self.image_at is not None
        return self.image_at

    def of_pictures(self, marks: tuple[int, ...]) -> np.ndarray:
        """bool [T]: tokens of pictures and, in a prompt, those whose ids are `marks`."""
        result: np.ndarray = np.isin(self.tokens, marks) & (self.own < self.prompt_end)
        if self.image_at is not None:
            result[self.image_at] = True
        return result

    def bounds(
        self, window: int | None, blocks: bool, whole: bool = False, chunked: bool = False
    ) -> np.ndarray:
        """int32 [T, 2], the first and last row each token sees: `window` tokens back, itself
        counted, and, with `blocks`, on to the end of its block; `whole`: its block from the
        beginning, too, where that is further back than the window. `chunked`: back to the last
        multiple of `window`, from the beginning of its sequence.
        """
        result = np.empty((len(self.own), 2), np.int32)
        if chunked and window is not None:
            first = self.own - (self.own - self.first) % window
        else:
            first = self.first if window is None else np.maximum(self.first, self.own - window + 1)
        result[:, 0] = np.minimum(first, self.block_first) if whole else first
        result[:, 1] = self.block_last if blocks else self.own
        return result

    def hidden(self, window: int, rows: int) -> np.ndarray:
        """fp32 [T, rows], -inf where a token of an answer does not see one of the gathered rows,
        as it is of the answer too and more than `window` tokens back, itself counted.
        """
        number = np.arange(rows)
        old = (number >= self.prompt_end[:, None]) & (number <= self.own[:, None] - window)
        result = np.zeros(old.shape, np.float32)
        result[old] = -np.inf
        return result
