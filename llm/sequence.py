"""What the decoder is fed: spans of tokens or embeddings, and batches of the spans of several sequences."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mtmd.llm.state import Cache


@dataclass(frozen=True)
class Span:
    """A run of tokens, or of embeddings [T, D] that take the place of tokens.

    `block`: its tokens see each other in both directions, and it is never cut across batches. `grid` (rows, columns): its tokens lie on a
    grid and have a row and a column of their own as positions, beside a time that they share. `positions` int64 [3, T] (time, row,
    column) are set by `lay_out`.
    """
    tokens: tuple[int, ...]
    embeddings: Tensor | None = None
    block: bool = False
    grid: tuple[int, int] | None = None
    positions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int) -> Span:
        """A part of it, laid out as the whole was."""
        assert self.grid is None or self.positions is not None, "a grid is laid out before it is cut"
        return Span(self.tokens[start:stop], None if self.embeddings is None else self.embeddings[start:stop], self.block, None,
                    None if self.positions is None else self.positions[:, start:stop])


@dataclass
class Running:
    """A sequence on its way: its slot in the cache, the tokens read so far, and the position of the next."""
    slot: int = 0
    length: int = 0
    position: int = 0


@dataclass(frozen=True)
class Batch:
    """One forward: T tokens of S sequences, one after another.

    int64 [T]: tokens; slots, where in the cache each goes; first and block_first, block_last, the slots at which its sequence and the
    block it belongs to begin and end (a block of its own for a causal one). positions int64 [3, T]; starts int64 [S + 1], where each
    sequence begins among the tokens; sequence_slots int64 [S]. images [M, D] are put at rows image_at; logits are computed for `wanted`.
    """
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    block_first: Tensor
    block_last: Tensor
    starts: Tensor
    sequence_slots: Tensor
    images: Tensor | None
    image_at: Tensor | None
    wanted: Tensor
    cache: Cache

    @property
    def shape(self) -> BatchShape:
        return BatchShape(len(self.tokens), 0 if self.images is None else len(self.images), len(self.wanted), len(self.sequence_slots))

    def image_rows(self) -> Tensor:
        assert self.images is not None
        return self.images

    def image_places(self) -> Tensor:
        assert self.image_at is not None
        return self.image_at

    def bounds(self, window: int | None, blocks: bool, whole: bool) -> Tensor:
        """int32 [T, 2], the first and last slot each token sees: `window` tokens back, itself counted, and, with `blocks`, on to the end of
        its block; with `whole`, back to its beginning too, however far that is."""
        first = self.first if window is None else torch.maximum(self.first, self.slots - (window - 1))
        if whole:
            first = torch.minimum(first, self.block_first)
        return torch.stack((first, self.block_last if blocks else self.slots), 1).int()


@dataclass(frozen=True)
class BatchShape:
    """What a plan is made for: T tokens of S sequences, M of them given as embeddings, R rows of logits."""
    tokens: int
    images: int = 0
    wanted: int = 1
    sequences: int = 1


def lay_out(spans: Sequence[Span], position: int) -> tuple[list[Span], int]:
    """Spans with the positions of their tokens, the first of them at `position`, and the position that comes next (arXiv:2409.12191)."""
    placed = []
    for span in spans:
        if span.grid is None:
            positions = torch.arange(position, position + len(span)).expand(3, -1)
        else:
            rows, columns = span.grid
            cell = torch.arange(rows * columns)
            positions = position + torch.stack((torch.zeros_like(cell), cell // columns, cell % columns))
        placed.append(replace(span, grid=None, positions=positions))
        position = max(position, int(positions.max()) + 1) if len(span) else position
    return placed, position


def make_batch(parts: Sequence[tuple[Running, Sequence[Span]]], cache: Cache, wants_logits: bool = True) -> Batch:
    """The next spans of one or several sequences, each in a slot of its own, as one batch; the sequences move on by what they give.

    Logits are computed for the last token of each, or for none. Spans that are not laid out go on where the sequence is.
    """
    rows: list[_Rows] = []
    for running, spans in parts:
        placed, after = _laid_out(running, spans)
        rows += _rows(running, placed, cache.context)
        running.length += sum(map(len, placed))
        running.position = after
    counts = torch.tensor([0, *(sum(map(len, spans)) for _, spans in parts)])
    starts = counts.cumsum(0)
    images = [r.span.embeddings for r in rows if r.span.embeddings is not None]
    offsets = [0, *accumulate(len(r.span) for r in rows)]
    at = [torch.arange(offsets[i], offsets[i + 1]) for i, r in enumerate(rows) if r.span.embeddings is not None]
    return Batch(
        tokens=torch.tensor([t for r in rows for t in r.span.tokens], dtype=torch.int64),
        positions=torch.cat([r.positions for r in rows], 1), slots=torch.cat([r.slots for r in rows]),
        first=torch.cat([torch.full_like(r.slots, r.first) for r in rows]),
        block_first=torch.cat([r.slots[:1].expand_as(r.slots) if r.span.block else r.slots for r in rows]),
        block_last=torch.cat([r.slots[-1:].expand_as(r.slots) if r.span.block else r.slots for r in rows]),
        starts=starts, sequence_slots=torch.tensor([running.slot for running, _ in parts]),
        images=torch.cat(images) if images else None, image_at=torch.cat(at) if at else None,
        wanted=starts[1:] - 1 if wants_logits else starts[:0], cache=cache)


@dataclass(frozen=True)
class _Rows:
    """One span in its batch: the slots of its tokens, and the first slot of its sequence."""
    span: Span
    slots: Tensor
    first: int
    positions: Tensor


def _laid_out(running: Running, spans: Sequence[Span]) -> tuple[list[Span], int]:
    """Spans with positions, and the position that comes after them."""
    placed, position = [], running.position
    for span in spans:
        if span.positions is None:
            laid, position = lay_out([span], position)
            placed += laid
        else:
            placed.append(span)
            position = max(position, int(span.positions.max()) + 1)
    return placed, position


def _rows(running: Running, spans: Sequence[Span], context: int) -> list[_Rows]:
    found, first = [], running.slot * context
    at = first + running.length
    for span in spans:
        assert span.positions is not None
        found.append(_Rows(span, torch.arange(at, at + len(span)), first, span.positions))
        at += len(span)
    return found


def cut(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Spans in batches of at most `limit` tokens. Causal spans are cut where a batch is full; a block is not, its batch grows for it."""
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
