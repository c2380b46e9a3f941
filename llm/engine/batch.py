"""What one forward of the decoder reads: the next spans of several sequences, as tensors, in one of
few shapes.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtmd.llm.engine.sequence import Sequence
from mtmd.llm.engine.spans import Span, lay_out
from mtmd.llm.engine.state import PAGE, Cache


@dataclass(frozen=True)
class BatchShape:
    """What a plan is made for: T tokens of S sequences, M of them given as embeddings, R rows of
    logits, P pages of the past.
    """

    tokens: int
    images: int = 0
    wanted: int = 1
    sequences: int = 1
    pages: int = 1

    def rounded(self) -> BatchShape:
        """A shape that holds this one. There are few such shapes, so that few plans are made: rows
        that are too many run for nothing.
        """
        images, sequences = _rounded(self.images), self.sequences
        tokens = _rounded(self.tokens)
        if (
            tokens - self.tokens < images - self.images
        ):  # rows too many of images lie on tokens too many
            tokens = _rounded(self.tokens + images - self.images)
        if tokens > self.tokens or sequences > 4:
            sequences = _rounded(sequences + (tokens > self.tokens))
        return BatchShape(
            tokens, images, min(self.wanted, 1) and sequences, sequences, _rounded(self.pages, 4)
        )


def _rounded(count: int, parts: int = 8) -> int:
    """The next of 0 to 8, then in steps of about an eighth, or of one of other `parts`, a power of
    two.
    """
    if count <= 8:
        return count
    step = 1 << max(count.bit_length() - parts.bit_length(), 0)
    return -(-count // step) * step


@dataclass(frozen=True)
class Batch:
    """One forward: T tokens of S sequences, one after another.

    int64 [T]: tokens; slots, where in the cache each goes; and, as rows of the gathered pages,
    where its own sequence begins (first), where it is itself (own), and where the block it belongs
    to ends (a block of its own for a causal one). positions int64 [3, T]; starts int64 [S + 1],
    where each sequence begins among the tokens; sequence_slots int64 [S]; pages int64 [P], those of
    all sequences' pasts. images [M, D] are put at rows image_at; logits are computed for `wanted`,
    and `answers` of them mean something.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    own: Tensor
    block_last: Tensor
    starts: Tensor
    sequence_slots: Tensor
    pages: Tensor
    images: Tensor | None
    image_at: Tensor | None
    wanted: Tensor
    answers: int
    cache: Cache

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            len(self.tokens),
            0 if self.images is None else len(self.images),
            len(self.wanted),
            len(self.sequence_slots),
            len(self.pages),
        )

    def image_rows(self) -> Tensor:
        assert self.images is not None
        return self.images

    def image_places(self) -> Tensor:
        assert self.image_at is not None
        return self.image_at

    def bounds(self, window: int | None, blocks: bool) -> Tensor:
        """int32 [T, 2], the first and last row each token sees: `window` tokens back, itself
        counted, and, with `blocks`, on to the end of its block.
        """
        first = self.first if window is None else torch.maximum(self.first, self.own - (window - 1))
        return torch.stack((first, self.block_last if blocks else self.own), 1).int()


def make_batch(
    parts: abc.Sequence[tuple[Sequence, abc.Sequence[Span]]],
    cache: Cache,
    wants_logits: bool = True,
) -> Batch:
    """The next spans of one or several sequences, each in a slot of its own, as one batch. The
    sequences stay as they are: a batch may be made for nothing, where memory is short for it.

    Logits are computed for the last token of each, or for none. Spans that are not laid out go on
    at the sequence's position. Rows are added up to a shape that there are few of; logits of the
    sequences come first.
    """
    made = _Making(cache)
    for sequence, spans in parts:
        made.add(sequence, spans)
    return made.finish(wants_logits)


@dataclass
class _Making:
    """A batch in the making: lists that grow with every sequence."""

    cache: Cache
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)  # first, own, block_last
    positions: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    sequence_slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    image_at: list[int] = field(default_factory=list)

    def add(self, sequence: Sequence, spans: abc.Sequence[Span]) -> None:
        assert sequence.slot is not None
        base = len(self.pages) * PAGE  # its first row among the gathered pages of all
        length, position, pages = sequence.done, sequence.position, sequence.pages
        for span in spans:
            if span.positions is None:
                (span,), position = lay_out([span], position)
            assert span.positions is not None
            self.positions.append(span.positions)
            if span.embeddings is not None:
                self.images.append(span.embeddings)
                self.image_at += range(len(self.tokens), len(self.tokens) + len(span))
            self.tokens += span.tokens
            start, stop = length, length + len(span)
            self.slots += [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, stop)]
            self.marks += [
                (base, base + i, base + (stop - 1 if span.block else i)) for i in range(start, stop)
            ]
            length = stop
        self.starts.append(len(self.tokens))
        self.sequence_slots.append(sequence.slot)
        self.pages += pages[: -(-length // PAGE)]

    def finish(self, wants_logits: bool) -> Batch:
        sequences, images = len(self.sequence_slots), len(self.image_at)
        shape = BatchShape(
            len(self.tokens), images, sequences if wants_logits else 0, sequences, len(self.pages)
        ).rounded()
        spare = shape.tokens - len(self.tokens)
        wanted = [stop - 1 for stop in self.starts[1:]] if wants_logits else []
        wanted += [0] * (shape.wanted - len(wanted))
        self.image_at += range(len(self.tokens), len(self.tokens) + shape.images - images)
        if spare:
            self.tokens += [0] * spare
            self.slots += [i % PAGE for i in range(spare)]
            self.marks += [(0, 0, 0)] * spare
            self.positions.append(torch.zeros((3, spare), dtype=torch.int64))
        empty = shape.sequences - sequences
        self.starts += [self.starts[-1]] * (empty - 1) + [shape.tokens] * min(empty, 1)
        self.sequence_slots += [self.cache.sequences] * empty
        rows = torch.cat(self.images) if self.images else None
        if rows is not None and shape.images > images:
            rows = torch.cat((rows, rows.new_zeros(shape.images - images, rows.shape[1])))
        first, own, block_last = torch.tensor(self.marks).unbind(1)
        return Batch(
            torch.tensor(self.tokens),
            torch.cat(self.positions, 1),
            torch.tensor(self.slots),
            first,
            own,
            block_last,
            torch.tensor(self.starts),
            torch.tensor(self.sequence_slots),
            torch.tensor(self._all_pages(shape.pages)),
            rows,
            torch.tensor(self.image_at) if rows is not None else None,
            torch.tensor(wanted, dtype=torch.int64),
            sequences if wants_logits else 0,
            self.cache,
        )

    def _all_pages(self, count: int) -> list[int]:
        """With pages that nobody looks at: those that follow, where that keeps a run of neighbours,
        which need not be copied.
        """
        last = self.pages[-1]
        return self.pages + [
            p if p < self.cache.pages else 0
            for p in range(last + 1, last + 1 + count - len(self.pages))
        ]
