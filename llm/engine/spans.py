"""Describes what a prompt is made of: spans of tokens or of embeddings, the positions of their
tokens, and the stretches of them that batches read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate, count

import numpy as np
from torch import Tensor

AXES = 4  # of positions: time, row, column, number of the picture


@dataclass(frozen=True)
class Span:
    """A run of tokens, or of embeddings [T, D] that take the place of tokens.

    `block`: its tokens see each other in both directions, and it is never cut across batches.
    `joins`: its block is one with that of the span before it.
    `real`: the embeddings [R, D] take the place of nothing; tokens attend to them (cross
    attention), from this one on to as many of them as `real` says, the others being padding.
    `grid` (rows, columns): its tokens lie on a grid and have a row and a column of their own as
    positions, beside a time that they share. `later`: of a later part of a clip, how far its time
    is behind that of the clip's first part, where its rows and columns begin too; without a grid,
    of sound, how far its first token is; None for all else. `number`: of a picture on a grid whose
    tokens keep their places as times, and whose rows and columns begin at 0; which picture of the
    conversation it is. `on_canvas` int64 [3, T]: its tokens lie on a canvas, so far behind its
    first time, row and column; `later` is not None for what lies on the same canvas as the span
    before it. `positions` int64 [4, T] (time, row, column, number) are set by `lay_out`.
    `content` names what the embeddings show, and `offset` the place of the first among all of it,
    so that what was read once is known again; empty where nobody knows. `repeats`: its first token
    has the position of the token before it.
    """

    tokens: tuple[int, ...]
    embeddings: Tensor | None = None
    block: bool = False
    grid: tuple[int, int] | None = None
    later: int | None = None
    positions: np.ndarray | None = None
    content: bytes = b""
    offset: int = 0
    joins: bool = False
    number: int | None = None
    real: int | None = None
    repeats: bool = False
    on_canvas: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_text(self) -> bool:
        """Return whether its tokens are looked up in the model's table."""
        return self.embeddings is None

    def cut(self, start: int, stop: int) -> Span:
        """A part of it, laid out as the whole was."""
        assert (self.grid is None and self.on_canvas is None) or self.positions is not None, (
            "a grid is laid out before it is cut"
        )
        return Span(
            self.tokens[start:stop],
            self.embeddings
            if self.embeddings is None or self.real is not None
            else self.embeddings[start:stop],
            self.block,
            None,
            self.later,
            None if self.positions is None else self.positions[:, start:stop],
            self.content,
            self.offset + start,
            self.joins,
            self.number,
            self.real,
        )


@dataclass(frozen=True)
class Seen:
    """A picture that tokens attend to: the token that stands for it, and how many of its rows are
    real, of all.
    """

    at: int
    real: int
    rows: int


def seen_in(spans: Sequence[Span], start: int = 0) -> tuple[Seen, ...]:
    """Return the pictures that tokens of these spans attend to; the first is token `start`."""
    result = []
    for span in spans:
        if span.real is not None:
            assert span.embeddings is not None
            result.append(Seen(start, span.real, len(span.embeddings)))
        start += len(span)
    return tuple(result)


def context_of(spans: Sequence[Span]) -> list[Tensor]:
    """Return the rows of those pictures as they are stored: what is real of each, then the rest."""
    shown = [(s.embeddings, s.real) for s in spans if s.real is not None]
    parts = [rows[:real] for rows, real in shown if rows is not None]
    return parts + [rows[real:] for rows, real in shown if rows is not None]


def sight(pictures: Sequence[Seen], token: int) -> tuple[int, int, int, int]:
    """Return the first and the last row that a token attends to, and whether it does at all and
    whether a picture stands before it.

    It sees the picture before it, and those before that one which stand next to it. Tokens before
    the first attend to all rows there are, padding among them: so does transformers' forward
    (5.23), whose feed-forward layers leave them out.
    """
    if not pictures:
        return 0, -1, 0, 0
    last = sum(picture.at <= token for picture in pictures) - 1
    if last < 0:
        return 0, sum(picture.rows for picture in pictures) - 1, 1, 0
    first = last
    while first and pictures[first - 1].at == pictures[first].at - 1:
        first -= 1
    ends = [0, *accumulate(picture.real for picture in pictures)]
    return ends[first], ends[last + 1] - 1, 1, 1


def lay_out(spans: Sequence[Span], position: int) -> tuple[list[Span], int]:
    """Spans with the positions of their tokens, the first of them at `position`, and the position
    that comes next (arXiv:2409.12191). Those that are laid out already stay where they are.
    """
    located = []
    began = position  # the clip that later parts belong to
    for span in spans:
        if span.positions is not None:
            positions = span.positions
        elif span.on_canvas is not None:
            began = position if span.later is None else began
            # No position is before the first token's, where a prompt begins with a canvas.
            positions = np.maximum(began + np.vstack((span.on_canvas, span.on_canvas[:1])), 0)
        elif span.grid is None:
            start = position - span.repeats if span.later is None else began + span.later
            positions = np.broadcast_to(
                np.arange(start, start + len(span), dtype=np.int64), (AXES, len(span))
            )
        else:
            rows, columns = span.grid
            cell = np.arange(rows * columns, dtype=np.int64)
            same = np.zeros_like(cell)
            if span.number is not None:
                positions = np.stack(
                    (position + cell, cell // columns, cell % columns, same + span.number)
                )
            else:
                began = position if span.later is None else began
                times = same + (span.later or 0)
                positions = began + np.stack((times, cell // columns, cell % columns, same))
        located.append(replace(span, grid=None, on_canvas=None, positions=positions))
        if len(span):
            behind = int(positions[:3].max()) + 1
            # What follows a clip is behind its last part, sound that ends early among them.
            clip = span.later is not None and span.on_canvas is None
            position = behind if clip else max(position, behind)
    return located, position


def cut(spans: Sequence[Span], limit: int) -> list[list[Span]]:
    """Spans in batches of at most `limit` tokens. Causal spans are cut where a batch is full; a
    block is not, its batch grows for it.
    """
    batches: list[list[Span]] = [[]]
    room = limit
    for unit in _units(spans):
        count = sum(map(len, unit))
        if unit[0].block:
            if room <= 0 or (batches[-1] and count > room):
                batches.append([])
                room = limit
            batches[-1] += [span.cut(0, len(span)) for span in unit]
            room -= count
            continue
        (rest,) = unit
        while len(rest):
            if room <= 0:
                batches.append([])
                room = limit
            taken = min(room, len(rest))
            batches[-1].append(rest.cut(0, taken))
            rest, room = rest.cut(taken, len(rest)), room - taken
    return [b for b in batches if b]


def _units(spans: Sequence[Span]) -> list[list[Span]]:
    """Return each causal span by itself, and those of a block together."""
    units: list[list[Span]] = []
    for span in spans:
        if span.joins and units:
            units[-1].append(span)
        else:
            units.append([span])
    return units


def identities(spans: Sequence[Span]) -> Iterator[bytes]:
    """Yield what makes each token what it is: its id, or the picture it shows and its place in it;
    in a block of several spans, all of these. Embeddings of unknown contents are like no others.
    """
    for unit in _units(spans):
        each = [identity for span in unit for identity in _identities(span)]
        if len(unit) > 1:
            whole = blake2b(digest_size=16)
            for identity in each:
                whole.update(b"%d:%s" % (len(identity), identity))
            each = [b"b%s/%d" % (whole.digest(), i) for i in range(len(each))]
        yield from each


def _identities(span: Span) -> Iterator[bytes]:
    if span.embeddings is None:
        yield from (b"t%d" % token for token in span.tokens)
    else:
        content = span.content or b"%d" % next(_UNKNOWN)
        if span.later is not None:  # the same frames at another time are something else
            content += b"@%d" % span.later
        if span.number is not None:
            content += b"#%d" % span.number
        yield from (b"i%s/%d" % (content, span.offset + i) for i in range(len(span)))


_UNKNOWN = count()


def blocks(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield where blocks begin and end (start, stop), counted over all the spans."""
    start = 0
    for unit in _units(spans):
        stop = start + sum(map(len, unit))
        if unit[0].block:
            yield start, stop
        start = stop


def stretch(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Tokens start..stop of all spans together."""
    at = 0
    for span in spans:
        first, last = max(start - at, 0), min(stop - at, len(span))
        if first < last:
            # A span that is wanted whole is passed on: cutting copies views of its embeddings.
            yield span if (first, last) == (0, len(span)) else span.cut(first, last)
        at += len(span)
