"""What the decoder is fed: spans of tokens or embeddings, and one batch of them."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """A run of tokens, or of embeddings [T, D] that take the place of tokens.

    `block`: its tokens see each other in both directions, and it is never cut across batches.
    """
    tokens: tuple[int, ...]
    embeddings: Tensor | None = None
    block: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """One forward: T tokens of one sequence, at cache slots start..start+T.

    tokens, positions, slots, block_end int64 [T]: block_end is the slot of the last token of the block a token belongs to (its own for a
    causal one); images [M, D] put at rows image_at; logits are wanted for `wanted` rows.
    """
    tokens: Tensor
    slots: Tensor
    block_end: Tensor
    images: Tensor | None
    image_at: Tensor | None
    wanted: Tensor
    caches: Sequence[Tensor]

    @property
    def positions(self) -> Tensor:
        return self.slots

    def image_rows(self) -> Tensor:
        assert self.images is not None
        return self.images

    def image_places(self) -> Tensor:
        assert self.image_at is not None
        return self.image_at

    def bounds(self, window: int | None) -> Tensor:
        """int32 [T, 2], the first and last slot each token sees: `window` tokens back, itself counted, and on to the end of its block."""
        first = torch.zeros_like(self.slots) if window is None else (self.slots - (window - 1)).clamp_(min=0)
        return torch.stack((first, self.block_end), 1).int()


def make_batch(spans: Sequence[Span], start: int, caches: Sequence[Tensor], wants_logits: bool) -> Batch:
    """Spans, the first at cache slot `start`, as one batch. Logits are computed for the last token, or for none."""
    tokens = torch.tensor([t for s in spans for t in s.tokens])
    slots = torch.arange(start, start + len(tokens))
    block_end, at, images, offset = slots.clone(), [], [], 0
    for span in spans:
        if span.block:
            block_end[offset:offset + len(span)] = start + offset + len(span) - 1
        if span.embeddings is not None:
            at.append(torch.arange(offset, offset + len(span)))
            images.append(span.embeddings)
        offset += len(span)
    wanted = torch.tensor([len(tokens) - 1] if wants_logits else [], dtype=torch.int64)
    return Batch(tokens, slots, block_end, torch.cat(images) if images else None, torch.cat(at) if at else None, wanted, caches)


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
            batches[-1].append(_slice(rest, 0, taken))
            rest, room = _slice(rest, taken, len(rest)), room - taken
    return [b for b in batches if b]


def _slice(span: Span, start: int, stop: int) -> Span:
    embeddings = None if span.embeddings is None else span.embeddings[start:stop]
    return Span(span.tokens[start:stop], embeddings, span.block)
