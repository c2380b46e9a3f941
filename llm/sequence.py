"""What the decoder is fed: spans of tokens or embeddings, and batches of the spans of several
sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mtmd.llm.state import PAGE, Cache

FEW = 16  # tokens of a batch whose attention reads a cache in place, where it can


@dataclass(frozen=True)
class Span:
    """A run of tokens, or of embeddings [T, D] that take the place of tokens.

    `block`: its tokens see each other in both directions, and it is never cut across batches.
    `grid` (rows, columns): its tokens lie on a grid and have a row and a column of their own as
    positions, beside a time that they share. `positions` int64 [3, T] (time, row, column) are set
    by `lay_out`. `content` names what the embeddings show, and `offset` the place of the first
    among all of it, so that what was read once is known again; empty where nobody knows.
    """

    tokens: tuple[int, ...]
    embeddings: Tensor | None = None
    block: bool = False
    grid: tuple[int, int] | None = None
    positions: Tensor | None = None
    content: bytes = b""
    offset: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int) -> Span:
        """A part of it, laid out as the whole was."""
        assert self.grid is None or self.positions is not None, (
            "a grid is laid out before it is cut"
        )
        return Span(
            self.tokens[start:stop],
            None if self.embeddings is None else self.embeddings[start:stop],
            self.block,
            None,
            None if self.positions is None else self.positions[:, start:stop],
            self.content,
            self.offset + start,
        )


@dataclass
class Running:
    """A sequence on its way: its slot among recurrent states, its pages of keys and values, the
    tokens read so far, and the position of the next.
    """

    slot: int = 0
    pages: Sequence[int] = ()
    length: int = 0
    position: int = 0


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

    def rounded(self, in_place: bool = False) -> BatchShape:
        """A shape that holds this one. There are few such shapes, so that few plans are made: rows
        that are too many run for nothing. `in_place` is the cache's: then there are very few sizes
        of its table, for a plan costs as much as some steps.
        """
        images, sequences = _rounded(self.images), self.sequences
        tokens = _rounded(self.tokens)
        if (
            tokens - self.tokens < images - self.images
        ):  # rows too many of images lie on tokens too many
            tokens = _rounded(self.tokens + images - self.images)
        if tokens > self.tokens or sequences > 4:
            sequences = _rounded(sequences + (tokens > self.tokens))
        pages = _rounded(self.pages, 4)
        if in_place and tokens <= FEW:
            pages = 4
            while pages < self.pages:
                pages *= 4
        return BatchShape(tokens, images, min(self.wanted, 1) and sequences, sequences, pages)


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


def lay_out(spans: Sequence[Span], position: int) -> tuple[list[Span], int]:
    """Spans with the positions of their tokens, the first of them at `position`, and the position
    that comes next (arXiv:2409.12191).
    """
    placed = []
    for span in spans:
        if span.grid is None:
            positions = torch.arange(position, position + len(span)).expand(3, -1)
        else:
            rows, columns = span.grid
            cell = torch.arange(rows * columns)
            positions = position + torch.stack(
                (torch.zeros_like(cell), cell // columns, cell % columns)
            )
        placed.append(replace(span, grid=None, positions=positions))
        position = max(position, int(positions.max()) + 1) if len(span) else position
    return placed, position


def make_batch(
    parts: Sequence[tuple[Running, Sequence[Span]]], cache: Cache, wants_logits: bool = True
) -> Batch:
    """The next spans of one or several sequences, each in a slot of its own, as one batch; the
    sequences move on by what they give.

    Logits are computed for the last token of each, or for none. Spans that are not laid out go on
    where the sequence is. Rows are added up to a shape that there are few of; logits of the
    sequences come first.
    """
    made = _Making(cache)
    for running, spans in parts:
        made.add(running, spans)
    return made.finish(wants_logits)


@dataclass
class _Making:
    """A batch in the making: lists that grow with every sequence."""

    cache: Cache
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)  # first, own, block_last
    positions: list[Tensor | range] = field(default_factory=list)  # a range: of text
    starts: list[int] = field(default_factory=lambda: [0])
    sequence_slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    image_at: list[int] = field(default_factory=list)

    def add(self, running: Running, spans: Sequence[Span]) -> None:
        base = len(self.pages) * PAGE
        for span in spans:
            if span.positions is None and span.grid is None:
                after = running.position + len(span)
                self.positions.append(range(running.position, after))
                running.position = after
            elif span.positions is None:
                (span,), running.position = lay_out([span], running.position)
                assert span.positions is not None
                self.positions.append(span.positions)
            else:
                running.position = max(running.position, int(span.positions.max()) + 1)
                self.positions.append(span.positions)
            if span.embeddings is not None:
                self.images.append(span.embeddings)
                self.image_at += range(len(self.tokens), len(self.tokens) + len(span))
            self.tokens += span.tokens
            start, stop = running.length, running.length + len(span)
            self.slots += [running.pages[i // PAGE] * PAGE + i % PAGE for i in range(start, stop)]
            self.marks += [
                (base, base + i, base + (stop - 1 if span.block else i)) for i in range(start, stop)
            ]
            running.length = stop
        self.starts.append(len(self.tokens))
        self.sequence_slots.append(running.slot)
        self.pages += running.pages[: -(-running.length // PAGE)]

    def finish(self, wants_logits: bool) -> Batch:
        sequences, images = len(self.sequence_slots), len(self.image_at)
        shape = BatchShape(
            len(self.tokens), images, sequences if wants_logits else 0, sequences, len(self.pages)
        ).rounded(self.cache.in_place)
        spare = shape.tokens - len(self.tokens)
        wanted = [stop - 1 for stop in self.starts[1:]] if wants_logits else []
        wanted += [0] * (shape.wanted - len(wanted))
        self.image_at += range(len(self.tokens), len(self.tokens) + shape.images - images)
        if spare:
            self.tokens += [0] * spare
            self.slots += [i % PAGE for i in range(spare)]
            self.marks += [(0, 0, 0)] * spare
            self.positions += [range(1)] * spare
        empty = shape.sequences - sequences
        self.starts += [self.starts[-1]] * (empty - 1) + [shape.tokens] * min(empty, 1)
        self.sequence_slots += [self.cache.sequences] * empty
        rows = torch.cat(self.images) if self.images else None
        if rows is not None and shape.images > images:
            rows = torch.cat((rows, rows.new_zeros(shape.images - images, rows.shape[1])))
        first, own, block_last = torch.tensor(self.marks).unbind(1)
        return Batch(
            torch.tensor(self.tokens),
            self._all_positions(),
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

    def _all_positions(self) -> Tensor:
        """[3, T]; of text alone it is made at once, as in most steps of decoding."""
        if all(isinstance(p, range) for p in self.positions):
            row = [i for part in self.positions for i in part]
            return torch.tensor([row, row, row])
        return torch.cat(
            [torch.tensor(p).expand(3, -1) if isinstance(p, range) else p for p in self.positions],
            1,
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


def cut(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Spans in batches of at most `limit` tokens. Causal spans are cut where a batch is full; a
    block is not, its batch grows for it.
    """
    batches: list[list[Span]] = [[]]
    room = limit
    for span in spans:
        rest = span
        while len(rest):
            if room <= 0 or (rest.block and batches[-1] and len(rest) > room):
                batches.append([])
                room = limit
            taken = len(rest) if rest.block else min(room, len(rest))
            batches[-1].append(rest.cut(0, taken))
            rest, room = rest.cut(taken, len(rest)), room - taken
    return [b for b in batches if b]
